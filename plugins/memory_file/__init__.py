"""Memory backend plugin: the image file itself, mapped privately; the page cache is what children share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forkd.specs.engine import MemoryImage
from forkd.specs.hookspecs import hookimpl
from forkd.specs.memory import MemoryBackend, MemoryLease


class FileBackend:
    """Nothing to hold: a path is enough."""

    name = "file"

    async def lease(self, image: Path, size: int, *, hugepages: bool) -> MemoryLease:
        """The file as it is."""
        warnings = ("huge pages need the memfd backend (live_fork); using 4 KiB pages",) if hugepages else ()
        return MemoryLease(MemoryImage(str(image), size), warnings)

    def close(self) -> None:
        """Nothing is held."""


@hookimpl
def forkd_register_memory_backends(register: Callable[[MemoryBackend], None]) -> None:
    """Hand over the backend."""
    register(FileBackend())
