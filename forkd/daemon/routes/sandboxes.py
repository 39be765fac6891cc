"""Routes of sandboxes: fork, list, run things in them, end them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import IN_SANDBOX, ErrorBody, route
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import (
    Emit,
    EventStream,
    error_body,
    for_client,
    note_of,
    read_body,
    reply,
    stream_media,
    wants_stream,
)
from forkd.ops import execute, lifecycle, limits
from forkd.ops.awake import awake
from forkd.ops.branch import branch
from forkd.ops.children import Child, Told
from forkd.ops.fork import ForkOptions
from forkd.ops.fork_any import fork_any, promote, rollback
from forkd.ops.fork_running import fork_running
from forkd.ops.spawn import spawn
from forkd.ops.stats import stats as measure
from forkd.sandbox import end_sandbox
from forkd.specs.errors import (
    BadInput,
    CaptureFailed,
    Conflict,
    EngineError,
    ForkdError,
    HostNotReady,
    NoSpace,
    SnapshotNotFound,
)
from forkd.specs.models import EvalResult, ExecResult, SandboxInfo, SnapshotInfo
from forkd.specs.requests import (
    BranchRequest,
    CreateSandboxes,
    EvalRequest,
    ExecRequest,
    ForkRequest,
    ForkSandbox,
    PrepareRequest,
    RollbackRequest,
    UpdateSandbox,
)


class FailedChild(ErrorBody, kw_only=True):
    """One child of a spawn that did not come up, and why."""

    index: int
    status: int


class PartialSpawn(msgspec.Struct, kw_only=True):
    """The answer when only some children came up."""

    sandboxes: list[SandboxInfo]
    failed: list[FailedChild]


async def index(request: Request) -> Response:
    """All running sandboxes, or those with every ``label`` (name=value, or name) and a ``status``."""
    labels, status = request.query_params.getlist("label"), request.query_params.get("status")
    return reply(lifecycle.chosen(limits.list_sandboxes(runtime_of(request)), labels, status))


async def create(request: Request) -> Response:
    """Fork children: all of them or none; with ``partial`` those that come up, and why the others did not."""
    body = await read_body(request, CreateSandboxes)
    children = await for_client(request, lambda: spawn(runtime_of(request), body))
    return _children(request, children)


async def fork_one(request: Request) -> Response:
    """Fork children of a running sandbox, all from the same instant; ``X-Forkd-Pause-Ms`` says how long it stood."""
    body = await read_body(request, ForkSandbox)
    options = ForkOptions.of_fork(body)
    runtime = runtime_of(request)
    async with awake(runtime, request.path_params["id"]) as sandbox:
        children = await for_client(request, lambda: fork_running(runtime, sandbox.id, body.n, options))
    if all(child.error for child in children):
        assert children[0].error is not None
        raise children[0].error
    response = _children(request, children)
    response.headers["x-forkd-pause-ms"] = f"{children[0].pause_ms or 0:.3f}"
    return response


def _children(request: Request, children: Sequence[Child | Told]) -> Response:
    rows = [child.info for child in children if child.info is not None]
    note_of(request.scope)["ids"] = [row.id for row in rows]
    failed = [_failed_child(child.index, child.error) for child in children if child.error is not None]
    return reply(PartialSpawn(sandboxes=rows, failed=failed), 207) if failed else reply(rows, 201)


async def get(request: Request) -> Response:
    """One sandbox."""
    return reply(limits.get_sandbox(runtime_of(request), request.path_params["id"]))


async def update(request: Request) -> Response:
    """Change its limits, name, labels, metadata, environment and time limits; what is absent stays."""
    body = await read_body(request, UpdateSandbox)
    return reply(await lifecycle.update(runtime_of(request), request.path_params["id"], body))


async def pause(request: Request) -> Response:
    """Stop its CPUs; everything stands still until it is resumed."""
    return reply(await lifecycle.pause(runtime_of(request), request.path_params["id"]))


async def resume(request: Request) -> Response:
    """Let a paused sandbox run on, with the right time."""
    return reply(await lifecycle.resume(runtime_of(request), request.path_params["id"]))


async def fork_verb(request: Request) -> Response:
    """Fork children of a snapshot or a running sandbox in one call, each with its own details."""
    body = await read_body(request, ForkRequest)
    children = await for_client(request, lambda: fork_any(runtime_of(request), body))
    return _children(request, children)


async def go_back(request: Request) -> Response:
    """Go back to one of its snapshots; id, name and details stay."""
    body = await read_body(request, RollbackRequest)
    return reply((await rollback(runtime_of(request), request.path_params["id"], body.tag)).info)


async def take_over(request: Request) -> Response:
    """Take over the id, name and details of the sandbox this one was forked from, which ends."""
    return reply((await promote(runtime_of(request), request.path_params["id"])).info)


async def delete(request: Request) -> Response:
    """End a sandbox; the answer comes when nothing of it is left."""
    await end_sandbox(runtime_of(request).sandbox(request.path_params["id"]))
    return Response(status_code=204)


async def run(request: Request) -> Response:
    """Run a command; with ``Accept: application/x-ndjson`` its output comes as events."""
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]
    body = await read_body(request, ExecRequest)
    if not wants_stream(request):
        return reply(await for_client(request, lambda: execute.exec_command(runtime, sandbox_id, body)))

    async def work(emit: Emit) -> Any:
        async def on_output(stream: str, data: bytes) -> None:
            await emit({"event": stream, "data": base64.b64encode(data).decode()})

        return await execute.stream_command(runtime, sandbox_id, body, on_output)

    return EventStream(work, stream_media(request))


async def capture(request: Request) -> Response:
    """Branch: capture a running sandbox into a new snapshot."""
    body = await read_body(request, BranchRequest)
    runtime = runtime_of(request)
    async with awake(runtime, request.path_params["id"]) as sandbox:
        info = await branch(runtime, sandbox.id, body)
    note_of(request.scope)["ids"] = [info.tag]
    return reply(info, 202 if info.status == "writing" else 201)


async def evaluate(request: Request) -> Response:
    """Evaluate code in the warm interpreter."""
    body = await read_body(request, EvalRequest)
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]
    return reply(await for_client(request, lambda: execute.eval_code(runtime, sandbox_id, body)))


async def prepare(request: Request) -> Response:
    """Change what children of its branches begin with: defaults of commands, a warm runtime."""
    body = await read_body(request, PrepareRequest)
    await execute.prepare(runtime_of(request), request.path_params["id"], body)
    return Response(status_code=204)


async def ping(request: Request) -> Response:
    """Ask the agent."""
    return reply(await execute.ping(runtime_of(request), request.path_params["id"]))


async def stats(request: Request) -> Response:
    """What it costs the host."""
    return reply(await measure(runtime_of(request), request.path_params["id"]))


def _failed_child(index: int, error: ForkdError) -> FailedChild:
    body, status = error_body(error)
    return FailedChild(index=index, status=status, **body)


ID = "/v1/sandboxes/{id}"
routes = [
    route("GET", "/v1/sandboxes", index, {200: list[SandboxInfo]}, query={"label": str, "status": str}),
    route(
        "POST",
        "/v1/fork",
        fork_verb,
        {201: list[SandboxInfo], 207: PartialSpawn},
        body=ForkRequest,
        errors=(BadInput, SnapshotNotFound, Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX),
    ),
    route("POST", f"{ID}/pause", pause, {200: SandboxInfo}, errors=(EngineError, *IN_SANDBOX)),
    route("POST", f"{ID}/resume", resume, {200: SandboxInfo}, errors=(EngineError, *IN_SANDBOX)),
    route(
        "POST",
        f"{ID}/rollback",
        go_back,
        {200: SandboxInfo},
        body=RollbackRequest,
        errors=(BadInput, SnapshotNotFound, Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX),
    ),
    route(
        "POST",
        f"{ID}/promote",
        take_over,
        {200: SandboxInfo},
        errors=(Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX),
    ),
    route(
        "POST",
        "/v1/sandboxes",
        create,
        {201: list[SandboxInfo], 207: PartialSpawn},
        body=CreateSandboxes,
        errors=(BadInput, SnapshotNotFound, Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX),
    ),
    route("GET", ID, get, {200: SandboxInfo}, errors=IN_SANDBOX),
    route("PATCH", ID, update, {200: SandboxInfo}, body=UpdateSandbox, errors=(BadInput, HostNotReady, *IN_SANDBOX)),
    route("DELETE", ID, delete, {204: None}, errors=IN_SANDBOX),
    route("POST", f"{ID}/exec", run, {200: ExecResult}, body=ExecRequest, events=True, errors=(BadInput, *IN_SANDBOX)),
    route("POST", f"{ID}/eval", evaluate, {200: EvalResult}, body=EvalRequest, errors=(BadInput, *IN_SANDBOX)),
    route(
        "POST",
        f"{ID}/branch",
        capture,
        {201: SnapshotInfo, 202: SnapshotInfo},
        body=BranchRequest,
        errors=(BadInput, Conflict, CaptureFailed, NoSpace, *IN_SANDBOX),
    ),
    route(
        "POST",
        f"{ID}/fork",
        fork_one,
        {201: list[SandboxInfo], 207: PartialSpawn},
        body=ForkSandbox,
        errors=(BadInput, Conflict, CaptureFailed, NoSpace, HostNotReady, EngineError, *IN_SANDBOX),
    ),
    route("POST", f"{ID}/prepare", prepare, {204: None}, body=PrepareRequest, errors=(BadInput, *IN_SANDBOX)),
    route("POST", f"{ID}/ping", ping, {200: dict[str, Any]}, errors=IN_SANDBOX),
    route("GET", f"{ID}/stats", stats, {200: dict[str, Any]}, errors=IN_SANDBOX),
]
