"""Wait for a file to appear, woken by the kernel."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import trio

_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80


async def wait_for_file(path: Path) -> None:
    """Return once ``path`` exists. Its directory must be there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    # SAFETY: numbers only; the descriptor returned is ours and closed below.
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify is not to be had")
    try:
        # SAFETY: the path's bytes live for the whole call, which copies them.
        if libc.inotify_add_watch(fd, os.fsencode(path.parent), _IN_CREATE | _IN_MOVED_TO) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path.parent))
        while not path.exists():
            await trio.lowlevel.wait_readable(fd)
            os.read(fd, 65536)
    finally:
        os.close(fd)
