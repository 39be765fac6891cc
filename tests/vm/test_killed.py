"""SIGKILL of the CLI at random moments: no half snapshot, no machine that outlives it, nothing left after cleanup."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FORKD, parent_disk, run_forkd

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
Forkd = Callable[..., "subprocess.CompletedProcess[str]"]


def kill_after(data_dir: Path, seconds: float, *args: str) -> None:
    """Run the CLI and kill it, and only it, after a while."""
    child = subprocess.Popen(
        [*FORKD, *args],
        env={**os.environ, "FORKD_DATA_DIR": str(data_dir)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.wait()


def wait_until_none(machines: Callable[[], list[int]]) -> None:
    """Machines get their death signal the moment their owner dies; the kernel takes a moment to end them."""
    deadline = time.monotonic() + 10
    while machines():
        assert time.monotonic() < deadline, "a machine outlived its owner"
        os.sched_yield()


@pytest.mark.parametrize("seed", range(3))
def test_killed_forks_leave_nothing(data_dir: Path, forkd: Forkd, machines: Callable[[], list[int]], seed: int) -> None:
    moment = random.Random(seed)
    for _ in range(5):
        kill_after(data_dir, moment.uniform(0.4, 2.0), "fork", "--tag", PARENT, "-n", "4", "--settle-secs", "1")
        wait_until_none(machines)
    assert forkd("cleanup", "--yes").returncode == 0
    assert [path for path in (data_dir / "run").iterdir() if path.is_dir()] == []
    assert "nothing to clean up" in forkd("cleanup").stderr


def test_killed_snapshots_are_never_listed_unless_whole(
    data_dir: Path, forkd: Forkd, machines: Callable[[], list[int]]
) -> None:
    rootfs = str(parent_disk(data_dir))
    moment = random.Random(7)
    for trial in range(7):
        tag = f"killed-{trial}"
        kill_after(
            data_dir, moment.uniform(0.5, 11), "snapshot", "--tag", tag, "--rootfs", rootfs, "--mem-size-mib", "256"
        )
        wait_until_none(machines)
        rows = {row["tag"]: row for row in json.loads(forkd("images", "--json").stdout)}
        if tag in rows:
            assert rows[tag]["bootable"], rows[tag]
            assert forkd("eval", "--tag", tag, "--", "1+1").stdout == "2\n"
            assert forkd("rmi", tag).returncode == 0
    assert forkd("cleanup", "--yes").returncode == 0
    hidden = [path.name for path in (data_dir / "snapshots").iterdir() if path.name.startswith(".")]
    assert hidden == [".lock"]
    assert [path for path in (data_dir / "run").iterdir() if path.is_dir()] == []


def working_on(path: Path) -> list[int]:
    """Processes that have a path in their command line, or their root or working directory below it."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                with open(f"{entry.path}/cmdline", "rb") as line:
                    places = [line.read().decode(errors="replace")]
                places += [os.readlink(f"{entry.path}/{name}") for name in ("cwd", "root")]
            except OSError:
                continue
            if any(str(path) in place for place in places):
                found.append(int(entry.name))
    return found


def test_killed_builds_leave_no_process_and_no_rootfs(tmp_path: Path) -> None:
    output = tmp_path / "out.ext4"
    data = tmp_path / "data"
    moment = random.Random(11)
    for _ in range(4):
        kill_after(
            data, moment.uniform(0.5, 8), "parent", "build", "debian:bookworm", "--extra", "jq", "-o", str(output)
        )
        wait_until_none(lambda: working_on(data))
        assert not output.exists()
        assert list((data / "rootfs").glob("*.ext4")) == []
    done = run_forkd(data, "cleanup", "--yes")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (data / "rootfs").iterdir() if not path.name.startswith(".lock-")] == []
