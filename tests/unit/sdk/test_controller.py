"""The controller and what lies between it and the app: no proxy on the way to this host, and errors as they were."""

from __future__ import annotations

import socket
import threading
from typing import Any

import httpx
import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forkd import Controller, Sandbox
from forkd.daemon import wire
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.sdk.inprocess import InProcessTransport


async def test_an_unforeseen_error_of_the_app_in_this_process_is_told_as_it_is() -> None:
    async def broken(request: Request) -> Response:
        raise KeyError("unforeseen")

    app = Starlette(routes=[Route("/version", broken)], exception_handlers={Exception: wire.on_error})
    async with (
        trio.open_nursery() as nursery,
        AsyncController("http://forkd", transport=InProcessTransport(app, nursery)) as controller,
    ):
        with pytest.raises(ControllerError, match="internal error: KeyError") as caught:
            await controller.version()
    assert (caught.value.status, caught.value.code) == (500, "internal")


async def test_an_answer_of_the_app_in_this_process_that_breaks_off_is_no_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half":', "more_body": True})
        raise KeyError("unforeseen")

    async with (
        trio.open_nursery() as nursery,
        AsyncController("http://forkd", transport=InProcessTransport(app, nursery)) as controller,
    ):
        with pytest.raises(ControllerError, match="broke off"):
            await controller.version()


def test_no_proxy_is_asked_for_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"ok":true}')

        thread = threading.Thread(target=serve)
        thread.start()
        with Controller(f"http://127.0.0.1:{server.getsockname()[1]}", token="secret", timeout=10) as controller:
            answer = controller.version()
        thread.join(10)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert answer == {"ok": True}


def test_a_sandbox_that_cannot_be_ended_still_lets_go_of_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    row = [{"id": "sb-1", "guest_addr": ""}]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(201, json=row) if request.method == "POST" else httpx.Response(500, json={"error": "no"})

    controller = Controller("http://forkd", transport=httpx.MockTransport(answer))
    monkeypatch.setattr("forkd.sdk.sandbox.Controller", lambda: controller)
    with pytest.raises(ControllerError, match="no"), Sandbox("t"):
        pass
    assert controller._client.is_closed
