"""Progress of a verb as events of a stream: the verb never waits for the client, the newest word wins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from forkd.daemon.wire import Emit
from forkd.runtime import Progress


@asynccontextmanager
async def progress_to(emit: Emit) -> AsyncIterator[Progress]:
    """A progress function whose calls reach the client as ``{"event": "progress", "step", "fraction"}``."""
    latest: list[tuple[str, float | None]] = []
    news = trio.Event()

    def progress(step: str, fraction: float | None) -> None:
        nonlocal news
        if latest and latest[-1][0] == step:
            latest.pop()
        latest.append((step, fraction))
        news.set()

    async def send() -> None:
        nonlocal news
        while True:
            await news.wait()
            news = trio.Event()
            while latest:
                step, fraction = latest.pop(0)
                await emit({"event": "progress", "step": step, "fraction": fraction})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        yield progress
        nursery.cancel_scope.cancel()
