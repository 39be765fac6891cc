"""The app hosted in this process: an httpx transport that calls it directly and streams its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from starlette.types import ASGIApp

Message = MutableMapping[str, Any]


class InProcessTransport(httpx.AsyncBaseTransport):
    """One task for each request; a reader that stops reading holds the app back, one that leaves cancels it."""

    def __init__(self, app: ASGIApp, nursery: trio.Nursery) -> None:
        self._app = app
        self._nursery = nursery

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run the app on ``request`` until it has sent its headers; the body follows as it is read."""
        body = await request.aread()
        call = _Call(self._app, request, body)
        await self._nursery.start(call.run)
        return httpx.Response(call.status, headers=call.headers, stream=call, request=request)


class _Call(httpx.AsyncByteStream):
    def __init__(self, app: ASGIApp, request: httpx.Request, body: bytes) -> None:
        self._app = app
        self._request = request
        self._body: bytes | None = body
        self._send, self._receive = trio.open_memory_channel[bytes](0)
        self._gone = trio.Event()
        self._scope = trio.CancelScope()
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async def receive() -> Message:
            if self._body is not None:
                body, self._body = self._body, None
                return {"type": "http.request", "body": body, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], list(message["headers"])
                task_status.started()
            elif chunk := message.get("body", b""):
                try:
                    await self._send.send(bytes(chunk))
                except trio.BrokenResourceError:
                    await trio.sleep_forever()  # the reader left; its aclose cancels us

        url = self._request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self._request.method,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "server": (url.host, url.port),
            "client": ("in-process", 0),
            "root_path": "",
        }
        with self._scope, self._send:
            await self._app(scope, receive, send)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._receive:
            yield chunk

    async def aclose(self) -> None:
        self._gone.set()
        self._receive.close()
        self._scope.cancel()


@asynccontextmanager
async def hosted_app() -> AsyncIterator[httpx.AsyncBaseTransport]:
    """Open a runtime, host the app over it, and end both on leaving: sandboxes end with the command."""
    from forkd.config import load_settings
    from forkd.daemon.app import make_app
    from forkd.runtime import open_runtime

    async with open_runtime(load_settings()) as runtime, trio.open_nursery() as nursery:
        yield InProcessTransport(make_app(runtime), nursery)
        nursery.cancel_scope.cancel()
