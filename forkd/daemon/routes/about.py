"""Routes about the API itself: its description for programs and people, and figures for Prometheus."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from forkd.daemon import openapi
from forkd.daemon.api import ApiRoute, route
from forkd.daemon.wire import reply


async def spec(request: Request) -> Response:
    """This API in OpenAPI's form."""
    return reply(_document(request))


async def docs(request: Request) -> Response:
    """This API as a page for people."""
    return HTMLResponse(openapi.page(_document(request)))


async def metrics(request: Request) -> Response:
    """Figures in Prometheus' text format."""
    from forkd.daemon.metrics import Metrics

    state = request.app.state
    if state.metrics is None:  # an app that is not served has nobody to count for until it is asked
        state.metrics = Metrics(state.runtime)
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4")


def _document(request: Request) -> dict[str, Any]:
    return openapi.document(found for found in request.app.routes if isinstance(found, ApiRoute))


routes = [
    route("GET", "/openapi.json", spec, {200: dict[str, Any]}),
    route("GET", "/docs", docs, {200: str}),
    route("GET", "/metrics", metrics, {200: str}),
]
