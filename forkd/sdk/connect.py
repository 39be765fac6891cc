"""Which app to talk to: a daemon named, a daemon found, or the app hosted in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from forkd.config import DEFAULT_URL
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.discover import own_socket

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
    found = url is not None or own_socket() is not None
    if not found and "FORKD_DATA_DIR" not in os.environ and await _answers(DEFAULT_URL):
        url, found = DEFAULT_URL, True
    if found and url != LOCAL:
        async with AsyncController(url, token, timeout=None) as controller:
            yield controller
    else:
        from forkd.sdk.inprocess import hosted_app

        async with (
            hosted_app() as hosted,
            AsyncController("http://forkd", transport=hosted, timeout=None) as controller,
        ):
            yield controller


async def _answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=QUICK, trust_env=False) as client:
            answer = (await client.get(f"{url}/healthz")).json()
            return isinstance(answer, dict) and answer.get("ok") is True
    except (httpx.HTTPError, ValueError):
        return False
