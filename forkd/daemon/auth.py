"""Who may come in: named bearer tokens from a file, and for a daemon without tokens only what this host itself asks."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from urllib.parse import urlsplit

from forkd.specs.errors import BadInput, ForeignOrigin, TokenTooNarrow, Unauthorized

HUB = "hub"
"""The one scope a token can be narrowed to."""
MIN_LENGTH = 16
MIN_DISTINCT = 6
PLACEHOLDERS = ("replace_me", "change_me", "changeme", "your_token", "your-token")


class Tokens:
    """The tokens of a file: one a line, ``TOKEN`` or ``NAME TOKEN``; ``#`` begins a comment.

    ``NAME TOKEN hub`` is for a host that pulls from this one's registry: it reads what is below ``/hub/``, no more.
    """

    def __init__(self, path: str) -> None:
        """Read the file. Raises BadInput for a file or token that protects nothing."""
        self._path = path
        self._digests: dict[str, bytes] = {}
        self._narrow: set[str] = set()
        self.reload()

    def reload(self) -> None:
        """Read the file again; if it is no good any more, the tokens stay as they are and BadInput is raised."""
        digests: dict[str, bytes] = {}
        narrow: set[str] = set()
        for number, line in enumerate(_read(self._path).splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 3 or words[2:] not in ([], [HUB]):
                raise BadInput(f"{self._path}:{number}: neither TOKEN nor NAME TOKEN nor NAME TOKEN {HUB}")
            name, token = words[:2] if len(words) > 1 else ("default", words[0])
            if name in digests:
                raise BadInput(f"{self._path}:{number}: a second token named {name!r}", hint="write NAME TOKEN")
            _check_strength(f"{self._path}:{number}", token)
            digests[name] = _digest(token)
            if words[2:]:
                narrow.add(name)
        if not digests:
            raise BadInput(f"{self._path} has no token", hint="make one: openssl rand -hex 32")
        self._digests, self._narrow = digests, narrow

    def admit(self, header: str | None, method: str, path: str) -> str:
        """The name of the token behind a request. Raises Unauthorized, TokenTooNarrow."""
        name = self.name_of(header)
        if name in self._narrow and (method not in ("GET", "HEAD") or not path.startswith(f"/{HUB}/")):
            raise TokenTooNarrow(
                f"the token {name!r} only reads what is below /{HUB}/", hint="use a token without a scope for the API"
            )
        return name

    def name_of(self, header: str | None) -> str:
        """The name of the token in an Authorization header. Takes as long whichever fits. Raises Unauthorized."""
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("missing bearer token", hint="send the header Authorization: Bearer TOKEN")
        given, found = _digest(token.strip()), None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        if found is None:
            raise Unauthorized("invalid bearer token")
        return found


def check_local(host: str | None, origin: str | None) -> None:
    """Without tokens, refuse what a web page could make a browser send: a foreign origin, or a name bound to us.

    Raises ForeignOrigin.
    """
    if host is not None and not _is_local(f"//{host}"):
        raise ForeignOrigin(
            f"host {host[:80]!r} is not this machine's own name", hint="use 127.0.0.1, or start the daemon with tokens"
        )
    if origin is not None and not _is_local(origin):
        raise ForeignOrigin(f"a page of {origin[:80]!r} may not use this daemon")


def _is_local(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as source:
            if stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o007:
                raise BadInput(f"token file {path} can be read by everybody", hint=f"chmod 600 {path}")
            return source.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"token file {path} cannot be read: {error}") from error


def _check_strength(where: str, token: str) -> None:
    """Refuse a token that could be guessed."""
    if token.lower().startswith(PLACEHOLDERS):
        raise BadInput(f"{where}: the token is a placeholder", hint="make one: openssl rand -hex 32")
    if len(token.encode()) < MIN_LENGTH or len(set(token)) < MIN_DISTINCT:
        raise BadInput(
            f"{where}: the token is weak: it needs {MIN_LENGTH} bytes and {MIN_DISTINCT} different ones",
            hint="make one: openssl rand -hex 32",
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
