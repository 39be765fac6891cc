"""What the groups of SDK methods build on: one call, one stream of events, one channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx

from forkd.sdk.async_channel import Channel


class Caller(ABC):
    """The part of a controller that its groups of methods share."""

    _client: httpx.AsyncClient

    @abstractmethod
    async def _call(
        self, method: str, path: str, body: Any = None, params: dict[str, str] | None = None, lasts: float = 0.0
    ) -> Any:
        """One request and its JSON answer."""

    @abstractmethod
    async def _events(
        self,
        path: str,
        body: Any,
        on_event: Callable[[dict[str, Any]], None],
        method: str = "POST",
        params: dict[str, str] | None = None,
    ) -> Any:
        """A request answered by events; the result in the last one."""

    @abstractmethod
    async def _channel(self, path: str, params: dict[str, str] | None = None) -> Channel:
        """A request that becomes messages both ways."""

    @abstractmethod
    async def _bytes(self, request: httpx.Request) -> httpx.Response:
        """A request answered by bytes as they come; the caller closes the answer."""


def part(text: str) -> str:
    """One component of a path."""
    return quote(text, safe="")


def flags(**values: Any) -> dict[str, str]:
    """Query parameters; those that are None or False are left out."""
    said = {name: value for name, value in values.items() if value is not None and value is not False}
    return {name: "true" if value is True else str(value) for name, value in said.items()}
