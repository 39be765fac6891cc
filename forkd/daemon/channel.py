"""WebSockets: a request that turns into messages both ways, with the same errors as everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from forkd.daemon.api import ApiRoute, Errors, route
from forkd.daemon.wire import error_body
from forkd.specs.errors import ForeignOrigin, ForkdError, UpgradeRequired

FAILED = 1011
Message = bytes | dict[str, Any]


def check_origin(websocket: WebSocket, *, or_confined: bool = False) -> None:
    """Refuse a WebSocket opened by a web page of somewhere else: browsers let any page try.

    ``or_confined``: pages of guests, whose origin is "null" because the proxy confines them, may.
    """
    origin = websocket.headers.get("origin")
    if origin is None or (or_confined and origin == "null"):
        return
    if origin.partition("://")[2].lower() != websocket.headers.get("host", "").lower():
        raise ForeignOrigin(f"a page of {origin[:80]!r} may not open a WebSocket here")


async def send_event(websocket: WebSocket, event: dict[str, Any]) -> None:
    """Send an event as a text message."""
    await websocket.send_text(msgspec.json.encode(event).decode())


async def messages(websocket: WebSocket) -> AsyncIterator[Message]:
    """What the client sends: bytes, or objects from text messages; texts that are none are ignored."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if message.get("bytes") is not None:
            yield message["bytes"]
        elif message.get("text"):
            try:
                value = msgspec.json.decode(message["text"], type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError):
                continue
            yield value


async def converse(
    websocket: WebSocket, talk: Callable[[], Awaitable[None]], hear: Callable[[], Awaitable[None]]
) -> None:
    """Run both sides of a conversation until ``talk`` is done or the client has left; then close."""
    failure: list[ForkdError] = []

    async def one(side: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        try:
            await side()
        except ForkdError as error:
            failure.append(error)
        except (WebSocketDisconnect, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client is gone
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, hear, nursery.cancel_scope)
        await one(talk, nursery.cancel_scope)
    try:
        if failure:
            body, status = error_body(failure[0])
            await send_event(websocket, {"event": "error", "status": status, **body})
        await websocket.close(FAILED if failure else 1000)
    except (RuntimeError, WebSocketDisconnect, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the client closed first


async def _not_upgraded(request: Request) -> Response:
    raise UpgradeRequired(f"{request.url.path} is a WebSocket", hint="connect with the scheme ws:// or wss://")


def websocket_routes(
    path: str,
    handler: Callable[[WebSocket], Awaitable[None]],
    *,
    query: dict[str, Any] | None = None,
    errors: Errors = (),
) -> list[WebSocketRoute | ApiRoute]:
    """A WebSocket, and the plain GET beside it that says so (and stands in /openapi.json for it)."""

    async def checked(websocket: WebSocket) -> None:
        check_origin(websocket)
        await handler(websocket)

    async def explain(request: Request) -> Response:
        return await _not_upgraded(request)

    explain.__doc__ = f"WebSocket. {(handler.__doc__ or '').strip()}"
    explain.__name__ = handler.__name__
    plain = route("GET", path, explain, {101: None}, query=query, errors=(UpgradeRequired, *errors))
    return [WebSocketRoute(path, checked), plain]
