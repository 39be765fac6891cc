"""The gate of a served app: who asks, what it took, and a whole answer even for a body nobody wanted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import trio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkd.daemon.audit import AuditLog
from forkd.daemon.auth import Tokens, check_local
from forkd.daemon.metrics import Metrics
from forkd.daemon.proxy import is_proxied
from forkd.daemon.wire import error_body, note_of, reply
from forkd.specs.errors import ForkdError

DRAINED = 64 << 20
DRAIN_SECS = 20.0


@dataclass(slots=True)
class Gate:
    """An ASGI app around the app. Callers on the unix socket are its owner, as its mode lets nobody else in."""

    app: ASGIApp
    public: frozenset[str]
    tokens: Tokens | None
    audit: AuditLog | None
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        exchange = _Exchange(receive, send)
        note = note_of(scope)
        headers = Headers(scope=scope)
        try:
            note["token"] = self._caller(scope, headers)
        except ForkdError as error:
            await self._refuse(scope, exchange, error)
        else:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            self._record(scope, headers, exchange.status, time.monotonic() - began)

    def _caller(self, scope: Scope, headers: Headers) -> str | None:
        """The name of whoever asks. Raises Unauthorized, TokenTooNarrow, ForeignOrigin."""
        if scope["client"] is None:
            return "owner"
        if self.tokens is None:
            origin = headers.get("origin")
            # Pages of a guest have no origin, as the port proxy confines them; they may ask their own server.
            check_local(headers.get("host"), None if origin == "null" and is_proxied(scope["path"]) else origin)
            return None
        if scope["path"] in self.public:
            return None
        return self.tokens.admit(headers.get("authorization"), scope.get("method", "WEBSOCKET"), scope["path"])

    async def _refuse(self, scope: Scope, exchange: _Exchange, error: ForkdError) -> None:
        body, status = error_body(error)
        note_of(scope)["code"] = body["code"]
        await reply(body, status)(scope, exchange.receive, exchange.send)

    def _record(self, scope: Scope, headers: Headers, status: int, seconds: float) -> None:
        note, method = note_of(scope), scope.get("method", "WEBSOCKET")
        if method in METHODS:
            self.metrics.requests.labels(method, str(status)).observe(seconds)
        if code := note.get("code"):
            self.metrics.errors.labels(code).inc()
        if self.audit is not None:
            record = {
                "method": method[:20],
                "path": scope["path"][:1000],
                "status": status,
                "latency_us": round(seconds * 1e6),
                "ua": headers.get("user-agent", "")[:200],
                "token": note.get("token"),
                "remote": "unix" if scope["client"] is None else scope["client"][0],
                "ids": [*scope.get("path_params", {}).values(), *note.get("ids", ())][:1000],
            }
            self.audit.write(record | ({"code": code} if code else {}))


METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "WEBSOCKET"})


class _Exchange:
    """One request's messages, watched: an error is sent only after the body was taken off the wire.

    A server that answers and closes with bytes unread resets the connection, and the client never sees the answer.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._more = True
        self.status = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] in ("http.request", "http.disconnect"):
            self._more = bool(message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400:
                await self._drain()
        elif message["type"] == "websocket.http.response.start":
            self.status = message["status"]
            # Hypercorn closes it, as it was to be upgraded: a client must not send its next request there.
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif message["type"] == "websocket.accept":
            self.status = 101
        elif message["type"] == "websocket.close" and not self.status:
            self.status = 403
        await self._send(message)

    async def _drain(self) -> None:
        taken = 0
        with trio.move_on_after(DRAIN_SECS):
            while self._more and taken < DRAINED:
                taken += len((await self.receive()).get("body", b""))
