"""Thin routes: decode, call one verb, encode."""

from __future__ import annotations

from typing import cast

from starlette.requests import HTTPConnection

from forkd.runtime import Runtime


def runtime_of(request: HTTPConnection) -> Runtime:
    """The runtime this app serves."""
    return cast(Runtime, request.app.state.runtime)
