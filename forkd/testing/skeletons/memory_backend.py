"""Memory backend: the image file, read ahead into the page cache before children map it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import trio

from forkd.specs.engine import MemoryImage
from forkd.specs.hookspecs import hookimpl
from forkd.specs.memory import MemoryBackend, MemoryLease

forkd_contract = 1


class SkeletonMemoryBackend:
    """Holds nothing: the page cache is the kernel's."""

    name = "skeleton_memory_backend"

    async def lease(self, image: Path, size: int, *, hugepages: bool) -> MemoryLease:
        """The path as it is, its contents on their way into memory."""
        await trio.to_thread.run_sync(_read_ahead, image)
        warnings = ("this backend has no huge pages; using 4 KiB pages",) if hugepages else ()
        return MemoryLease(MemoryImage(str(image), size), warnings)

    def close(self) -> None:
        """Nothing is held."""


def _read_ahead(image: Path) -> None:
    descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


@hookimpl
def forkd_register_memory_backends(register: Callable[[MemoryBackend], None]) -> None:
    """Called once at start."""
    register(SkeletonMemoryBackend())
