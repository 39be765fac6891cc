"""Hub transports: how bytes of packs reach a registry, by URL scheme."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class HubTransport(Protocol):
    """Reads and writes named blobs under a base URL. One object per process, safe for concurrent use."""

    schemes: tuple[str, ...]

    async def size(self, base: str, name: str) -> int | None:
        """The blob's size in bytes, or None if it is not there. Raises TransferError."""

    def read(self, base: str, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The blob's bytes from ``offset``. Raises NotFound, TransferError. Retries are the transport's business."""

    async def write(self, base: str, name: str, size: int, body: AsyncIterator[bytes]) -> None:
        """Store a blob of exactly ``size`` bytes; visible only when whole. Raises TransferError, Unauthorized."""
