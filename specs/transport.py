"""Hub transports: how manifests and blobs reach a registry, by URL scheme."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol

Body = Callable[[int], AsyncGenerator[bytes, None]]
"""Bytes to send, from an offset on; may be asked for again when a transfer is retried."""

UpdateIndex = Callable[[bytes | None], bytes]
"""The new ``registry.json`` from the present one; may be called again if somebody else was quicker."""


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are to a registry: a bearer token, or a user with a password. Never shown, never sent elsewhere."""

    token: str | None = field(default=None, repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """A package of a registry: the registry's URL without a slash at its end, ``owner/name``, and who we are there."""

    base: str
    package: str
    login: Login | None = None


class HubTransport(Protocol):
    """One kind of registry. One object a process, safe for concurrent use; it keeps no state that must be closed.

    Retrying is the transport's business: what fails for a moment is tried again, from where it stopped if the other
    side can do that. Whether bytes are the right ones is the caller's: every blob is checked against its digest.
    All methods raise TransferError when retrying did not help, Unauthorized when we may not, NotFound when the thing
    is not there. On cancellation nothing is left that others could take for a whole thing.
    """

    schemes: tuple[str, ...]

    async def index(self, base: str, login: Login | None) -> bytes | None:
        """What the registry at ``base`` offers, as ``registry.json``; None if it can be reached but has no index."""

    async def manifest(self, place: Place, version: str, limit: int) -> bytes:
        """The manifest of a version with its signatures. Raises NotFound, TransferError if it is over ``limit``."""

    async def blob_size(self, place: Place, sha256: str) -> int | None:
        """The size of a blob that is there, or None."""

    async def mount_blob(self, place: Place, sha256: str, other: str) -> bool:
        """Make a blob of the package ``other`` of the same registry one of this package too, without sending it.

        Whether that was done. Registries where all packages share their blobs have nothing to do: False.
        """

    def read_blob(self, place: Place, sha256: str, size: int, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The blob's bytes from ``offset`` to ``size``, never more; the caller closes the iterator."""

    async def write_blob(self, place: Place, sha256: str, size: int, body: Body) -> None:
        """Store a blob; it is visible only when whole."""

    async def publish(
        self, place: Place, version: str, manifest: bytes, blobs: dict[str, int], update: UpdateIndex
    ) -> None:
        """Make ``version`` point at ``manifest``, whose ``blobs`` (size by SHA-256) are all there. This is the commit.

        Registries that are files replace their index by what ``update`` makes of it, against others doing the same.
        """

    def read_file(self, url: str, login: Login | None, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """A whole pack file by its own URL, from ``offset`` on. Raises BadInput where there is no such thing."""

    async def write_file(self, url: str, login: Login | None, size: int, body: Body) -> None:
        """Store a whole pack file at its own URL. Raises BadInput where there is no such thing."""
