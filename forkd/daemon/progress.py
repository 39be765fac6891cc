"""Progress of a verb as events of a stream: the verb never waits for the client, the newest word wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from forkd.daemon.wire import Emit
from forkd.runtime import Progress

T = TypeVar("T")


async def with_progress(emit: Emit, work: Callable[[Progress], Awaitable[T]]) -> T:
    """Run ``work(progress)``; its words reach the client as ``{"event": "progress", "step", "fraction"}``."""
    latest: list[tuple[str, float | None]] = []
    news = trio.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def progress(step: str, fraction: float | None) -> None:
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
        try:
            results.append(await work(progress))
        except Exception as error:  # raised below as it is, not as a group
            errors.append(error)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    return results[0]
