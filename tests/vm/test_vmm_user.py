"""As root, each QEMU runs as a user of its own, and that user can touch nothing but what QEMU was given."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.linux.hostprobe import HostProbe
from forkd.linux.process import alive, start_time
from forkd.plugins.engine_qemu.user import USERS, why_not
from forkd.sdk.async_controller import AsyncController

PARENT = "python-numpy"
REFUSED = why_not(USERS, HostProbe())
pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.skipif(REFUSED is not None, reason=REFUSED or "")]


def status_field(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def user(pid: int) -> int:
    """The one user and group a process runs as in every respect."""
    (uid,) = set(status_field(pid, "Uid").split())
    assert {uid} == set(status_field(pid, "Gid").split()) == set(status_field(pid, "Groups").split())
    assert int(status_field(pid, "CapEff"), 16) == 0 and status_field(pid, "NoNewPrivs") == "1"
    return int(uid)


def slot(pid: int) -> Path:
    return Path(os.readlink(f"/proc/{pid}/cwd"))


def as_user(pid: int, script: str, *arguments: object) -> int:
    """Run a script as the user and in the place of a machine, as one who took it over would; its exit status."""
    who = str(user(pid))
    line = ["setpriv", "--reuid", who, "--regid", who, "--clear-groups", "--", "sh", "-c", script, "sh"]
    return subprocess.run([*line, *map(str, arguments)], cwd=slot(pid), stderr=subprocess.DEVNULL).returncode


@pytest.fixture
async def served(daemon: Any) -> AsyncIterator[AsyncController]:
    """A controller of a daemon, whose machines may outlive it: only those change their user."""
    async with AsyncController(daemon.url, timeout=120) as controller:
        yield controller


async def test_a_machine_cannot_read_another_slot_nor_the_daemons_files_nor_change_its_own(
    served: AsyncController, data_dir: Path
) -> None:
    one, other = await served.spawn_sandboxes(PARENT, 2, spawn="restore")
    mine, theirs = one["pid"], other["pid"]
    assert user(mine) in USERS and user(mine) != user(theirs)
    token = data_dir / "token-of-the-test"
    token.write_text("secret")
    token.chmod(0o600)
    try:
        assert as_user(mine, "true") == 0
        for hidden in (slot(theirs) / "vmm.log", f"../{slot(theirs).name}/vmm.log", token):
            assert as_user(mine, 'cat "$1"', hidden) != 0, hidden
        for folder in (".", "..", slot(theirs), slot(mine).parent):
            assert as_user(mine, 'ls "$1"', folder) != 0, folder
        for change in ("touch new", "rm -f vmm.log", "mv vmm.log old", "ln -s /etc/shadow x", "echo > vmm.log"):
            assert as_user(mine, change) != 0, change
        for pid in (mine, theirs, os.getpid()):
            assert as_user(mine, 'head -c 1 "/proc/$1/environ"', pid) != 0
            assert as_user(mine, 'head -c 1 < "/proc/$1/mem"', pid) != 0
        assert as_user(mine, 'kill -0 "$1"', theirs) != 0
    finally:
        token.unlink()


@pytest.mark.parametrize("mode", ["full", "diff", "live"])
async def test_such_a_machine_is_branched_and_its_branch_runs(served: AsyncController, mode: str) -> None:
    (source,) = await served.spawn_sandboxes(PARENT, 1, spawn="restore")
    await served.eval_code(source["id"], "kept = 41")
    tag = f"vmm-user-{mode}"
    await served.branch_sandbox(source["id"], tag, mode=mode)
    try:
        (child,) = await served.spawn_sandboxes(tag, 1, spawn="restore")
        assert (await served.eval_code(child["id"], "kept + 1"))["result"] == "42"
        assert user(child["pid"]) != user(source["pid"])
        assert not list(slot(source["pid"]).glob("devices*"))
    finally:
        await served.delete_snapshot(tag, force=True)


async def test_clones_share_their_templates_user_and_cannot_look_into_each_other(served: AsyncController) -> None:
    one, other = await served.spawn_sandboxes(PARENT, 2, spawn="template")
    assert one["spawned_by"] == other["spawned_by"] == "template", (one, other)
    assert user(one["pid"]) == user(other["pid"]) and user(one["pid"]) in USERS
    assert as_user(one["pid"], 'head -c 1 < "/proc/$1/mem"', other["pid"]) != 0
    assert as_user(one["pid"], 'cat "../$1/vmm.log"', slot(other["pid"]).name) != 0
    (child,) = await served.fork_sandbox(one["id"], 1)
    assert (await served.eval_code(child["id"], "6 * 7"))["result"] == "42"
    assert user(child["pid"]) == user(one["pid"])


async def test_a_machine_that_must_end_with_its_owner_keeps_its_user(controller: AsyncController) -> None:
    (row,) = await controller.spawn_sandboxes(PARENT, 1, spawn="restore")
    assert status_field(row["pid"], "Uid").split()[0] == str(os.geteuid())


def test_such_a_machine_is_adopted_by_the_next_daemon_and_ended_by_it(daemon: Any) -> None:
    async def make() -> dict[str, Any]:
        async with AsyncController(daemon.url, timeout=120) as controller:
            (row,) = await controller.spawn_sandboxes(PARENT, 1, spawn="restore")
            await controller.eval_code(row["id"], "kept = 41")
            return row

    async def use(sandbox_id: str) -> None:
        async with AsyncController(daemon.url, timeout=120) as controller:
            assert (await controller.eval_code(sandbox_id, "kept + 1"))["result"] == "42"
            await controller.branch_sandbox(sandbox_id, "vmm-user-adopted", mode="live")
            await controller.delete_snapshot("vmm-user-adopted", force=True)
            await controller.kill_sandbox(sandbox_id)

    row = trio.run(make)
    began = start_time(row["pid"])
    daemon.kill()
    assert alive(row["pid"], began) and user(row["pid"]) in USERS
    daemon.start()
    trio.run(use, row["id"])
    assert not alive(row["pid"], began)
