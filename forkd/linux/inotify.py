"""Wait for files to appear, woken by the kernel."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import trio

_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80


class FileWaiter:
    """Waits for any number of files at once. Its descriptors are kept for the next: closing one takes 10 ms."""

    def __init__(self) -> None:
        self._idle: list[int] = []

    async def wait(self, path: Path) -> None:
        """Return once ``path`` exists. Its directory must be there. Raises OSError."""
        fd = self._idle.pop() if self._idle else _open()
        try:
            # SAFETY: the path's bytes live for the whole call, which copies them.
            watch = _libc().inotify_add_watch(fd, os.fsencode(path.parent), _IN_CREATE | _IN_MOVED_TO)
            if watch < 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path.parent))
            try:
                while not path.exists():
                    await trio.lowlevel.wait_readable(fd)
                    _drain(fd)
            finally:
                # SAFETY: numbers only.
                _libc().inotify_rm_watch(fd, watch)
                _drain(fd)
        finally:
            self._idle.append(fd)

    def close(self) -> None:
        """Let go of the descriptors; nobody may be waiting."""
        while self._idle:
            os.close(self._idle.pop())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _open() -> int:
    # SAFETY: a number in, a descriptor of ours out.
    fd: int = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify is not to be had")
    return fd


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 65536):
            pass
    except BlockingIOError:
        return
