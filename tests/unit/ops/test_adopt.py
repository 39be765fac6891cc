"""What becomes of a VMM of an earlier daemon that cannot be taken over: it is ended, whatever the reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from forkd.config import Settings
from forkd.inventory import Row
from forkd.linux.process import alive, start_time
from forkd.ops import adopt
from forkd.ops.adopt import adopt_all
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Plan, Sandbox
from forkd.slots import SlotOwner
from forkd.specs.engine import Machine, Slot
from forkd.specs.errors import EngineError, ForkdError, MachineGone
from forkd.specs.models import FileRef, Hardware, MemoryRef, Platform, SandboxInfo, Snapshot

PLATFORM = Platform(engine="fake", engine_version="1", accelerator="tcg", machine="m", cpu="c", arch="a")


class NotToBeResumed:
    async def resume(self) -> None:
        raise EngineError("it does not run on")


class FakeEngine:
    def __init__(self, adopt: Callable[[], object]) -> None:
        self._adopt = adopt

    async def adopt(self, slot: Slot, pid: int, starttime: int) -> Machine:
        return cast(Machine, self._adopt())


def fail(error: Exception) -> Callable[[], object]:
    def adopt() -> object:
        raise error

    return adopt


def row_of(pid: int, starttime: int) -> Row:
    nothing = FileRef(digest="sha256:0", size=0)
    source = Snapshot(
        tag="t",
        content="c",
        created_at_unix=1,
        forkd_version="1",
        platform=PLATFORM,
        hardware=Hardware(vcpus=1, mem_mib=64),
        vmstate=nothing,
        memory=MemoryRef(kind="image", digest="sha256:0", size=0),
        rootfs=None,
        kernel=nothing,
        agent_sync="00",
    )
    info = SandboxInfo(id="sb-1", snapshot_tag="t", created_at_unix=1, pid=pid)
    return Row("sb-1", pid, starttime, source, info)


async def adopt_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Runtime], None], earlier: int = 0
) -> bool:
    """Adopt a row whose VMM is ``sleep``, or began ``earlier`` than that; whether it still runs after it."""
    vmm = subprocess.Popen(["sleep", "100"])  # noqa: ASYNC220
    try:
        started = start_time(vmm.pid)
        row = row_of(vmm.pid, started - earlier)
        settings = Settings(tmp_path)
        slots = SlotOwner(settings.run_dir, "daemon")
        slots.take("sb-1")
        slots.close()
        async with open_runtime(settings, daemon=True) as runtime:
            monkeypatch.setattr(runtime.inventory, "rows", lambda: [row])
            change(runtime)
            await adopt_all(runtime)
            assert "could not be taken over" in runtime.endings["sb-1"]
            assert not runtime.slots.existing()
        return alive(vmm.pid, started)
    finally:
        vmm.kill()
        vmm.wait()


@pytest.mark.parametrize(
    "adopt",
    [fail(MachineGone("no answer")), fail(FileNotFoundError(2, "gone")), NotToBeResumed],
    ids=["no answer", "no file", "does not resume"],
)
async def test_a_vmm_that_cannot_be_adopted_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopt: Callable[[], object]
) -> None:
    def change(runtime: Runtime) -> None:
        runtime.engines["fake"] = cast(Any, FakeEngine(adopt))

    assert not await adopt_one(tmp_path, monkeypatch, change)


async def test_a_vmm_of_an_engine_that_is_not_there_any_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not await adopt_one(tmp_path, monkeypatch, lambda runtime: None)


async def test_a_vmm_whose_network_cannot_be_had_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def attach(*_: object) -> Slot:
        raise ForkdError("no network")

    assert not await adopt_one(
        tmp_path, monkeypatch, lambda runtime: monkeypatch.setattr(runtime.slots, "attach", attach)
    )


async def test_a_vmm_whose_directory_is_gone_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(runtime: Runtime) -> None:
        os.rename(runtime.slots.directory / "sb-1", tmp_path / "elsewhere")

    assert not await adopt_one(tmp_path, monkeypatch, change)


async def test_a_process_that_has_the_pid_now_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await adopt_one(tmp_path, monkeypatch, lambda runtime: None, earlier=1)


@pytest.mark.parametrize("ports", [True, False])
async def test_an_agent_port_of_the_daemon_that_was_is_forgotten_where_none_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: bool
) -> None:
    row = row_of(1, 1)
    row.info.guest_addr = "127.0.0.1:4711"
    seen: list[str] = []

    async def run_sandbox(runtime: Runtime, plan: Plan, task_status: trio.TaskStatus[Any]) -> None:
        seen.append(plan.info.guest_addr)
        raise MachineGone("seen enough")

    async def on_up(sandbox: Sandbox) -> None:
        raise AssertionError("it never comes up")

    monkeypatch.setattr(adopt, "run_sandbox", run_sandbox)
    settings = Settings(tmp_path)
    async with open_runtime(settings, daemon=True) as runtime:
        runtime.slots.take("sb-1")
        monkeypatch.setattr(runtime.inventory, "rows", lambda: [row])
        runtime.on_up = on_up if ports else None
        await adopt_all(runtime)
    assert seen == ["127.0.0.1:4711" if ports else ""]
