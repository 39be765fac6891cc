"""Requests whose client goes away: the verb is cancelled, over a socket and in this process alike."""

from __future__ import annotations

from typing import Any

import httpx
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from forkd.daemon import wire
from forkd.sdk.inprocess import InProcessTransport


class Verb:
    """An app with one verb that takes for ever, or answers at once if asked ``?quick``."""

    def __init__(self) -> None:
        self.begun, self.cancelled = trio.Event(), trio.Event()
        routes = [Route("/verb", self.serve, methods=["POST"])]
        self.app = Starlette(routes=routes, exception_handlers={ClientDisconnect: wire.on_error})

    async def serve(self, request: Request) -> Response:
        await wire.read_body(request, dict[str, Any])
        return wire.reply(await wire.for_client(request, lambda: self.work(wire.query_flag(request, "quick"))))

    async def work(self, quick: bool) -> str:
        if quick:
            return "done"
        try:
            self.begun.set()
            await trio.sleep_forever()
        finally:
            self.cancelled.set()
        raise AssertionError


async def test_a_socket_that_hangs_up_cancels_the_verb_and_one_that_stays_is_answered() -> None:
    verb = Verb()
    config = Config()
    config.bind = ["127.0.0.1:0"]
    async with trio.open_nursery() as nursery:
        serving: Any = serve
        (url,) = await nursery.start(lambda task_status: serving(verb.app, config, task_status=task_status))
        with trio.fail_after(10):
            stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
            head = b"POST /verb HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
            await stream.send_all(head + b"\r\n{}")
            await verb.begun.wait()
            assert not verb.cancelled.is_set()
            await stream.aclose()
            await verb.cancelled.wait()
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                for _ in range(2):  # the connection is of use for a next request
                    assert (await client.post("/verb?quick", json={})).json() == "done"
        nursery.cancel_scope.cancel()


async def test_a_caller_in_this_process_that_is_cancelled_cancels_the_verb() -> None:
    verb = Verb()
    with trio.fail_after(10):
        async with (
            trio.open_nursery() as nursery,
            httpx.AsyncClient(base_url="http://forkd", transport=InProcessTransport(verb.app, nursery)) as client,
        ):
            assert (await client.post("/verb?quick", json={})).json() == "done"
            async with trio.open_nursery() as calling:
                calling.start_soon(lambda: client.post("/verb", json={}, timeout=None))
                await verb.begun.wait()
                calling.cancel_scope.cancel()
            await verb.cancelled.wait()
