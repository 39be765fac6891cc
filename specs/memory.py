"""Memory backends: how a child's RAM is provided."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forkd.specs.engine import MemoryImage


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class MemoryLease:
    """A memory image ready to be mapped, and what the user should know about it (a fall-back, for example).

    The image can be mapped for as long as the lease is held: keep the object until every machine has started.
    """

    image: MemoryImage
    warnings: tuple[str, ...] = field(default=())


class MemoryBackend(Protocol):
    """Turns an image file into something a VMM can map privately. One object per process."""

    name: str

    async def lease(self, image: Path, size: int, *, hugepages: bool) -> MemoryLease:
        """Provide ``image``; a second call for the same unchanged file shares what the first one made.

        What it stands for is let go of when nobody holds the lease and the backend no longer remembers it; machines
        already restored do not depend on it. Raises NoSpace or HostNotReady. On cancellation nothing half-made is kept.
        """

    def close(self) -> None:
        """Remember nothing any more. May be called twice."""
