"""Routes of sandboxes: fork, list, run things in them, end them."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import Emit, EventStream, error_body, read_body, reply, wants_stream
from forkd.ops import execute
from forkd.ops.branch import branch
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.stats import stats as measure
from forkd.sandbox import end_sandbox
from forkd.specs.errors import ForkdError
from forkd.specs.requests import BranchRequest, CreateSandboxes, EvalRequest, ExecRequest


async def index(request: Request) -> Response:
    """All running sandboxes."""
    return reply([sandbox.info for sandbox in runtime_of(request).sandboxes.values()])


async def create(request: Request) -> Response:
    """Fork children. If only some came up the answer has those, and ``X-Forkd-Failed`` counts the others."""
    body = await read_body(request, CreateSandboxes)
    options = ForkOptions(
        memory_backend="memfd" if body.live_fork else "file",
        hugepages=body.hugepages,
        memory_limit_mib=body.memory_limit_mib,
    )
    children = await fork(runtime_of(request), body.snapshot_tag, body.n, options)
    rows = [child.sandbox.info for child in children if child.sandbox is not None]
    failed = [child for child in children if child.error is not None]
    if not rows:
        assert failed[0].error is not None
        raise failed[0].error
    if failed:
        problems = [{"index": child.index, **_told(child.error)} for child in failed if child.error]
        return reply({"sandboxes": rows, "failed": problems}, 207)
    return reply(rows, 201)


async def get(request: Request) -> Response:
    """One sandbox."""
    return reply(runtime_of(request).sandbox(request.path_params["id"]).info)


async def delete(request: Request) -> Response:
    """End a sandbox; the answer comes when nothing of it is left."""
    await end_sandbox(runtime_of(request).sandbox(request.path_params["id"]))
    return Response(status_code=204)


async def run(request: Request) -> Response:
    """Run a command; with ``Accept: application/x-ndjson`` its output comes as events."""
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]
    body = await read_body(request, ExecRequest)
    if not wants_stream(request):
        return reply(await execute.exec_command(runtime, sandbox_id, body))

    async def work(emit: Emit) -> Any:
        async def on_output(stream: str, data: bytes) -> None:
            await emit({"event": stream, "data": base64.b64encode(data).decode()})

        return await execute.stream_command(runtime, sandbox_id, body, on_output)

    return EventStream(work)


async def capture(request: Request) -> Response:
    """Branch: capture a running sandbox into a new snapshot."""
    body = await read_body(request, BranchRequest)
    info = await branch(runtime_of(request), request.path_params["id"], body)
    return reply(info, 202 if info.status == "writing" else 201)


async def evaluate(request: Request) -> Response:
    """Evaluate code in the warm interpreter."""
    body = await read_body(request, EvalRequest)
    return reply(await execute.eval_code(runtime_of(request), request.path_params["id"], body))


async def ping(request: Request) -> Response:
    """Ask the agent."""
    return reply(await execute.ping(runtime_of(request), request.path_params["id"]))


async def stats(request: Request) -> Response:
    """What it costs the host."""
    return reply(await measure(runtime_of(request), request.path_params["id"]))


def _told(error: ForkdError) -> dict[str, Any]:
    body, status = error_body(error)
    return {**body, "status": status}


routes = [
    Route("/v1/sandboxes", index, methods=["GET"]),
    Route("/v1/sandboxes", create, methods=["POST"]),
    Route("/v1/sandboxes/{id}", get, methods=["GET"]),
    Route("/v1/sandboxes/{id}", delete, methods=["DELETE"]),
    Route("/v1/sandboxes/{id}/exec", run, methods=["POST"]),
    Route("/v1/sandboxes/{id}/eval", evaluate, methods=["POST"]),
    Route("/v1/sandboxes/{id}/branch", capture, methods=["POST"]),
    Route("/v1/sandboxes/{id}/ping", ping, methods=["POST"]),
    Route("/v1/sandboxes/{id}/stats", stats, methods=["GET"]),
]
