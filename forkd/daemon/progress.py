"""Progress of a verb as events of a stream: the verb never waits for the client, the newest word wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from forkd.daemon.wire import Emit
from forkd.ops.meter import ByteProgress

T = TypeVar("T")


async def with_progress(emit: Emit, work: Callable[[ByteProgress], Awaitable[T]]) -> T:
    """Run ``work(progress)``; its words reach the client as ``{"event": "progress", "step", "fraction"}``.

    Where it is known how many bytes a step has, ``total_bytes`` is there too.
    """
    latest: list[dict[str, Any]] = []
    news = trio.Event()
    results: list[T] = []
    errors: list[Exception] = []

    def progress(step: str, fraction: float | None, total_bytes: int | None = None) -> None:
        if latest and latest[-1]["step"] == step:
            latest.pop()
        event = {"event": "progress", "step": step, "fraction": fraction}
        latest.append(event if total_bytes is None else {**event, "total_bytes": total_bytes})
        news.set()

    async def send() -> None:
        nonlocal news
        while True:
            await news.wait()
            news = trio.Event()
            while latest:
                await emit(latest.pop(0))

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
