"""Memory backends: how a child's RAM is provided."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forkd.specs.engine import MemoryImage


@dataclass(frozen=True, slots=True)
class MemoryLease:
    """A memory image ready to be mapped, and what the user should know about it (a fall-back, for example)."""

    image: MemoryImage
    warnings: tuple[str, ...] = field(default=())


class MemoryBackend(Protocol):
    """Turns an image file into something a VMM can map privately. One object per process."""

    name: str

    async def lease(self, image: Path, size: int, *, hugepages: bool) -> MemoryLease:
        """Provide ``image``; a second call for the same unchanged file shares what the first one made.

        Whatever is held stays valid until ``close``; machines already restored do not depend on it. Raises NoSpace or
        HostNotReady. On cancellation nothing half-made is kept.
        """

    def close(self) -> None:
        """Let go of everything held."""
