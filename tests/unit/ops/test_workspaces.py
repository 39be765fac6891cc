"""Suspending a workspace: what its sandbox acknowledges is in the state, and a failed suspend leaves it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from forkd.inventory import Workspace
from forkd.ops import spawn
from forkd.ops.awake import awake, pause_sandbox, resume_sandbox
from forkd.ops.branch import branch
from forkd.ops.workspaces import create_workspace, suspend_workspace
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.branch import Pause
from forkd.specs.errors import NoSpace, SandboxPaused
from forkd.specs.models import MemoryRef, WorkspaceInfo
from forkd.specs.requests import BranchRequest, CreateWorkspace
from tests.unit.ops.sandboxes import TAG, FakeMachine, add_sandbox, forks, scene


class Mode:
    """Pauses and resumes as every mode does, and writes nothing to speak of."""

    name = "full"
    needs: frozenset[str] = frozenset()
    keeps_running = False

    async def capture(self, machine: Any, sink: Any, step: object, task_status: trio.TaskStatus[Pause]) -> None:
        await machine.pause()
        await sink.write_devices(b"state")
        await machine.resume()
        sink.memory = MemoryRef(kind="image", digest="sha256:0", size=0)
        task_status.started(Pause(1.0))


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with scene(tmp_path) as made:
        made.plugins.branch_modes["full"] = cast(Any, Mode())
        yield made


def runs(sandbox: Sandbox) -> bool:
    return cast(FakeMachine, sandbox.machine).runs


async def add_workspace(runtime: Runtime, **fields: Any) -> Sandbox:
    sandbox = await add_sandbox(runtime, "sb-1", **fields)
    cast(FakeMachine, sandbox.machine).runs = sandbox.info.status == "running"
    times = {"created_at_unix": 1, "last_active_unix": 1}
    info = WorkspaceInfo(id="ws-1", name="w", source_snapshot_tag=TAG, live_sandbox_id="sb-1", **times)
    runtime.inventory.save_workspace(Workspace(info, CreateWorkspace(name="w", snapshot_tag=TAG)))
    return sandbox


async def test_from_its_capture_until_its_end_the_sandbox_stands_still(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await add_workspace(runtime)
    honest = runtime.inventory.save_workspace
    seen: list[tuple[bool, bool]] = []

    def save(workspace: Workspace) -> None:
        seen.append((runs(sandbox), sandbox.suspending))
        honest(workspace)

    monkeypatch.setattr(runtime.inventory, "save_workspace", save)
    assert (await suspend_workspace(runtime, "w", diff=False)).status == "suspended"
    assert seen == [(False, True)] * 2
    assert "sb-1" not in runtime.sandboxes


async def test_requests_are_refused_while_the_state_is_written(runtime: Runtime) -> None:
    sandbox = await add_workspace(runtime)
    sandbox.suspending = True

    async def use() -> None:
        async with awake(runtime, "sb-1"):
            pass

    for ask in (use(), resume_sandbox(runtime, sandbox), branch(runtime, "sb-1", BranchRequest(tag="again"))):
        with pytest.raises(SandboxPaused, match="is being suspended"):
            await ask
    assert not runtime.snapshots.path("again").exists()
    await pause_sandbox(runtime, sandbox, auto=True)


@pytest.mark.parametrize("status", ["running", "paused"])
async def test_after_a_failed_suspend_the_sandbox_is_what_it_was(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    sandbox = await add_workspace(runtime, status=status)

    def full(workspace: Workspace) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(runtime.inventory, "save_workspace", full)
    with pytest.raises(NoSpace):
        await suspend_workspace(runtime, "w", diff=False)
    assert runs(sandbox) == (status == "running")
    sandbox.check_stays()


async def test_a_sandbox_that_cannot_be_written_down_as_a_workspace_is_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(workspace: Workspace) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(spawn, "fork", forks(runtime))
    monkeypatch.setattr(runtime.inventory, "save_workspace", full)
    with pytest.raises(NoSpace):
        await create_workspace(runtime, CreateWorkspace(name="w", snapshot_tag=TAG))
    assert not runtime.sandboxes
