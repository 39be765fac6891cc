"""JSON in and out: bounded bodies, typed requests, errors that always have the same shape, and NDJSON streams."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import trio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.daemon.api import MAX_BODY, Unprocessable, WrongMediaType
from forkd.specs.errors import BadInput, BadJson, BodyTooLarge, ForkdError, UploadBroken

T = TypeVar("T")
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
JSON = "application/json"
CLIENT_LEFT = 499
"""What web servers write down for a request whose client did not wait for the answer."""
log = logging.getLogger("forkd")

Emit = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends one event of a stream; waits while the client is slow."""


def reply(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type=JSON)


async def read_body(request: Request, kind: type[T]) -> T:
    """The request's JSON body as ``kind``. Raises BodyTooLarge, WrongMediaType, BadJson, Unprocessable."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise BodyTooLarge(f"the body is larger than {MAX_BODY} bytes")
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and media != JSON:
        # Not only pedantry: this is what keeps a web page from posting forms to a daemon on the reader's host.
        raise WrongMediaType(
            f"the body is {media[:80]!r}, not JSON", hint="send the header content-type: application/json"
        )
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Unprocessable(f"the body does not fit: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadJson(f"the body is not JSON: {error}") from error


@asynccontextmanager
async def body_pieces(request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
    """The body as it comes. Raises UploadBroken from the iteration if the client goes away in the middle."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(request.stream()) as stream:
            try:
                async for data in stream:
                    if data:
                        yield data
            except ClientDisconnect as error:
                raise UploadBroken("the upload broke off; nothing was written") from error

    async with aclosing(pieces()) as given:
        yield given


def query_flag(request: HTTPConnection, name: str) -> bool:
    """A boolean query parameter: absent is false; ``?name`` and ``?name=true`` are true."""
    value = request.query_params.get(name)
    if value is None or value in ("0", "false"):
        return False
    if value in ("", "1", "true"):
        return True
    raise BadInput(f"query parameter {name}={value[:40]!r} is not a boolean", hint="use true or false")


def query_number(request: HTTPConnection, name: str, default: int = 0) -> int:
    """A whole number from 0 in the query."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise BadInput(f"query parameter {name}={value[:40]!r} is not a number", hint="give 0 or more")
    return int(value)


def wants_stream(request: Request) -> bool:
    """Whether the client asked for events as they come."""
    accept = request.headers.get("accept", "")
    return NDJSON in accept or SSE in accept


def stream_media(request: Request) -> str:
    """How: as lines of JSON or, for browsers and curl, as server-sent events."""
    return SSE if SSE in request.headers.get("accept", "") else NDJSON


def error_body(error: BaseException) -> tuple[dict[str, Any], int]:
    """The JSON body and status an exception becomes."""
    if isinstance(error, ForkdError):
        return error.as_dict(), error.http_status
    if isinstance(error, HTTPException):
        code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return {"error": error.detail, "code": code, "hint": "GET /openapi.json lists the routes"}, error.status_code
    if isinstance(error, ClientDisconnect):  # nobody reads it: for the audit log
        return {"error": "the client has left", "code": "client_left", "hint": None}, CLIENT_LEFT
    log.error("unexpected error", exc_info=error)
    return {"error": f"internal error: {type(error).__name__}", "code": "internal", "hint": "see the daemon's log"}, 500


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything."""
    body, status = error_body(error)
    note_of(request.scope)["code"] = body["code"]
    answer = reply(body, status)
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    return answer


def note_of(scope: Scope) -> dict[str, Any]:
    """What the audit log shall say of a request besides its line: ``ids`` it made, ``code`` of its error, ``token``."""
    note: dict[str, Any] = scope.setdefault("forkd.note", {})
    return note


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that is ready to be sent: status, headers, and its bytes as they come."""

    status: int
    headers: Mapping[str, str]
    data: AsyncIterator[bytes]


class ByteStream(Response):
    """An answer of bytes, as many as there are, never all in memory. A client that goes away ends it.

    ``opened()`` is entered before anything is sent, so what it raises is an error like any other; what goes wrong
    later breaks the connection, so that no client takes a part for the whole.
    """

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[Opened]]) -> None:
        super().__init__()
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the bytes."""

        async def work() -> None:
            async with self._opened() as answer:
                headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for piece in answer.data:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with suppress(ClientDisconnect):
            await _for_client(receive, work)


async def for_client(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """What ``work()`` gives, for a verb that is of no use to anybody else: a client that goes away cancels it.

    The body must have been read. Raises ClientDisconnect.
    """
    return await _for_client(request.receive, work)


async def _for_client(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    made: list[T] = []
    failure: list[Exception] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_client, receive, nursery.cancel_scope)
        try:
            made.append(await work())
        except Exception as error:  # raised below as it is, not as a group
            failure.append(error)
        nursery.cancel_scope.cancel()
    if failure:
        raise failure[0]
    if not made:
        raise ClientDisconnect
    return made[0]


async def _watch_client(receive: Receive, cancel: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    cancel.cancel()


class EventStream(Response):
    """An answer of events: ``work(emit)`` runs while they are sent; its result, or error, is the last one.

    A client that goes away cancels the work. As server-sent events, each has its ``event`` as its name and its ``at``,
    if it has one, as its id.
    """

    def __init__(self, work: Callable[[Emit], Awaitable[Any]], media: str = NDJSON) -> None:
        super().__init__(media_type=media)
        self._work = work
        self._media = media

    def encode(self, event: dict[str, Any]) -> bytes:
        """One event as bytes."""
        data = msgspec.json.encode(event)
        if self._media == NDJSON:
            return data + b"\n"
        position = f"id: {event['at']}\n" if "at" in event else ""
        return f"event: {event['event']}\n{position}data: ".encode() + data + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        headers = [(b"content-type", self._media.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lock = trio.Lock()

        async def emit(event: dict[str, Any]) -> None:
            async with lock:
                await send({"type": "http.response.body", "body": self.encode(event), "more_body": True})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_client, receive, nursery.cancel_scope)
            try:
                last = {"event": "result", "result": await self._work(emit)}
            except Exception as error:  # the process edge of a stream: told to the client, logged if unknown
                body, status = error_body(error)
                note_of(scope)["code"] = body["code"]
                last = {"event": "error", "status": status, **body}
            await emit(last)
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
