"""Workspaces: a sandbox under a name, whose state is captured when it is suspended and comes back when it is resumed.

Nothing is ever thrown away before its successor is on the disk: suspend writes the new state under a new tag, then the
workspace's row, and only then ends the sandbox and removes older states.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import trio

from forkd.inventory import Workspace
from forkd.ops.branch import branch
from forkd.ops.children import or_ended
from forkd.ops.remove import remove_snapshot
from forkd.ops.spawn import spawn
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.specs.errors import BadInput, Conflict, HostNotReady, NotFound, SnapshotInUse, WorkspaceNotFound
from forkd.specs.models import WorkspaceInfo
from forkd.specs.requests import BranchRequest, CreateWorkspace
from forkd.specs.tags import check_tag
from forkd.store.chain import resolve

MAX_TAG = 64
MAX_DEPTH = 8
"""From this many layers on a suspend writes the whole state, so that chains stay short."""


def list_workspaces(runtime: Runtime) -> list[WorkspaceInfo]:
    """All of them, by name. Raises HostNotReady, as everything here, where nothing outlives a command."""
    _check_daemon(runtime)
    return [_now(runtime, workspace) for workspace in runtime.inventory.workspaces()]


def get_workspace(runtime: Runtime, name: str) -> WorkspaceInfo:
    """One of them. Raises WorkspaceNotFound."""
    return _now(runtime, _find(runtime, name))


async def create_workspace(runtime: Runtime, request: CreateWorkspace) -> WorkspaceInfo:
    """Fork one child and give it a name. Raises Conflict if the name is taken."""
    _check_daemon(runtime)
    check_tag(request.name, "workspace name")
    runtime.snapshots.path(request.snapshot_tag)
    with _held(runtime, request.name):
        if any(found.info.name == request.name for found in runtime.inventory.workspaces()):
            raise Conflict(f"workspace {request.name!r} exists already", hint="resume it, or delete it first")
        async with _forked(runtime, request.snapshot_tag, request) as sandbox:
            now = int(time.time())
            info = WorkspaceInfo(
                id=f"ws-{sandbox.id[:16]}",
                name=request.name,
                source_snapshot_tag=request.snapshot_tag,
                live_sandbox_id=sandbox.id,
                created_at_unix=now,
                last_active_unix=now,
            )
            runtime.inventory.save_workspace(Workspace(info, request))
    runtime.observe("workspace", name=request.name, status="running", id=sandbox.id)
    return info


async def suspend_workspace(runtime: Runtime, name: str, *, diff: bool) -> WorkspaceInfo:
    """Capture its sandbox, then end it; between the two it stands still, and requests to it are refused.

    Whatever fails before the capture is safe, the sandbox runs on.
    """
    with _held(runtime, name):
        workspace = _find(runtime, name)
        info = _now(runtime, workspace)
        if info.status != "running" or info.live_sandbox_id is None:
            raise BadInput(f"workspace {name!r} is {info.status}, not running", hint=f"forkd workspace resume {name}")
        sandbox = runtime.sandbox(info.live_sandbox_id)
        deep = sandbox.source is not None and len(resolve(runtime.snapshots, sandbox.source.manifest.tag)) > MAX_DEPTH
        tag = _free_tag(runtime, name)
        async with _halted(sandbox):
            request = BranchRequest(tag=tag, mode="diff" if diff and not deep else "full")
            await branch(runtime, sandbox.id, request, last=True)
            workspace.info = msgspec.structs.replace(
                workspace.info,
                current_state_tag=tag,
                status="suspended",
                last_active_unix=int(time.time()),
                last_branch_memory_path=sandbox.info.last_branch_memory_path,
            )
            workspace.made = _carried_over(workspace.made, sandbox)
            runtime.inventory.save_workspace(workspace)
        await _finish_suspend(runtime, workspace)
    runtime.observe("workspace", name=name, status="suspended", tag=tag)
    return workspace.info


async def resume_workspace(runtime: Runtime, name: str) -> WorkspaceInfo:
    """Fork its last state, or its source if it has none yet, with the limits, network and labels it had."""
    with _held(runtime, name):
        workspace = _find(runtime, name)
        if _now(runtime, workspace).status == "running":
            raise BadInput(f"workspace {name!r} is running already")
        tag = workspace.info.current_state_tag or workspace.info.source_snapshot_tag
        async with _forked(runtime, tag, workspace.made) as sandbox:
            workspace.info = msgspec.structs.replace(
                workspace.info,
                status="running",
                live_sandbox_id=sandbox.id,
                last_active_unix=int(time.time()),
                reason=None,
            )
            runtime.inventory.save_workspace(workspace)
    runtime.observe("workspace", name=name, status="running", id=sandbox.id)
    return workspace.info


async def delete_workspace(runtime: Runtime, name: str) -> None:
    """End its sandbox and remove its states; the source stays, and so does a state that others build on."""
    with _held(runtime, name):
        workspace = _find(runtime, name)
        if sandbox := runtime.sandboxes.get(workspace.info.live_sandbox_id or ""):
            await end_sandbox(sandbox)
        workspace.info.current_state_tag = None
        await _remove_states(runtime, name, keep={workspace.info.source_snapshot_tag})
        runtime.inventory.remove_workspace(name)
    runtime.observe("workspace", name=name, status="deleted")


async def settle_workspaces(runtime: Runtime) -> None:
    """Finish suspends that an earlier daemon had on the disk but did not live to finish."""
    for workspace in runtime.inventory.workspaces():
        if workspace.info.status == "suspended" and workspace.info.live_sandbox_id is not None:
            await _finish_suspend(runtime, workspace)


@asynccontextmanager
async def _halted(sandbox: Sandbox) -> AsyncIterator[None]:
    """From its capture on the sandbox stands still, so that it acknowledges nothing its state does not have.

    On a failure it goes on as it was, running or paused.
    """
    sandbox.check_stays()
    sandbox.suspending = True
    sandbox.users += 1  # it does not doze meanwhile
    try:
        yield
    except BaseException:
        with trio.CancelScope(shield=True):
            async with sandbox.capturing:  # a capture may be under way still, if this was cancelled
                sandbox.suspending = False
                if sandbox.info.status == "running":
                    await sandbox.machine.resume()
        raise
    finally:
        sandbox.users -= 1
        sandbox.used = trio.current_time()
        sandbox.changed.set()


async def _finish_suspend(runtime: Runtime, workspace: Workspace) -> None:
    """The state is safe: end the sandbox, forget it, remove older states."""
    if sandbox := runtime.sandboxes.get(workspace.info.live_sandbox_id or ""):
        await end_sandbox(sandbox)
    workspace.info.live_sandbox_id = None
    runtime.inventory.save_workspace(workspace)
    tag = workspace.info.current_state_tag
    keep = {layer.manifest.tag for layer in resolve(runtime.snapshots, tag)} if tag else set()
    await _remove_states(runtime, workspace.info.name, keep | {workspace.info.source_snapshot_tag})


@asynccontextmanager
async def _forked(runtime: Runtime, tag: str, request: CreateWorkspace) -> AsyncIterator[Sandbox]:
    """A workspace's sandbox, which is not left behind if it cannot be written down that it is one."""
    (child,) = await spawn(runtime, msgspec.structs.replace(request, snapshot_tag=tag, n=1, partial=False))
    assert child.sandbox is not None
    async with or_ended([child]):
        yield child.sandbox


def _carried_over(made: CreateWorkspace, sandbox: Sandbox) -> CreateWorkspace:
    """The request with what was changed on the running sandbox since: limits, labels."""
    shared = set(CreateWorkspace.__struct_fields__) & set(sandbox.info.__struct_fields__) - {"snapshot_tag", "name"}
    values = msgspec.to_builtins(sandbox.info)
    return msgspec.convert(msgspec.to_builtins(made) | {key: values[key] for key in shared}, CreateWorkspace)


def _now(runtime: Runtime, workspace: Workspace) -> WorkspaceInfo:
    """What the API shows: a running workspace whose sandbox is gone is stale, and says why."""
    info = workspace.info
    if info.status != "running" or info.live_sandbox_id is None:
        return info
    if info.live_sandbox_id in runtime.sandboxes or info.live_sandbox_id in runtime.adopting:
        return info
    reason = runtime.endings.get(info.live_sandbox_id, "its sandbox was ended")
    return msgspec.structs.replace(info, status="stale", live_sandbox_id=None, reason=reason)


def _check_daemon(runtime: Runtime) -> None:
    if not runtime.keeps:
        raise HostNotReady("workspaces outlive a command, so they need a daemon", hint="start one: forkd daemon")


def _find(runtime: Runtime, name: str) -> Workspace:
    _check_daemon(runtime)
    for workspace in runtime.inventory.workspaces():
        if workspace.info.name == name:
            return workspace
    raise WorkspaceNotFound(f"there is no workspace {name[:80]!r}", hint="forkd workspace list lists them")


@contextmanager
def _held(runtime: Runtime, name: str) -> Iterator[None]:
    """One change at a time."""
    if name in runtime.busy_workspaces:
        raise Conflict(f"workspace {name[:80]!r} is being changed", hint="try again in a moment")
    runtime.busy_workspaces.add(name)
    try:
        yield
    finally:
        runtime.busy_workspaces.discard(name)


def _base(name: str) -> str:
    """The tag of a workspace's state; one with a long name has a digest in place of its end."""
    plain = f"ws-{name}-state"
    if len(plain) <= MAX_TAG - 4:
        return plain
    return f"ws-{name[:36]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}-state"


def _states(runtime: Runtime, name: str) -> list[str]:
    """Tags of the workspace's states, newest number first."""
    pattern = re.compile(re.escape(_base(name)) + r"(?:\.(\d+))?")
    found = []
    for path in runtime.snapshots.root.iterdir() if runtime.snapshots.root.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            found.append((int(match[1] or 0), path.name))
    return [tag for _, tag in sorted(found, reverse=True)]


def _free_tag(runtime: Runtime, name: str) -> str:
    taken, base = set(_states(runtime, name)), _base(name)
    return next(tag for tag in (base, *(f"{base}.{number}" for number in range(2, 1000))) if tag not in taken)


async def _remove_states(runtime: Runtime, name: str, keep: set[str]) -> None:
    """Remove states nothing needs, as often as that makes others removable."""
    doomed = [tag for tag in _states(runtime, name) if tag not in keep]
    while doomed:
        left = []
        for tag in doomed:
            try:
                await remove_snapshot(runtime, tag, state_of=name)
            except SnapshotInUse:
                left.append(tag)
            except NotFound:
                continue  # removed by somebody else meanwhile
        if len(left) == len(doomed):
            return
        doomed = left
