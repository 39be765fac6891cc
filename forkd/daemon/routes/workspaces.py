"""Routes of workspaces: named sandboxes that are suspended and resumed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import IN_SANDBOX, Errors, route
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import note_of, read_body, reply
from forkd.ops import workspaces
from forkd.specs.errors import (
    BadInput,
    CaptureFailed,
    Conflict,
    EngineError,
    HostNotReady,
    NoSpace,
    SnapshotNotFound,
    WorkspaceNotFound,
)
from forkd.specs.models import WorkspaceInfo
from forkd.specs.requests import CreateWorkspace, SuspendWorkspace


async def index(request: Request) -> Response:
    """All workspaces."""
    return reply(workspaces.list_workspaces(runtime_of(request)))


async def create(request: Request) -> Response:
    """Fork one child and give it a name."""
    info = await workspaces.create_workspace(runtime_of(request), await read_body(request, CreateWorkspace))
    note_of(request.scope)["ids"] = [info.name, info.live_sandbox_id]
    return reply(info, 201)


async def get(request: Request) -> Response:
    """One workspace."""
    return reply(workspaces.get_workspace(runtime_of(request), request.path_params["name"]))


async def suspend(request: Request) -> Response:
    """Capture its state, then end its sandbox. If the capture fails the sandbox runs on."""
    body = await read_body(request, SuspendWorkspace)
    name = request.path_params["name"]
    return reply(await workspaces.suspend_workspace(runtime_of(request), name, diff=body.diff))


async def resume(request: Request) -> Response:
    """Bring it back from its last state."""
    info = await workspaces.resume_workspace(runtime_of(request), request.path_params["name"])
    note_of(request.scope)["ids"] = [info.live_sandbox_id]
    return reply(info)


async def delete(request: Request) -> Response:
    """End its sandbox and remove its states; the source stays."""
    await workspaces.delete_workspace(runtime_of(request), request.path_params["name"])
    return Response(status_code=204)


NAME = "/v1/workspaces/{name}"
FORKS: Errors = (BadInput, SnapshotNotFound, Conflict, HostNotReady, NoSpace, EngineError, *IN_SANDBOX)
routes = [
    route("GET", "/v1/workspaces", index, {200: list[WorkspaceInfo]}, errors=(HostNotReady,)),
    route("POST", "/v1/workspaces", create, {201: WorkspaceInfo}, body=CreateWorkspace, errors=FORKS),
    route("GET", NAME, get, {200: WorkspaceInfo}, errors=(WorkspaceNotFound, HostNotReady)),
    route("DELETE", NAME, delete, {204: None}, errors=(WorkspaceNotFound, Conflict, HostNotReady)),
    route(
        "POST",
        f"{NAME}/suspend",
        suspend,
        {200: WorkspaceInfo},
        body=SuspendWorkspace,
        errors=(WorkspaceNotFound, CaptureFailed, *FORKS),
    ),
    route("POST", f"{NAME}/resume", resume, {200: WorkspaceInfo}, errors=(WorkspaceNotFound, *FORKS)),
]
