"""Names of images in registries: ``[oci://][HOST[:PORT]/]NAME[:TAG][@DIGEST]``."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from forkd.specs.errors import BadInput

DEFAULT_REGISTRY = "docker.io"
SCHEMES = ("oci://", "docker://")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:(?P<host>{_HOST})/)??(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """An image in a registry. ``version`` is its digest where the reference has one, else its tag."""

    host: str
    name: str
    version: str

    @property
    def pinned(self) -> bool:
        """Whether it names contents and not a place where contents change."""
        return self.version.startswith("sha256:")

    @property
    def base_url(self) -> str:
        """Where the registry's API is: plain HTTP for this very machine only."""
        host = "registry-1.docker.io" if self.host == DEFAULT_REGISTRY else self.host
        return f"{'http' if is_loopback(_name_of(self.host)) else 'https'}://{host}/v2/{self.name}"

    def __str__(self) -> str:
        return f"{self.host}/{self.name}{'@' if self.pinned else ':'}{self.version}"


def parse_reference(text: str) -> Reference | None:
    """The reference, or None where ``text`` cannot be one. FORKD_REGISTRY names the registry of bare names."""
    for scheme in SCHEMES:
        text = text.removeprefix(scheme)
    match = _REFERENCE.fullmatch(text) if len(text) <= 512 else None
    if match is None:
        return None
    host, name = match["host"], match["name"]
    if host is None and "/" in name:
        first, _, rest = name.partition("/")
        if "." in first or first == "localhost":
            host, name = first, rest
    elif host is not None and not _looks_like_host(host):
        host, name = None, f"{host}/{name}"
    if host is None:
        host = os.environ.get("FORKD_REGISTRY") or DEFAULT_REGISTRY
    if host == DEFAULT_REGISTRY and "/" not in name:
        name = f"library/{name}"
    return Reference(host, name, match["digest"] or match["tag"] or "latest")


def require_reference(text: str) -> Reference:
    """The reference, or BadInput."""
    found = parse_reference(text)
    if found is None:
        raise BadInput(f"{text[:200]!r} is no image reference", hint="for example oci://HOST/NAME:TAG")
    return found


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine by its form alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    return re.sub(r":[0-9]+$", "", host)


def _looks_like_host(text: str) -> bool:
    return "." in text or ":" in text or text == "localhost"
