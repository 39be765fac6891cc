"""A Dockerfile as a recipe: FROM, RUN, COPY, ENV, WORKDIR and USER; whatever else it says is refused by name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from forkd.sdk.recipe import SHELL, Defaults, Files, Recipe, Run, Step, local_files
from forkd.specs.errors import BadInput

KNOWN = ("FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER")
WITHOUT_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""About starting containers; a snapshot runs already. Accepted, so that ordinary files work."""


def read_dockerfile(path: Path, context: Path | None = None) -> Recipe:
    """The recipe a Dockerfile describes; COPY takes from ``context`` (its own directory). Raises BadInput."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    image, steps, folder = None, list[Step](), context or path.parent
    for number, word, rest in _instructions(text):
        where = f"{path}:{number}"
        if word in WITHOUT_EFFECT:
            continue
        if word not in KNOWN:
            raise BadInput(f"{where}: {word} is not understood", hint=f"there are: {', '.join(KNOWN)}")
        if not rest:
            raise BadInput(f"{where}: {word} says nothing")
        if (word == "FROM") != (image is None):
            raise BadInput(f"{where}: one FROM is needed, as the first instruction", hint="stages are not supported")
        if word == "FROM":
            if len(rest.split()) != 1:
                raise BadInput(f"{where}: FROM takes one image and nothing else", hint="stages are not supported")
            image = rest
        elif word == "RUN":
            steps.append(Run(_command(rest, where)))
        elif word == "COPY":
            steps.append(_copy(rest, folder, where))
        elif word == "ENV":
            steps.append(Defaults(env=_variables(rest, where), expand=True))
        elif word == "WORKDIR":
            steps.append(Defaults(workdir=rest, expand=True))
        else:
            steps.append(Defaults(user=rest, expand=True))
    if image is None:
        raise BadInput(f"{path} has no FROM")
    return Recipe(name=None, image=image, steps=tuple(steps))


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, instruction and the rest; continued lines as one, comments left out."""
    number, begun, lines = 0, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or lines):
            continue
        begun = begun if lines else number
        goes_on = line.rstrip().endswith("\\")
        lines.append(line.rstrip().removesuffix("\\") if goes_on else line)
        if not goes_on:
            yield begun, *_instruction("".join(lines))
            lines = []
    if lines:
        yield begun or number, *_instruction("".join(lines))


def _instruction(line: str) -> tuple[str, str]:
    word, *rest = line.split(None, 1)
    return word.upper(), rest[0].strip() if rest else ""


def _command(rest: str, where: str) -> tuple[str, ...]:
    if rest.startswith("--"):
        raise BadInput(f"{where}: flags of RUN are not understood: {rest.split()[0]}")
    if rest.startswith("["):
        return tuple(_json_words(rest, where))
    return (*SHELL, rest)


def _copy(rest: str, context: Path, where: str) -> Files:
    words = _json_words(rest, where) if rest.startswith("[") else shlex.split(rest)
    if any(word.startswith("--") for word in words):
        raise BadInput(f"{where}: flags of COPY are not understood", hint="change owners with RUN chown")
    if len(words) < 2:
        raise BadInput(f"{where}: COPY needs a source and a target")
    if any("$" in word for word in words):
        raise BadInput(f"{where}: variables in COPY are not understood", hint="copy to . after a WORKDIR that has them")
    *sources, target = words
    folder = len(sources) > 1 or target.endswith(("/", "/.")) or target in (".", "..")
    into = f"{target.rstrip('/')}/" if folder else target
    pairs = [pair for source in sources for pair in local_files(context, source.lstrip("/"), into)]
    return Files(tuple(pairs))


def _variables(rest: str, where: str) -> dict[str, str]:
    """``NAME=value NAME="other value"``, or the old ``NAME value``."""
    if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", rest):
        name, *value = rest.split(None, 1)
        if not value:
            raise BadInput(f"{where}: ENV {name} has no value")
        return {name: value[0]}
    pairs = [word.partition("=") for word in shlex.split(rest)]
    if not all(equals for _, equals, _ in pairs):
        raise BadInput(f"{where}: ENV has a word that sets nothing")
    return {name: value for name, _, value in pairs}


def _json_words(rest: str, where: str) -> list[str]:
    try:
        words = json.loads(rest)
    except ValueError as error:
        raise BadInput(f"{where}: the list is not JSON: {error}") from error
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise BadInput(f"{where}: the list has to be of strings")
    return words
