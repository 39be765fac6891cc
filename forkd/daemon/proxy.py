"""The port proxy: an HTTP request or a WebSocket carried on to a server inside a guest, as streams."""

from __future__ import annotations

from collections.abc import Iterable

import h11
import trio
import wsproto
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from wsproto import events

from forkd.ops.ports import GuestConnection, dial
from forkd.runtime import Runtime
from forkd.specs.errors import GuestError

Headers = list[tuple[bytes, bytes]]
CHUNK = 64 * 1024
MAX_MESSAGE = 16 << 20
TOO_LARGE, GONE = 1009, 1011
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
# A page of a guest must not act in the daemon's name, although it comes from the daemon's address.
CONFINED = b"sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"


def is_proxied(path: str) -> bool:
    """Whether a request goes to a server in a guest."""
    parts = path.split("/")
    return len(parts) > 6 and parts[1:3] == ["v1", "sandboxes"] and parts[4] == "ports"


class ProxyResponse(Response):
    """Carries one request to ``port`` of a guest and streams the answer back."""

    def __init__(self, runtime: Runtime, sandbox_id: str, port: int, prefix: bytes) -> None:
        super().__init__()
        self._runtime = runtime
        self._sandbox_id = sandbox_id
        self._port = port
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        failure: list[Exception] = []
        async with trio.open_nursery() as nursery:
            try:
                async with dial(self._runtime, self._sandbox_id, self._port) as connection:
                    exchange = _Exchange(connection, nursery.cancel_scope)
                    await exchange.begin(scope, self._port, self._prefix)
                    nursery.start_soon(exchange.send_body, receive)
                    await exchange.answer(send, self._prefix)
            except h11.RemoteProtocolError as error:
                failure.append(GuestError(f"what answers on port {self._port} does not speak HTTP: {error}"))
            except trio.BrokenResourceError as error:
                failure.append(GuestError(f"the connection to port {self._port} broke: {error}"))
            except Exception as error:  # raised below as it is, not as a group
                failure.append(error)
            nursery.cancel_scope.cancel()
        if failure:
            raise failure[0]


class _Exchange:
    """One request and its answer on one connection."""

    def __init__(self, connection: GuestConnection, gone: trio.CancelScope) -> None:
        self._connection = connection
        self._gone = gone
        self._http = h11.Connection(h11.CLIENT)

    async def begin(self, scope: Scope, port: int, prefix: bytes) -> None:
        headers = _forwarded(scope["headers"], port, prefix)
        given = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" in given and b"content-length" not in given:
            headers.append((b"transfer-encoding", b"chunked"))
        headers.append((b"connection", b"close"))
        await self._send(h11.Request(method=scope["method"], target=_target(scope, prefix), headers=headers))

    async def send_body(self, receive: Receive) -> None:
        """Pass the client's body on; a client that leaves ends the exchange."""
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self._gone.cancel()
                    return
                if self._http.our_state is not h11.SEND_BODY:
                    continue
                if data := message.get("body", b""):
                    await self._send(h11.Data(data=data))
                if not message.get("more_body", False):
                    await self._send(h11.EndOfMessage())
        except (trio.BrokenResourceError, h11.LocalProtocolError):
            return  # the server stopped reading: its answer says why

    async def answer(self, send: Send, prefix: bytes) -> None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._connection.receive_some(CHUNK))
            elif isinstance(event, h11.Response):
                headers = _returned(list(event.headers), prefix)
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise GuestError("the server in the guest closed the connection without an answer")

    async def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self._connection.send_all(data)


def _target(scope: Scope, prefix: bytes) -> bytes:
    path: bytes = scope.get("raw_path", scope["path"].encode()).split(b"?")[0]
    path = path[len(prefix) :] or b"/"
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _forwarded(headers: Iterable[tuple[bytes, bytes]], port: int, prefix: bytes) -> Headers:
    """The client's headers without those of its own connection, and without its key to the daemon."""
    dropped = HOP_BY_HOP | {b"host", b"authorization"}
    kept = [(name, value) for name, value in headers if name.lower() not in dropped]
    host = next((value for name, value in headers if name.lower() == b"host"), b"")
    return [
        (b"host", b"localhost:%d" % port),
        *kept,
        (b"x-forwarded-host", host),
        (b"x-forwarded-prefix", prefix),
    ]


def _returned(headers: Headers, prefix: bytes) -> Headers:
    """The server's headers; a redirect to a path of its own stays below the proxy's."""
    kept = [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP | {b"date"}]
    moved = [
        (name, prefix + value if name.lower() == b"location" and value.startswith(b"/") else value)
        for name, value in kept
    ]
    return [*moved, (b"content-security-policy", CONFINED)]


async def proxy_websocket(runtime: Runtime, websocket: WebSocket, port: int, prefix: bytes) -> None:
    """Carry a WebSocket to a server in the guest, message by message."""
    scope = websocket.scope
    async with dial(runtime, websocket.path_params["id"], port) as connection:
        socket = _GuestSocket(connection)
        own = {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"}
        headers = [(name, value) for name, value in _forwarded(scope["headers"], port, prefix) if name not in own]
        subprotocol = await socket.open(
            f"localhost:{port}", _target(scope, prefix).decode("latin-1"), scope.get("subprotocols", []), headers
        )
        await websocket.accept(subprotocol)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_to_guest, websocket, socket, nursery.cancel_scope)
            code = await _from_guest(websocket, socket)
            if code is not None:
                await websocket.close(code)
            nursery.cancel_scope.cancel()


class _GuestSocket:
    """The client's end of a WebSocket on a connection into the guest."""

    def __init__(self, connection: GuestConnection) -> None:
        self._connection = connection
        self._ws = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._lock = trio.Lock()

    async def open(self, host: str, target: str, subprotocols: list[str], headers: Headers) -> str | None:
        extra = [(name, value) for name, value in headers if name.lower() != b"host"]
        await self.send(events.Request(host=host, target=target, subprotocols=subprotocols, extra_headers=extra))
        event = await self.event()
        if isinstance(event, events.AcceptConnection):
            return event.subprotocol
        status = getattr(event, "status_code", "no answer")
        raise GuestError(f"the server in the guest refused the WebSocket: {status}")

    async def send(self, event: events.Event) -> None:
        data = self._ws.send(event)
        async with self._lock:
            await self._connection.send_all(data)

    async def event(self) -> events.Event | None:
        """The next event; None when the connection is over."""
        while True:
            for event in self._ws.events():
                return event
            try:
                data = await self._connection.receive_some(CHUNK)
                self._ws.receive_data(data or None)
            except (trio.BrokenResourceError, wsproto.utilities.RemoteProtocolError):
                return None
            if not data:
                return None


async def _to_guest(websocket: WebSocket, socket: _GuestSocket, scope: trio.CancelScope) -> None:
    try:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                await socket.send(events.CloseConnection(code=message.get("code") or 1000))
                break
            if message.get("bytes") is not None:
                await socket.send(events.BytesMessage(data=message["bytes"]))
            else:
                await socket.send(events.TextMessage(data=message.get("text") or ""))
    except (trio.BrokenResourceError, wsproto.utilities.LocalProtocolError):
        pass  # the server is gone
    scope.cancel()


async def _from_guest(websocket: WebSocket, socket: _GuestSocket) -> int | None:
    """Pass messages on until the server closes; the code to close with."""
    texts: list[str] = []
    pieces: list[bytes] = []
    size = 0
    while True:
        event = await socket.event()
        if event is None:
            return GONE
        if isinstance(event, events.Ping):
            await socket.send(event.response())
        elif isinstance(event, events.CloseConnection):
            return event.code if 1000 <= event.code < 5000 and event.code not in (1005, 1006, 1015) else 1000
        elif isinstance(event, events.TextMessage | events.BytesMessage):
            size += len(event.data)
            if size > MAX_MESSAGE:
                return TOO_LARGE
            if isinstance(event, events.TextMessage):
                texts.append(event.data)
            else:
                pieces.append(bytes(event.data))
            if event.message_finished:
                if isinstance(event, events.TextMessage):
                    await websocket.send_text("".join(texts))
                else:
                    await websocket.send_bytes(b"".join(pieces))
                texts, pieces, size = [], [], 0
