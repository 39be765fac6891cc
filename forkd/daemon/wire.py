"""JSON in and out: bounded bodies, typed requests, errors that always have the same shape, and NDJSON streams."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.daemon.api import MAX_BODY, Unprocessable, WrongMediaType
from forkd.specs.errors import BadInput, BadJson, BodyTooLarge, ForkdError

T = TypeVar("T")
NDJSON = "application/x-ndjson"
JSON = "application/json"
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadJson(f"the body is not JSON: {error}") from error


def query_flag(request: Request, name: str) -> bool:
    """A boolean query parameter: absent is false; ``?name`` and ``?name=true`` are true."""
    value = request.query_params.get(name)
    if value is None or value in ("0", "false"):
        return False
    if value in ("", "1", "true"):
        return True
    raise BadInput(f"query parameter {name}={value[:40]!r} is not a boolean", hint="use true or false")


def wants_stream(request: Request) -> bool:
    """Whether the client asked for events as they come."""
    return NDJSON in request.headers.get("accept", "")


def error_body(error: BaseException) -> tuple[dict[str, Any], int]:
    """The JSON body and status an exception becomes."""
    if isinstance(error, ForkdError):
        return error.as_dict(), error.http_status
    if isinstance(error, HTTPException):
        code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return {"error": error.detail, "code": code, "hint": "GET /openapi.json lists the routes"}, error.status_code
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


class EventStream(Response):
    """An NDJSON answer: ``work(emit)`` runs while its events are sent; its result, or error, is the last line.

    A client that goes away cancels the work.
    """

    media_type = NDJSON

    def __init__(self, work: Callable[[Emit], Awaitable[Any]]) -> None:
        super().__init__(media_type=NDJSON)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        headers = [(b"content-type", NDJSON.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lock = trio.Lock()

        async def emit(event: dict[str, Any]) -> None:
            async with lock:
                await send(
                    {"type": "http.response.body", "body": msgspec.json.encode(event) + b"\n", "more_body": True}
                )

        async def watch_client(cancel: trio.CancelScope) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            cancel.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_client, nursery.cancel_scope)
            try:
                last = {"event": "result", "result": await self._work(emit)}
            except Exception as error:  # the process edge of a stream: told to the client, logged if unknown
                body, status = error_body(error)
                note_of(scope)["code"] = body["code"]
                last = {"event": "error", "status": status, **body}
            await emit(last)
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
