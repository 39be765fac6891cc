"""Connections: each has its own task, and whatever goes wrong in one ends that one alone."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

log = logging.getLogger("forkd.http")


async def serve_connections(
    app: AppWrapper,
    config: Config,
    secure: ssl.SSLContext | None,
    sockets: Sockets,
    until: Callable[[], Awaitable[None]],
) -> None:
    """Serve until ``until()`` returns, then take no more and give requests ``graceful_timeout`` to finish.

    Not hypercorn's own loop: there, bytes its protocols stumble over (before any token is looked at) end the server.
    """
    context = WorkerContext(None)

    async def serve(stream: Any) -> None:
        try:
            await TCPServer(app, config, context, ConnectionState({}), stream)
        except* Exception as errors:
            log.warning("a connection was closed: %s", "; ".join(_reasons(errors)))

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            listeners = _listeners(sockets, secure)
            accepting.start_soon(partial(trio.serve_listeners, serve, listeners, handler_nursery=connections))
            await until()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout


def _listeners(sockets: Sockets, secure: ssl.SSLContext | None) -> list[Any]:
    plain = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets.insecure_sockets]
    tls = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets.secure_sockets]
    assert secure is not None or not tls
    return [*plain, *(trio.SSLListener(each, secure, https_compatible=True) for each in tls if secure is not None)]


def _reasons(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [reason for each in error.exceptions for reason in _reasons(each)]
    return [f"{type(error).__name__}: {error}"]
