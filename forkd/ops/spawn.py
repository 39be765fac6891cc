"""Spawn: fork children as a request asks, all of them or, if it says so, as many as come up."""

from __future__ import annotations

import trio

from forkd.ops.fork import Child, ForkOptions, end_unless_made, fork
from forkd.ops.lifecycle import check_details, dress
from forkd.runtime import Runtime
from forkd.sandbox import end_sandbox
from forkd.specs.errors import BadInput
from forkd.specs.requests import CreateSandboxes, SandboxDetails


async def spawn(runtime: Runtime, request: CreateSandboxes) -> list[Child]:
    """One row a child. Unless the request is ``partial`` one failure ends the others too, and is raised.

    The error raised has every failed child with its own error in ``details["failed"]``.
    """
    details = SandboxDetails(
        name=request.name,
        labels=request.labels,
        metadata=request.metadata,
        env=request.env,
        timeout_secs=request.timeout_secs,
        idle_pause_secs=request.idle_pause_secs,
    )
    check_details(runtime, details)
    if request.name is not None and request.n != 1:
        raise BadInput(f"one name for {request.n} sandboxes", hint="a name goes with n: 1")
    children = await fork(runtime, request.snapshot_tag, request.n, ForkOptions.of(request))
    async with end_unless_made(children):
        for child in children:
            if child.sandbox is not None and details != SandboxDetails():
                await dress(runtime, child.sandbox, details)
    errors = [(child.index, child.error) for child in children if child.error is not None]
    alive = [child.sandbox for child in children if child.sandbox is not None]
    if not errors or (request.partial and alive):
        return children
    async with trio.open_nursery() as nursery:
        for sandbox in alive:
            nursery.start_soon(end_sandbox, sandbox)
    error = errors[0][1]
    error.details["failed"] = [{"index": index, **_told(child)} for index, child in errors]
    raise error


def _told(error: Exception) -> dict[str, object]:
    return {"error": str(error), "code": getattr(error, "code", "internal")}
