"""Wait for a file to appear, woken by the kernel, or by the end of the process that should make it."""

from __future__ import annotations

import ctypes
import os
import select
from functools import cache
from pathlib import Path

import trio

_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80


class FileWaiter:
    """Waits for any number of files at once. Its descriptors are kept for the next: closing one takes 10 ms."""

    def __init__(self) -> None:
        self._idle: list[_Watcher] = []

    async def wait(self, directory: Path, name: str, pidfd: int) -> bool:
        """Return True once there is ``name`` in ``directory``, False if the process ended before. Raises OSError."""
        watcher = self._idle.pop() if self._idle else _Watcher()
        try:
            return await watcher.wait(os.fspath(directory), name, pidfd)
        finally:
            self._idle.append(watcher)

    def close(self) -> None:
        """Let go of the descriptors; nobody may be waiting."""
        while self._idle:
            self._idle.pop().close()


class _Watcher:
    """One inotify descriptor, and an epoll set of it and of the process that is waited for: one thing to wait on."""

    def __init__(self) -> None:
        # SAFETY: a number in, a descriptor of ours out.
        self._fd: int = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify is not to be had")
        self._set = select.epoll()
        self._set.register(self._fd, select.EPOLLIN)

    async def wait(self, directory: str, name: str, pidfd: int) -> bool:
        # SAFETY: the path's bytes live for the whole call, which copies them.
        watch = _libc().inotify_add_watch(self._fd, os.fsencode(directory), _IN_CREATE | _IN_MOVED_TO)
        if watch < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), directory)
        self._set.register(pidfd, select.EPOLLIN)
        try:
            path, ended = os.path.join(directory, name), False
            while not os.path.exists(path):
                if ended:
                    return False
                await trio.lowlevel.wait_readable(self._set.fileno())
                ended = any(number == pidfd for number, _ in self._set.poll(0))
                self._drain()
            return True
        finally:
            self._set.unregister(pidfd)
            # SAFETY: numbers only.
            _libc().inotify_rm_watch(self._fd, watch)
            self._drain()

    def close(self) -> None:
        self._set.close()
        os.close(self._fd)

    def _drain(self) -> None:
        """Take what is queued: one read gets all of the few events of a new directory; more would only wake again."""
        try:
            os.read(self._fd, 65536)
        except BlockingIOError:
            return


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
