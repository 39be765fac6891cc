"""Routes about this forkd and its host: health, version, set-up, cleanup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forkd import __version__
from forkd.daemon.api import route
from forkd.daemon.progress import with_progress
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import Emit, EventStream, read_body, reply
from forkd.ops.cleanup import Leftover, cleanup
from forkd.ops.doctor import doctor
from forkd.ops.setup import setup
from forkd.specs.errors import BadInput, BuildFailed, HostNotReady, NoSpace
from forkd.specs.requests import Cleanup, Setup


async def healthz(request: Request) -> Response:
    """Alive."""
    return reply({"ok": True})


async def version(request: Request) -> Response:
    """What this is."""
    return reply({"version": __version__, "api": "v1", "daemon": runtime_of(request).keeps})


async def plugins(request: Request) -> Response:
    """What became of every plugin."""
    return reply(list(runtime_of(request).plugins.records.values()))


async def post_setup(request: Request) -> Response:
    """Fetch the guest kernel; progress as events."""
    body = await read_body(request, Setup)
    kernel = Path(body.kernel) if body.kernel is not None else None

    async def work(emit: Emit) -> Any:
        return await with_progress(emit, lambda progress: setup(runtime_of(request), progress, kernel))

    return EventStream(work)


async def post_cleanup(request: Request) -> Response:
    """Find, or remove, what dead processes left."""
    body = await read_body(request, Cleanup)
    rows = await cleanup(runtime_of(request), remove=body.remove)
    return reply([msgspec.structs.asdict(row) for row in rows])


async def get_doctor(request: Request) -> Response:
    """Whether this host is fit."""
    return reply(await doctor(runtime_of(request)))


routes = [
    route("GET", "/healthz", healthz, {200: dict[str, bool]}, public=True),
    route("GET", "/version", version, {200: dict[str, str | bool]}),
    route("GET", "/v1/plugins", plugins, {200: list[dict[str, Any]]}),
    route(
        "POST",
        "/v1/setup",
        post_setup,
        {200: dict[str, Any]},
        body=Setup,
        events="only",
        errors=(BadInput, HostNotReady, BuildFailed, NoSpace),
    ),
    route("GET", "/v1/doctor", get_doctor, {200: list[dict[str, Any]]}),
    route("POST", "/v1/cleanup", post_cleanup, {200: list[Leftover]}, body=Cleanup),
]
