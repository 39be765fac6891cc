"""A branch whose disk fails: the one who asked is told, the daemon and the source go on."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from forkd.ops.branch import branch
from forkd.ops.describe import get_snapshot
from forkd.ops.remove import remove_snapshot
from forkd.runtime import MAX_NOTES, Notes, Runtime
from forkd.specs.branch import Pause
from forkd.specs.errors import CaptureFailed, SnapshotInUse, SnapshotNotFound
from forkd.specs.requests import BranchRequest
from forkd.store import files
from tests.unit.ops.sandboxes import add_sandbox, scene


class FailingDisk:
    """A mode whose source runs again before, or after, the disk fails."""

    name = "live"
    needs: frozenset[str] = frozenset()
    keeps_running = True

    def __init__(self, *, early: bool) -> None:
        self._early = early

    async def capture(self, machine: object, sink: object, step: object, task_status: trio.TaskStatus[Pause]) -> None:
        await trio.lowlevel.checkpoint()
        if not self._early:
            task_status.started(Pause(1.0))
        raise OSError(errno.EFBIG, "File too large")


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with scene(tmp_path) as made:
        await add_sandbox(made, "sb-1")
        yield made


@pytest.mark.parametrize("early", [True, False])
async def test_a_disk_that_fails_is_told_to_whoever_waits_and_nothing_is_left(runtime: Runtime, early: bool) -> None:
    runtime.plugins.branch_modes["live"] = cast(Any, FailingDisk(early=early))
    with pytest.raises(CaptureFailed, match="'b' cannot be written: File too large"):
        await branch(runtime, "sb-1", BranchRequest(tag="b", live=True))
    assert "sb-1" in runtime.sandboxes and not runtime.writing and not runtime.failed
    assert sorted(path.name for path in runtime.snapshots.root.iterdir()) == [".lock", "parent"]


async def test_a_disk_that_fails_when_nobody_waits_is_a_failed_snapshot(runtime: Runtime) -> None:
    runtime.plugins.branch_modes["live"] = cast(Any, FailingDisk(early=False))
    await branch(runtime, "sb-1", BranchRequest(tag="b", live=True, wait=False))
    with trio.fail_after(10):
        while "b" in runtime.writing:
            await trio.lowlevel.checkpoint()
    assert get_snapshot(runtime, "b").status == "failed"
    assert "File too large" in runtime.failed["b"]
    assert await remove_snapshot(runtime, "b") == ["b"]
    with pytest.raises(SnapshotNotFound):
        get_snapshot(runtime, "b")


def test_of_failed_branches_the_newest_are_remembered() -> None:
    notes = Notes()
    for number in range(MAX_NOTES + 5):
        notes[str(number)] = "no space"
    assert len(notes) == MAX_NOTES and "4" not in notes


async def test_a_disk_that_does_not_even_remove_is_told_the_same(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    runtime.plugins.branch_modes["live"] = cast(Any, FailingDisk(early=False))
    with monkeypatch.context() as patch:
        patch.setattr(files, "remove_tree", remove)
        with pytest.raises(CaptureFailed):
            await branch(runtime, "sb-1", BranchRequest(tag="b", live=True))
    assert "is not wholly removed" in caplog.text
    runtime.snapshots.stage("b").abandon()


class Slow:
    """A mode that writes until it is told to stop, and then fails."""

    name = "live"
    needs: frozenset[str] = frozenset()
    keeps_running = True

    def __init__(self) -> None:
        self.enough = trio.Event()

    async def capture(self, machine: object, sink: object, step: object, task_status: trio.TaskStatus[Pause]) -> None:
        task_status.started(Pause(1.0))
        await self.enough.wait()
        raise CaptureFailed("told to")


@pytest.mark.parametrize("force", [False, True])
async def test_what_a_branch_is_written_against_stays_until_it_is_written(runtime: Runtime, force: bool) -> None:
    runtime.plugins.branch_modes["live"] = slow = cast(Any, Slow())
    await branch(runtime, "sb-1", BranchRequest(tag="b", live=True, wait=False))
    with pytest.raises(SnapshotInUse, match="b is being written against 'parent'"):
        await remove_snapshot(runtime, "parent", force=force)
    slow.enough.set()
    with trio.fail_after(10):
        while runtime.writing:
            await trio.lowlevel.checkpoint()
    assert await remove_snapshot(runtime, "parent", force=force) == ["parent"]
