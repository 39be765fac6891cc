"""An exclusive lock between processes: ``flock(2)`` on a file, waited for without blocking the loop."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio


@asynccontextmanager
async def file_lock(path: Path, *, make: bool = True) -> AsyncIterator[None]:
    """Hold the lock at ``path`` (made if absent, or else FileNotFoundError). The kernel drops it when the holder dies.

    It also excludes other tasks of this process. On cancellation while waiting, the lock is not held afterwards.
    """
    waiting = _Waiting(os.open(path, os.O_RDWR | (os.O_CREAT if make else 0) | os.O_CLOEXEC, 0o600))
    try:
        await trio.to_thread.run_sync(waiting.acquire, abandon_on_cancel=True)
        yield
    finally:
        waiting.close()


class _Waiting:
    """A descriptor that a thread may still be blocked on when its owner leaves; whoever is last closes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._guard = threading.Lock()
        self._in_thread = False
        self._left = False

    def acquire(self) -> None:
        with self._guard:
            if self._left:
                return
            self._in_thread = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        finally:
            self._leave_thread()

    def _leave_thread(self) -> None:
        with self._guard:
            self._in_thread = False
            if self._left:
                os.close(self._descriptor)

    def close(self) -> None:
        with self._guard:
            self._left = True
            if not self._in_thread:
                os.close(self._descriptor)
