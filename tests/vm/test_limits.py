"""Limits: what a child may use of the host, and that the one it hits is named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from forkd.config import load_settings
from forkd.linux import cgroup
from forkd.linux.hostprobe import HostProbe
from forkd.linux.ptrace import read_status
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import open_runtime
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError

PARENT = "python-numpy"
TABLE = cgroup.homes(cgroup.hierarchies(HostProbe().read))
pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        os.geteuid() != 0 or not {"memory", "cpu", "pids"} <= set(TABLE), reason="needs root and cgroup controllers"
    ),
]
HUNGRY = "big = bytearray(400 << 20)\nfor i in range(0, len(big), 4096): big[i] = 1"


def groups() -> set[str]:
    found: set[str] = set()
    for home in set(TABLE.values()):
        base = home.own_path / "forkd"
        found |= {path.name for path in base.iterdir() if path.is_dir()} if base.is_dir() else set()
    return found


async def test_a_child_that_outgrows_its_memory_limit_ends_and_is_reported_as_such(controller: AsyncController) -> None:
    hungry = (await controller.spawn_sandboxes(PARENT, 1, memory_limit_mib=96))[0]["id"]
    neighbour = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    assert hungry in groups()
    with pytest.raises(ControllerError):
        await controller.eval_code(hungry, HUNGRY, 60)
    with (
        trio.fail_after(60),
        pytest.raises(ControllerError, match="out of memory: it reached its memory_limit_mib of 96"),
    ):
        while True:  # its link ends a moment before it is gone
            await controller.get_sandbox(hungry)
            await trio.sleep(0.05)
    assert (await controller.eval_code(neighbour, "1 + 1"))["result"] == "2"
    assert hungry not in groups()


async def test_limits_can_be_changed_while_it_runs_and_the_one_that_bites_is_named(controller: AsyncController) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]
    assert child["cpu_limit"] is None and child["limits_hit"] == []
    changed = await controller.update_sandbox(child["id"], cpu_limit=0.2, pids_limit=64)
    assert (changed["cpu_limit"], changed["pids_limit"]) == (0.2, 64)
    await controller.eval_code(child["id"], "sum(range(300000))", 60)
    assert (await controller.get_sandbox(child["id"]))["limits_hit"] == ["cpu_limit"]
    await controller.kill_sandbox(child["id"])
    assert child["id"] not in groups()


async def test_a_child_too_big_for_its_limit_never_comes_up_and_says_why(controller: AsyncController) -> None:
    with pytest.raises(ControllerError) as caught:
        await controller.spawn_sandboxes(PARENT, 1, memory_limit_mib=16)
    assert caught.value.code == "out_of_memory", caught.value
    assert await controller.list_sandboxes() == []


async def test_what_a_machine_takes_counts_from_its_first_byte(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, seen = cgroup.Group.admit, []

    def look(self: cgroup.Group, pid: int) -> None:
        # However late it is admitted: it is not QEMU yet.
        while (name := os.path.basename(os.readlink(f"/proc/{pid}/exe"))).startswith(("python", "setpriv")):
            time.sleep(0.001)
        seen.append(name)
        admit(self, pid)

    monkeypatch.setattr(cgroup.Group, "admit", look)
    async with open_runtime(load_settings({}, data_dir=data_dir)) as runtime:
        (child,) = await fork(runtime, PARENT, 1, ForkOptions(memory_limit_mib=256))
        assert child.sandbox is not None, child.error
        assert (await child.sandbox.link.eval("6 * 7", timeout=60)).result == "42"
        assert read_status(child.sandbox.machine.pid)["Name"].startswith("qemu-system")
    assert len(seen) == 1 and "qemu" not in seen[0]


async def test_limits_nobody_can_live_with_are_refused(controller: AsyncController) -> None:
    for fields in ({"memory_limit_mib": 1}, {"cpu_limit": 0}, {"pids_limit": 2}, {"io_limit_mibps": 0}):
        with pytest.raises(ControllerError) as caught:
            await controller.spawn_sandboxes(PARENT, 1, **fields)
        assert caught.value.code == "bad_input", fields
