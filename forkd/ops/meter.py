"""Bytes counted by threads and tasks, told as progress a few times a second."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

INTERVAL = 0.2


class ByteProgress(Protocol):
    """Progress that may know how many bytes there are in all, so that clients can show a rate."""

    def __call__(self, step: str, fraction: float | None, total_bytes: int | None = None) -> None:
        """Tell where ``step`` is; called in the loop's own thread."""


class Meter:
    """Counts the bytes of one step."""

    def __init__(self, total: int) -> None:
        self._total = max(1, total)
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """That many bytes more (or fewer, where something begins again). From any thread."""
        with self._lock:
            self._done += count

    @property
    def fraction(self) -> float:
        """How much of it is done."""
        return min(1.0, self._done / self._total)


@asynccontextmanager
async def metered(progress: ByteProgress, step: str, total: int) -> AsyncIterator[Meter]:
    """A meter whose state is told as ``step`` while the block runs."""
    meter = Meter(total)

    async def tell() -> None:
        while True:
            progress(step, meter.fraction, total)
            await trio.sleep(INTERVAL)

    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        try:
            yield meter
        except Exception as error:  # raised below as it is, not as a group
            errors.append(error)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    progress(step, 1.0, total)
