"""Routes that look into sandboxes: their logs, how they differ, and which of many did best."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import IN_SANDBOX, route
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import (
    Emit,
    EventStream,
    for_client,
    note_of,
    query_flag,
    read_body,
    reply,
    stream_media,
    wants_stream,
)
from forkd.ops.diff import diff
from forkd.ops.fanout import fanout
from forkd.ops.logs import follow_log, read_log
from forkd.specs.errors import BadInput, Conflict, EngineError, HostNotReady, NoSpace, SnapshotNotFound
from forkd.specs.models import FanoutRow, LogText, SandboxDiff
from forkd.specs.requests import FanoutRequest

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
    """How a sandbox, or the snapshot of that tag, differs from ``against``; if not given, from what it came from."""
    against = request.query_params.get("against")
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]
    return reply(await for_client(request, lambda: diff(runtime, sandbox_id, against)))


async def fan_out(request: Request) -> Response:
    """Fork children, run one command in each, keep the best by a score, end the rest; the best come first."""
    body = await read_body(request, FanoutRequest)
    rows = await for_client(request, lambda: fanout(runtime_of(request), body))
    note_of(request.scope)["ids"] = [row.id for row in rows if row.kept]
    return reply(rows)


routes = [
    route(
        "POST",
        "/v1/fanout",
        fan_out,
        {200: list[FanoutRow]},
        body=FanoutRequest,
        errors=(BadInput, SnapshotNotFound, Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX),
    ),
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
