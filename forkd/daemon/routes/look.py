"""Routes that look into sandboxes: their logs, and how they differ."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import IN_SANDBOX, route
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import Emit, EventStream, query_flag, reply, stream_media, wants_stream
from forkd.ops.diff import diff
from forkd.ops.logs import follow_log, read_log
from forkd.specs.errors import BadInput, Conflict, EngineError, HostNotReady, NoSpace, SnapshotNotFound
from forkd.specs.models import LogText, SandboxDiff

ID = "/v1/sandboxes/{id}"


async def logs(request: Request) -> Response:
    """A log: ``source`` is console (the guest's kernel and agent) or vmm. With ``follow``, as events until it ends."""
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]
    source = request.query_params.get("source", "console")
    if not (query_flag(request, "follow") or wants_stream(request)):
        return reply(await read_log(runtime, sandbox_id, source))
    await read_log(runtime, sandbox_id, source)  # what is refused is refused before the stream begins

    async def work(emit: Emit) -> Any:
        async def on_data(position: int, data: bytes) -> None:
            await emit({"event": source, "data": base64.b64encode(data).decode(), "at": position})

        return await follow_log(runtime, sandbox_id, source, on_data)

    return EventStream(work, stream_media(request))


async def differ(request: Request) -> Response:
    """How it differs from ``against``, a sandbox or a snapshot; if not given, the snapshot it was forked from."""
    against = request.query_params.get("against")
    return reply(await diff(runtime_of(request), request.path_params["id"], against))


routes = [
    route(
        "GET",
        f"{ID}/diff",
        differ,
        {200: SandboxDiff},
        query={"against": str},
        errors=(BadInput, SnapshotNotFound, Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX),
    ),
    route(
        "GET",
        f"{ID}/logs",
        logs,
        {200: LogText},
        query={"source": str, "follow": bool},
        events=True,
        errors=(BadInput, Conflict, *IN_SANDBOX),
    ),
]
