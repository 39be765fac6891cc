"""What happened, for who wants to follow it: events of all sandboxes or of one, and a sandbox's console."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forkd.events import Event
from forkd.runtime import Runtime


@asynccontextmanager
async def follow_events(
    runtime: Runtime, since: int | None = None, sandbox_id: str | None = None
) -> AsyncIterator[AsyncIterator[Event]]:
    """Events from now on, or from those still kept behind number ``since``; of one sandbox if it is named."""
    with runtime.events.subscribe(since) as events:
        yield _Chosen(events, sandbox_id)


class _Chosen:
    def __init__(self, events: AsyncIterator[Event], sandbox_id: str | None) -> None:
        self._events = events
        self._sandbox_id = sandbox_id

    def __aiter__(self) -> _Chosen:
        return self

    async def __anext__(self) -> Event:
        while True:
            event = await anext(self._events)
            if self._sandbox_id is None or event.get("id") == self._sandbox_id or event["event"] == "lost":
                return event
