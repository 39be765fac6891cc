"""What happened, told to whoever wants to know: a bounded broadcast that never waits for a slow listener."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

Event = dict[str, Any]
Listener = Callable[[Event], None]
KEPT = 1000
BEHIND = 1000


class Subscription:
    """Events in order, as an async iterator. One that falls behind loses the oldest and is told how many."""

    def __init__(self, limit: int = BEHIND) -> None:
        self._waiting: deque[Event] = deque()
        self._limit = limit
        self._lost = 0
        self._news = trio.Event()

    def put(self, event: Event) -> None:
        """Queue an event, at the cost of the oldest if there are too many."""
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(event)
        self._news.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            self._news = trio.Event()
            await self._news.wait()
        if self._lost:
            lost, self._lost = self._lost, 0
            return {"event": "lost", "count": lost, "time": round(time.time(), 3)}
        return self._waiting.popleft()


class Events:
    """Every event gets a number (``seq``) and the time; the last thousand are kept for those who come late."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._listeners: list[Listener] = []
        self._subscriptions: set[Subscription] = set()

    def publish(self, kind: str, **details: Any) -> Event:
        """Tell everybody; returns the event. Never blocks."""
        event = {"seq": next(self._numbers), "time": round(time.time(), 3), "event": kind, **details}
        self._kept.append(event)
        for listener in self._listeners:
            listener(event)
        for subscription in self._subscriptions:
            subscription.put(event)
        return event

    def listen(self, listener: Listener) -> None:
        """Call ``listener(event)`` for every event from now on; it must neither block nor raise."""
        self._listeners.append(listener)

    @contextmanager
    def subscribe(self, since: int | None = None) -> Iterator[Subscription]:
        """Events from now on, or from those kept with a number above ``since``."""
        subscription = Subscription()
        if since is not None:
            for event in self._kept:
                if event["seq"] > since:
                    subscription.put(event)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
