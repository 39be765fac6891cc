"""Recipes of parents: an image and the steps that make it warm, read from TOML or from a Dockerfile."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forkd.specs.errors import BadInput

RUN_SECONDS = 1800.0
MAX_FILE = 256 << 20
SHELL = ("sh", "-c")


@dataclass(frozen=True, slots=True)
class Run:
    """A command that must end with 0."""

    args: tuple[str, ...]
    timeout_secs: float = RUN_SECONDS

    def title(self) -> str:
        return _short(f"run {self.args[-1] if self.args[:2] == SHELL else ' '.join(self.args)}")

    def facts(self) -> Any:
        return ["run", self.args]


@dataclass(frozen=True, slots=True)
class Files:
    """Files of the host put into the guest: pairs of local file and guest path; ``text`` stands for a local file."""

    pairs: tuple[tuple[Path | str, str, int], ...]

    def title(self) -> str:
        return f"copy to {self.pairs[0][1]}" + (f" and {len(self.pairs) - 1} more" if len(self.pairs) > 1 else "")

    def facts(self) -> Any:
        return ["files", [[hashlib.sha256(read_file(source)).hexdigest(), *rest] for source, *rest in self.pairs]]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Code run in the warm interpreter; what it leaves in memory is there in every child."""

    code: str
    timeout_secs: float = RUN_SECONDS

    def title(self) -> str:
        return _short(f"eval {self.code}")

    def facts(self) -> Any:
        return ["eval", self.code]


@dataclass(frozen=True, slots=True)
class Defaults:
    """New defaults of commands, for later steps and for children. ``expand``: ``$NAME`` stands for a variable."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    expand: bool = False

    def title(self) -> str:
        words = [*(f"{name}={value}" for name, value in self.env.items()), self.workdir, self.user]
        return _short("set " + " ".join(word for word in words if word))

    def facts(self) -> Any:
        return ["defaults", self.env, self.workdir, self.user, self.expand]


@dataclass(frozen=True, slots=True)
class Warm:
    """A process by the warm-up contract; with ``lang``, evals go to it."""

    args: tuple[str, ...]
    lang: str | None = None
    timeout_secs: float = 60.0

    def title(self) -> str:
        return _short(f"warm {' '.join(self.args)}")

    def facts(self) -> Any:
        return ["warm", self.args, self.lang]


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold in a child before the recipe counts as built: asked again and again until it does."""

    run: tuple[str, ...] | None = None
    eval: str | None = None
    expect: Any = None
    timeout_secs: float = 60.0


Step = Run | Files | Evaluate | Defaults | Warm


@dataclass(frozen=True, slots=True)
class Recipe:
    """A parent to be built."""

    name: str | None
    image: str
    packages: tuple[str, ...] = ()
    size_mib: int = 1536
    mem_mib: int = 512
    vcpus: int = 1
    steps: tuple[Step, ...] = ()
    ready: Check | None = None


def read_file(source: Path | str) -> bytes:
    """A file of the host, or text as it is. Raises BadInput."""
    if isinstance(source, str):
        return source.encode()
    try:
        if source.stat().st_size > MAX_FILE:
            raise BadInput(f"{source} has more than {MAX_FILE >> 20} MiB", hint="put it into the image")
        return source.read_bytes()
    except OSError as error:
        raise BadInput(f"{source} cannot be read: {error.strerror}") from error


def step_key(before: str, step: Step) -> str:
    """The name of the state after ``step``, given the name of the state before it."""
    return hashlib.sha256(f"{before}{json.dumps(step.facts())}".encode()).hexdigest()


def _short(text: str) -> str:
    """One line of at most 80 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:79]}…"


# -- TOML ------------------------------------------------------------------------------------------------------------


class _StepTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    run: str | list[str] | None = None
    copy: str | None = None
    write: str | None = None
    to: str | None = None
    mode: str | None = None
    eval: str | None = None
    warm: list[str] | None = None
    lang: str | None = None
    env: dict[str, str] | None = None
    workdir: str | None = None
    user: str | None = None
    timeout_secs: float | None = None


class _ReadyTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    run: str | list[str] | None = None
    eval: str | None = None
    expect: Any = None
    timeout_secs: float = 60.0


class _RecipeTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    image: str
    name: str | None = None
    packages: list[str] = []
    size_mib: int = 1536
    mem_mib: int = 512
    vcpus: int = 1
    step: list[_StepTable] = []
    ready: _ReadyTable | None = None
    about: str = ""


def read_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file; files it copies are named relative to it. Raises BadInput with the place."""
    try:
        table = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _RecipeTable)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{path}: {error}", hint="see recipes/README.md for what a recipe has") from error
    steps = [_step(row, path.parent, f"{path}: step {number}") for number, row in enumerate(table.step, 1)]
    ready = None
    if table.ready is not None:
        if (table.ready.run is None) == (table.ready.eval is None):
            raise BadInput(f"{path}: ready has to have either run or eval")
        args = _args(table.ready.run) if table.ready.run is not None else None
        ready = Check(args, table.ready.eval, table.ready.expect, table.ready.timeout_secs)
    return Recipe(
        name=table.name or path.stem,
        image=table.image,
        packages=tuple(table.packages),
        size_mib=table.size_mib,
        mem_mib=table.mem_mib,
        vcpus=table.vcpus,
        steps=tuple(steps),
        ready=ready,
    )


_BESIDE = {
    "run": ("timeout_secs",),
    "eval": ("timeout_secs",),
    "warm": ("lang", "timeout_secs"),
    "copy": ("to", "mode"),
    "write": ("to", "mode"),
    "env": ("workdir", "user"),
}
"""What a step of each kind may say besides."""


def _step(row: _StepTable, folder: Path, where: str) -> Step:
    kinds = [name for name in ("run", "copy", "write", "eval", "warm") if getattr(row, name) is not None]
    if len(kinds) > 1:
        raise BadInput(f"{where} is two things at once: {' and '.join(kinds)}", hint="make it two steps")
    kind = kinds[0] if kinds else "env"
    given = [name for name in row.__struct_fields__ if getattr(row, name) is not None]
    if not given:
        raise BadInput(f"{where} does nothing", hint="run, copy, write, eval, warm; or env, workdir, user")
    if strange := [name for name in given if name not in (kind, *_BESIDE[kind])]:
        raise BadInput(
            f"{where}: {strange[0]} has no effect beside {kind}", hint="env, workdir and user are steps of their own"
        )
    if row.run is not None:
        return Run(_args(row.run), row.timeout_secs or RUN_SECONDS)
    if row.eval is not None:
        return Evaluate(row.eval, row.timeout_secs or RUN_SECONDS)
    if row.warm is not None:
        return Warm(tuple(row.warm), row.lang, row.timeout_secs or 60.0)
    if row.copy is not None or row.write is not None:
        if row.to is None or not row.to.startswith("/"):
            raise BadInput(f"{where} has to say where `to`: a path that starts with /")
        if row.write is not None:
            return Files(((row.write, row.to, _mode(row.mode, where) or 0o644),))
        assert row.copy is not None
        return Files(tuple(local_files(folder, row.copy, row.to, _mode(row.mode, where))))
    return Defaults(row.env or {}, row.workdir, row.user)


def _args(command: str | list[str]) -> tuple[str, ...]:
    return (*SHELL, command) if isinstance(command, str) else tuple(command)


def _mode(text: str | None, where: str) -> int | None:
    try:
        return None if text is None else int(text, 8) & 0o7777
    except ValueError as error:
        raise BadInput(f"{where}: mode {text!r} is not octal", hint='for example mode = "0755"') from error


def local_files(context: Path, source: str, target: str, mode: int | None = None) -> list[tuple[Path, str, int]]:
    """Files named by ``source`` (a file, a directory or a pattern) below ``context``, with their paths in the guest.

    A directory gives its contents. Raises BadInput for nothing at all, and for what is not below ``context``.
    """
    root = context.resolve()
    try:
        found = sorted(context.glob(source)) if any(mark in source for mark in "*?[") else [context / source]
    except (NotImplementedError, ValueError) as error:  # a pattern that begins with /, or has ** in a name
        raise BadInput(f"{source!r} is no pattern below {context}: {error}") from error
    pairs: list[tuple[Path, str, int]] = []
    for path in found:
        if not path.resolve().is_relative_to(root):
            raise BadInput(f"{source!r} is not below {context}")
        into = target.endswith("/") or len(found) > 1
        if path.is_dir():
            below = sorted(each for each in path.rglob("*") if each.is_file())
            pairs += [(each, f"{target.rstrip('/')}/{each.relative_to(path)}", _own(each, mode)) for each in below]
        elif path.is_file():
            pairs.append((path, f"{target.rstrip('/')}/{path.name}" if into else target, _own(path, mode)))
    if not pairs:
        raise BadInput(f"there is no file {source!r} below {context}")
    for path, _, _ in pairs:
        if not path.resolve().is_relative_to(root):
            raise BadInput(f"{path} leads out of {context}")
    return pairs


def _own(path: Path, mode: int | None) -> int:
    return path.stat().st_mode & 0o777 if mode is None else mode
