"""A branch that cannot be finished: the owner killed at every step, a disk that is really full, a broken ancestry."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import trio

from forkd.config import load_settings
from forkd.ops.adopt import adopt_all
from forkd.ops.execute import eval_code
from forkd.runtime import open_runtime
from forkd.sandbox import end_sandbox
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.sdk.inprocess import hosted_app
from forkd.specs.models import ParentRef
from forkd.specs.requests import EvalRequest
from forkd.store.snapshots import SnapshotStore, content_id, encode

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
Tags = Callable[[str], str]

# A daemon's runtime that branches one sandbox and is killed, by itself, at the step it is told.
OWNER = """
import os, sys, trio
from forkd.config import load_settings
from forkd.ops.branch import branch
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import open_runtime
from forkd.specs.requests import BranchRequest

def step(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), 9)

async def main():
    async with open_runtime(load_settings(), daemon=True) as runtime:
        (child,) = await fork(runtime, "python-numpy", 1, ForkOptions())
        await child.sandbox.link.eval("kept = 42", timeout=60)
        print(child.sandbox.id, child.sandbox.machine.pid, flush=True)
        await branch(runtime, child.sandbox.id, BranchRequest(tag="never", mode=sys.argv[1]), step=step)

trio.run(main)
"""
STEPS = [
    *(("diff", step) for step in ("pause", "devices", "memory", "resumed", "commit")),
    *(("full", step) for step in ("devices", "memory", "commit")),
    *(("live", step) for step in ("pause", "devices", "ghost", "memory", "written", "commit")),
]


def beside(data_dir: Path, where: Path) -> Path:
    """A data directory of its own that shares the parent with the common one."""
    (where / "snapshots").mkdir(parents=True)
    for name in ("kernels", "rootfs", "cache"):
        (where / name).symlink_to(data_dir / name)
    (where / "snapshots" / PARENT).symlink_to(data_dir / "snapshots" / PARENT)
    return where


def same_command_line(pid: int) -> list[int]:
    """The process and its copies."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if Path(entry.path, "cmdline").read_bytes() == line:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(("mode", "where"), STEPS)
async def test_an_owner_killed_at_any_step_leaves_a_source_that_the_next_one_runs_on(
    data_dir: Path, tmp_path: Path, mode: str, where: str
) -> None:
    data = beside(data_dir, tmp_path / "data")
    env = {**os.environ, "FORKD_DATA_DIR": str(data)}
    command = [sys.executable, "-c", OWNER, mode, where]
    with trio.fail_after(120):
        owner = await trio.run_process(command, env=env, capture_stdout=True, capture_stderr=True, check=False)
    assert owner.returncode == -signal.SIGKILL, owner.stderr.decode()
    sandbox_id, pid = owner.stdout.decode().split()
    try:
        async with open_runtime(load_settings(env), daemon=True) as runtime:
            await adopt_all(runtime)
            answer = await eval_code(runtime, sandbox_id, EvalRequest(code="kept"))
            assert answer.result == "42"
            assert same_command_line(int(pid)) == [int(pid)], "a ghost is left"
            assert sorted(os.listdir(data / "snapshots")) == [".lock", PARENT]
            await end_sandbox(runtime.sandbox(sandbox_id))
    finally:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def small_store(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data directory on a file system of 8 MiB."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], check=True)
    monkeypatch.setenv("FORKD_DATA_DIR", str(beside(data_dir, small / "data")))
    yield small / "data"
    subprocess.run(["umount", small], check=True)


@pytest.mark.root
@pytest.mark.parametrize("mode", ["full", "diff", "live"])
async def test_a_full_disk_is_507_and_the_source_runs_on(small_store: Path, mode: str) -> None:
    async with (
        hosted_app() as transport,
        AsyncController("http://forkd", timeout=None, transport=transport) as controller,
    ):
        (child,) = await controller.spawn_sandboxes(PARENT, 1)
        await controller.eval_code(child["id"], "import os; blob = os.urandom(20 << 20); 1", 60)
        with pytest.raises(ControllerError) as refused:
            await controller.branch_sandbox(child["id"], tag="full", mode=mode)
        assert (refused.value.status, refused.value.code) == (507, "no_space")
        assert (await controller.eval_code(child["id"], "len(blob) >> 20", 60))["result"] == "20"
        assert [row["tag"] for row in await controller.list_snapshots()] == [PARENT]
        assert sorted(os.listdir(small_store / "snapshots")) == [".lock", PARENT]


@pytest.mark.root
async def test_a_branch_nobody_waits_for_that_fails_is_listed_as_failed(small_store: Path) -> None:
    async with (
        hosted_app() as transport,
        AsyncController("http://forkd", timeout=None, transport=transport) as controller,
    ):
        (child,) = await controller.spawn_sandboxes(PARENT, 1)
        await controller.eval_code(child["id"], "import os; blob = os.urandom(20 << 20); 1", 60)
        info = await controller.branch_sandbox(child["id"], tag="later", mode="live", wait=False)
        assert info["status"] == "writing"
        with trio.fail_after(60):
            while (info := await controller.get_snapshot("later"))["status"] == "writing":
                await trio.sleep(0.02)
        assert (info["status"], info["bootable"]) == ("failed", False)
        assert "no space" in info["warning"]
        await refused(controller, "later", "later", 404)
        assert (await controller.eval_code(child["id"], "len(blob) >> 20", 60))["result"] == "20"


@pytest.mark.parametrize("mode", ["full", "diff", "live"])
async def test_a_file_that_cannot_be_written_on_is_the_branchs_failure_and_the_source_runs_on(
    controller: AsyncController, fresh_tag: Tags, mode: str
) -> None:
    (child,) = await controller.spawn_sandboxes(PARENT, 1)
    await controller.eval_code(child["id"], "import os; blob = os.urandom(20 << 20); 1", 60)
    tag, limits = fresh_tag("large"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ControllerError) as failed:
            await controller.branch_sandbox(child["id"], tag=tag, mode=mode)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (failed.value.status, failed.value.code) == (500, "capture_failed")
    assert (await controller.eval_code(child["id"], "len(blob) >> 20", 60))["result"] == "20"
    assert tag not in [row["tag"] for row in await controller.list_snapshots()]


async def test_altered_parents_and_circles_are_named(
    controller: AsyncController, fresh_tag: Tags, data_dir: Path
) -> None:
    (source,) = await controller.spawn_sandboxes(PARENT, 1)
    first, second = fresh_tag("first"), fresh_tag("second")
    await controller.branch_sandbox(source["id"], tag=first, mode="diff")
    (child,) = await controller.spawn_sandboxes(first, 1)
    await controller.branch_sandbox(child["id"], tag=second, mode="diff")
    store = SnapshotStore(data_dir / "snapshots")
    manifest = store.load(first).manifest
    head = store.load(second).manifest

    # The parent under its old tag, but made anew.
    other = msgspec.structs.replace(manifest, hardware=msgspec.structs.replace(manifest.hardware, vcpus=2))
    other = msgspec.structs.replace(other, content=content_id(other))
    (store.path(first) / "snapshot.json").write_bytes(encode(other))
    await refused(controller, second, first)

    # The parent builds on its own child.
    circle = msgspec.structs.replace(manifest, parent=ParentRef(tag=second, content=head.content))
    circle = msgspec.structs.replace(circle, content=content_id(circle))
    (store.path(first) / "snapshot.json").write_bytes(encode(circle))
    looped = msgspec.structs.replace(head, parent=ParentRef(tag=first, content=circle.content))
    looped = msgspec.structs.replace(looped, content=content_id(looped))
    (store.path(second) / "snapshot.json").write_bytes(encode(looped))
    await refused(controller, second, first)

    # The parent's memory is gone.
    (store.path(first) / "snapshot.json").write_bytes(encode(manifest))
    (store.path(second) / "snapshot.json").write_bytes(encode(head))
    shutil.move(store.path(first) / "memory.delta", data_dir / "moved.delta")
    await refused(controller, second, "memory.delta")
    shutil.move(data_dir / "moved.delta", store.path(first) / "memory.delta")
    (again,) = await controller.spawn_sandboxes(second, 1)
    assert (await controller.eval_code(again["id"], "1 + 1"))["result"] == "2"


async def refused(controller: AsyncController, tag: str, named: str, status: int = 409) -> None:
    with pytest.raises(ControllerError) as caught:
        await controller.spawn_sandboxes(tag, 1)
    assert caught.value.status == status
    assert named in str(caught.value)
