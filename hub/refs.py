"""References, as people write them after ``pull`` and ``push``: a package of a registry, or the URL of a pack."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from forkd.specs.errors import BadInput, BadTag
from forkd.specs.tags import check_tag

LATEST = "latest"
_URL = re.compile(r"([a-z][a-z0-9+.-]*):(.+)", re.DOTALL)
_HINT = "write OWNER/NAME[@VERSION], a registry's URL followed by that, or the URL of a pack"


@dataclass(frozen=True, slots=True)
class Ref:
    """A package version of the registry at ``base``; or, with ``pack_url``, a pack file at its own URL."""

    base: str
    package: str = ""
    version: str = LATEST
    pack_url: str | None = None

    @property
    def scheme(self) -> str:
        """Which transport it is for."""
        return scheme_of(self.pack_url or self.base)

    def __str__(self) -> str:
        return shown(self.pack_url or f"{self.base}/{self.package}@{self.version}")


def parse(text: str, hub: str | None) -> Ref:
    """A reference; short ones are of the registry ``hub``. Raises BadInput with how to write it."""
    if not text or len(text) > 4096 or any(not char.isprintable() or char == " " for char in text):
        raise BadInput(f"{text[:80]!r} is not a reference", hint=_HINT)
    if _URL.fullmatch(text) is None:
        if hub is None:
            raise BadInput(
                f"{text!r} is a package, but no registry is given",
                hint="give --hub URL, or set FORKD_HUB_URL",
            )
        return Ref(base_url(hub), *_package(text))
    try:
        parts_of_url = urlsplit(text)
    except ValueError as error:
        raise BadInput(f"{text[:80]!r} is not a URL: {error}", hint=_HINT) from error
    if parts_of_url.query or parts_of_url.path.endswith(".tar.zst"):
        return Ref("", pack_url=text)
    parts = text.rsplit("/", 2)
    if len(parts) < 3:
        raise BadInput(f"{text!r} names no package", hint=_HINT)
    return Ref(base_url(parts[0]), *_package("/".join(parts[1:])))


def base_url(text: str) -> str:
    """A registry's URL without slashes at its end. Raises BadInput."""
    if _URL.fullmatch(text) is None:
        raise BadInput(
            f"{text!r} is not a registry's URL", hint="for example file:/srv/hub, https://HOST/hub, oci://HOST"
        )
    return text.rstrip("/")


def shown(url: str) -> str:
    """A URL without a password in it: it is told, and kept with what was pulled."""
    return re.sub(r"(?<=://)[^/@]*@", "", url, count=1)


def scheme_of(url: str) -> str:
    """The scheme of a URL."""
    return url.partition(":")[0]


def check_package(package: str) -> str:
    """Return ``owner/name`` if it is one. Raises BadInput."""
    parts = package.split("/")
    if len(parts) != 2:
        raise BadInput(f"{package[:80]!r} is not OWNER/NAME", hint=_HINT)
    try:
        for part in parts:
            check_tag(part, "package name")
    except BadTag as error:
        raise BadInput(error.message, hint=error.hint) from error
    return package


def _package(text: str) -> tuple[str, str]:
    package, at, version = text.partition("@")
    if at:
        check_tag(version, "version")
    return check_package(package), version or LATEST
