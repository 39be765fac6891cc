"""Which app to talk to: a daemon named, a daemon found, or the app hosted in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from forkd.config import DEFAULT_URL, load_settings
from forkd.sdk.async_controller import AsyncController

LOCAL = "local"
"""As a URL: never a daemon, always the app in this process."""
QUICK = 1.0


@asynccontextmanager
async def find_controller(url: str | None = None, token: str | None = None) -> AsyncIterator[AsyncController]:
    """A controller: over ``url`` or ``FORKD_URL``; else the daemon of the data directory; else the one at the default
    port; else the app hosted here, whose sandboxes end with it.

    With ``FORKD_DATA_DIR`` set, a daemon at the default port is not asked: it may well have another directory.
    """
    url = url or os.environ.get("FORKD_URL") or None
    transport: httpx.AsyncBaseTransport | None = None
    if url is None:
        transport = _own_daemon()
        if transport is None and "FORKD_DATA_DIR" not in os.environ and await _answers(DEFAULT_URL):
            url = DEFAULT_URL
    if url is not None and url != LOCAL:
        async with AsyncController(url, token, timeout=None) as controller:
            yield controller
    elif transport is not None:
        async with AsyncController("http://forkd", token, timeout=None, transport=transport) as controller:
            yield controller
    else:
        from forkd.sdk.inprocess import hosted_app

        async with (
            hosted_app() as hosted,
            AsyncController("http://forkd", transport=hosted, timeout=None) as controller,
        ):
            yield controller


def _own_daemon() -> httpx.AsyncBaseTransport | None:
    """A way to the daemon of this data directory; None if nobody listens there."""
    path = _short(str(load_settings().socket))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except OSError:
        return None
    return httpx.AsyncHTTPTransport(uds=path)


def _short(path: str) -> str:
    """A socket's address has at most 107 bytes; through a descriptor kept for good any path fits."""
    if len(path.encode()) < 108 or not os.path.exists(path):
        return path[:107]
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{os.path.basename(path)}"


async def _answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=QUICK, trust_env=False) as client:
            answer = (await client.get(f"{url}/healthz")).json()
            return isinstance(answer, dict) and answer.get("ok") is True
    except (httpx.HTTPError, ValueError):
        return False
