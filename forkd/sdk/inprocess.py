"""The app hosted in this process: an httpx transport that calls it directly and streams its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import trio
from starlette.types import ASGIApp

from forkd.sdk.async_channel import DIRECT

Message = MutableMapping[str, Any]


class InProcessTransport(httpx.AsyncBaseTransport):
    """One task for each request; a reader that stops reading holds the app back, one that leaves cancels it."""

    def __init__(self, app: ASGIApp, nursery: trio.Nursery) -> None:
        self._app = app
        self._nursery = nursery

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run the app on ``request`` until it has sent its headers; the bodies follow as they are sent and read."""
        if request.headers.get("upgrade") == "websocket":
            pipe = _Pipe(self._app, request)
            await self._nursery.start(pipe.run)
            if pipe.status != 101:
                return httpx.Response(pipe.status, content=bytes(pipe.refusal), request=request)
            return httpx.Response(101, request=request, extensions={DIRECT: pipe})
        call = _Call(self._app, request)
        await self._nursery.start(call.run)
        return httpx.Response(call.status, headers=call.headers, stream=call, request=request)


def _scope(request: httpx.Request, kind: str) -> Message:
    url = request.url
    return {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.split(b"?")[0],
        "query_string": url.query,
        "server": (url.host, url.port),
        "client": ("in-process", 0),
        "root_path": "",
    }


class _Call(httpx.AsyncByteStream):
    def __init__(self, app: ASGIApp, request: httpx.Request) -> None:
        self._app = app
        self._request = request
        self._body: AsyncIterator[bytes] | None = aiter(cast(httpx.AsyncByteStream, request.stream))
        self._failure: Exception | None = None
        self._send, self._receive = trio.open_memory_channel[bytes](0)
        self._gone = trio.Event()
        self._scope = trio.CancelScope()
        self._started = False
        self._whole = False
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async def receive() -> Message:
            if self._body is not None:
                piece = await anext(self._body, None)
                if piece is None:
                    self._body = None
                return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], list(message["headers"])
                self._started = True
                task_status.started()
                return
            if chunk := message.get("body", b""):
                try:
                    await self._send.send(bytes(chunk))
                except trio.BrokenResourceError:
                    await trio.sleep_forever()  # the reader left; its aclose cancels us
            self._whole = not message.get("more_body", False)

        with self._scope, self._send:
            try:
                await self._app(_scope(self._request, "http"), receive, send)
            except Exception as error:
                if not self._started:
                    raise
                if not self._whole:  # Starlette raises again what it has answered with a whole error
                    self._failure = error  # as a broken connection would: the reader hears of it

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._receive:
            yield chunk
        if self._failure is not None:
            raise httpx.ReadError(f"the answer broke off: {self._failure}", request=self._request)

    async def aclose(self) -> None:
        self._gone.set()
        self._receive.close()
        self._scope.cancel()


class _Pipe:
    """A WebSocket without the socket: the app's messages, as a channel of the SDK."""

    def __init__(self, app: ASGIApp, request: httpx.Request) -> None:
        self._app = app
        self._request = request
        self._to_client, self._from_app = trio.open_memory_channel[bytes | str](0)
        self._to_app, self._from_client = trio.open_memory_channel[bytes | str](0)
        self._greeted = False
        self.status = 0
        self.refusal = bytearray()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async def receive() -> Message:
            if not self._greeted:
                self._greeted = True
                return {"type": "websocket.connect"}
            try:
                message = await self._from_client.receive()
            except trio.EndOfChannel:
                return {"type": "websocket.disconnect", "code": 1000}
            return {"type": "websocket.receive", "bytes" if isinstance(message, bytes) else "text": message}

        async def send(message: Message) -> None:
            kind = message["type"]
            if kind == "websocket.accept":
                self.status = 101
                task_status.started()
            elif kind == "websocket.send":
                data = message.get("bytes")
                try:
                    await self._to_client.send(message["text"] if data is None else bytes(data))
                except trio.BrokenResourceError:
                    raise OSError("the client has left") from None
            elif kind == "websocket.http.response.start":
                self.status = message["status"]
            elif kind == "websocket.http.response.body":
                self.refusal += message.get("body", b"")
                if not message.get("more_body", False):
                    task_status.started()
            elif kind == "websocket.close" and self.status == 0:
                self.status = 403
                task_status.started()

        with self._to_client, self._from_client:
            await self._app({**_scope(self._request, "websocket"), "subprotocols": []}, receive, send)

    async def send(self, message: bytes | str) -> None:
        try:
            await self._to_app.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the app has closed it, as receiving will say

    async def receive(self) -> bytes | str | None:
        try:
            return await self._from_app.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            return None

    async def aclose(self) -> None:
        self._to_app.close()
        self._from_app.close()


@asynccontextmanager
async def hosted_app() -> AsyncIterator[httpx.AsyncBaseTransport]:
    """Open a runtime, host the app over it, and end both on leaving: sandboxes end with the command."""
    from forkd.config import load_settings
    from forkd.daemon.app import make_app
    from forkd.runtime import open_runtime

    async with open_runtime(load_settings()) as runtime, trio.open_nursery() as nursery:
        yield InProcessTransport(make_app(runtime), nursery)
        nursery.cancel_scope.cancel()
