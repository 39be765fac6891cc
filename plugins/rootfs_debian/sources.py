"""Where Debian packages come from: the host's own apt sources, bent to the suite asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_ROLLING = ("sid", "unstable", "experimental")
_SUITE = re.compile(r"(?P<base>[a-z]+)(?P<pocket>-updates|-security|/updates|)")


@dataclass(frozen=True, slots=True)
class Source:
    """One ``deb`` line of apt."""

    uri: str
    suite: str
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def line(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options)
        return " ".join(["deb", *([f"[{options}]"] if options else []), self.uri, self.suite, *self.components])


def sources_for(suite: str, host: Iterable[Source]) -> list[Source]:
    """The sources to build ``suite`` from: the host's for that suite, else its other Debian ones with the suite put in.

    Third-party sources of the host are left out: only those whose suite is a release, its updates or its security
    pocket count. Empty where the host has none of them (it is not a Debian).
    """
    debian = [source for source in host if _SUITE.fullmatch(source.suite) and "main" in source.components]
    same = [source for source in debian if _base(source) == suite]
    if same or not debian:
        return same
    base = _base(debian[0])
    bent = [replace(source, suite=suite + _pocket(source)) for source in debian if _base(source) == base]
    return [source for source in bent if suite not in _ROLLING or source.suite == suite]


def read_host_sources(apt: Path = Path("/etc/apt")) -> list[Source]:
    """The host's binary package sources, from both of apt's file formats. Unreadable files count as absent."""
    found: list[Source] = []
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        if path.suffix == ".list":
            found += parse_list(text)
        elif path.suffix == ".sources":
            found += parse_deb822(text)
    return found


def parse_list(text: str) -> Iterator[Source]:
    """One-line format: ``deb [options] URI SUITE COMPONENT…``."""
    for line in text.splitlines():
        fields = re.fullmatch(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)(?:#.*)?", line)
        if fields:
            options = tuple(_option(word) for word in (fields[1] or "").split() if "=" in word)
            yield Source(fields[2], fields[3], tuple(fields[4].split()), options)


def parse_deb822(text: str) -> Iterator[Source]:
    """Paragraphs of ``Field: value``; a line that starts with a space goes on with the field above."""
    for paragraph in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and name:
                fields[name] += " " + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        signed = fields.get("signed-by", "")
        options = (("signed-by", signed),) if signed.startswith("/") and " " not in signed else ()
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Source(uri, suite, tuple(fields.get("components", "").split()), options)


def _base(source: Source) -> str:
    match = _SUITE.fullmatch(source.suite)
    assert match is not None
    return match["base"]


def _pocket(source: Source) -> str:
    return source.suite.removeprefix(_base(source))


def _option(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value
