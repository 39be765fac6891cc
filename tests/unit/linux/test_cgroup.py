"""Control groups: which hierarchy has what, on version 1, on version 2 and mixed; and the kernel's own where we may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkd.linux import cgroup
from forkd.linux.cgroup import Amounts, Group, Hierarchy, hierarchies, homes
from forkd.linux.hostprobe import HostProbe


def files(**texts: str) -> cgroup.Read:
    named = {name.replace("__", "/"): text for name, text in texts.items()}
    return lambda path: named.get(path.lstrip("/"))


def test_version_2_is_preferred_and_version_1_fills_the_gaps() -> None:
    read = files(
        proc__self__mountinfo=(
            "31 23 0:27 / /cg/memory rw - cgroup cgroup rw,memory\n"
            "32 23 0:28 / /cg/cpu\\040acct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "33 23 0:29 / /cg/blkio rw - cgroup cgroup rw,blkio\n"
            "30 23 0:26 / /cg/unified rw - cgroup2 cgroup2 rw\n"
        ),
        proc__self__cgroup="4:memory:/a/b\n3:cpu,cpuacct:/\n0::/c\n",
        **{"cg__unified__cgroup.controllers": "pids memory hugetlb"},
    )
    table = homes(hierarchies(read))
    assert {name: (home.version, str(home.own_path)) for name, home in table.items()} == {
        "pids": (2, "/cg/unified/c"),
        "memory": (2, "/cg/unified/c"),
        "cpu": (1, "/cg/cpu acct"),
        "io": (1, "/cg/blkio"),
    }


def test_nothing_mounted_means_nothing_found_and_each_limit_says_so() -> None:
    assert hierarchies(files()) == []
    failed = Group("sb-1", {}, list).apply(Amounts(memory=1 << 20, cpu=0.5))
    assert failed == {
        "memory": "this kernel has no cgroup controller for memory",
        "cpu": "this kernel has no cgroup controller for cpu",
    }


def test_version_2_hands_controllers_down_and_writes_each_limit(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    home = Hierarchy(2, tmp_path, frozenset(cgroup.CONTROLLERS), "/")
    group = Group("sb-1", dict.fromkeys(cgroup.CONTROLLERS, home), lambda: ["8:0"])
    assert group.apply(Amounts(memory=256 << 20, cpu=0.5, pids=64, io=1 << 20)) == {}
    for directory in (tmp_path, tmp_path / "forkd"):
        assert (directory / "cgroup.subtree_control").read_text() == "+cpu +io +memory +pids"
    made = tmp_path / "forkd/sb-1"
    assert {path.name: path.read_text() for path in made.iterdir()} == {
        "memory.max": str(256 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.max": "50000 100000",
        "pids.max": "64",
        "io.max": "8:0 rbps=1048576 wbps=1048576",
    }
    group.admit(4711)
    assert (made / "cgroup.procs").read_text() == "4711"
    (made / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 1\n")
    (made / "cpu.stat").write_text("usage_usec 5\nnr_periods 4\nnr_throttled 3\n")
    (made / "pids.events").write_text("max 0\n")
    assert group.hits() == ["memory", "cpu"]
    assert group.oom_kills() == 1


def test_a_process_alone_in_its_unit_steps_aside_so_that_controllers_can_be_handed_down(tmp_path: Path) -> None:
    unit = tmp_path / "system.slice/forkd.service"
    unit.mkdir(parents=True)
    (unit / "cgroup.procs").write_text(f"{os.getpid()}\n")
    home = Hierarchy(2, tmp_path, frozenset({"memory"}), "/system.slice/forkd.service")
    assert Group("sb-1", {"memory": home}, list).apply(Amounts(memory=1 << 20)) == {}
    assert (unit / cgroup.SUPERVISOR / "cgroup.procs").read_text() == str(os.getpid())
    assert (unit / "forkd/sb-1/memory.max").exists()


def test_io_without_a_disk_below_is_refused(tmp_path: Path) -> None:
    home = Hierarchy(1, tmp_path, frozenset({"io"}), "/")
    failed = Group("sb-1", {"io": home}, list).apply(Amounts(io=1 << 20))
    assert "no block device" in failed["io"]


@pytest.fixture
def real() -> dict[str, Hierarchy]:
    table = homes(hierarchies(HostProbe().read))
    if os.geteuid() != 0 or "memory" not in table or "pids" not in table:
        pytest.skip("needs root and cgroup controllers for memory and pids")
    return table


def test_the_kernel_ends_a_process_that_outgrows_its_group_and_the_group_knows(real: dict[str, Hierarchy]) -> None:
    group = Group(f"sb-test-{os.getpid()}", real, list)
    assert group.apply(Amounts(memory=32 << 20, pids=16)) == {}
    try:
        code = "import sys; sys.stdin.read(1); b = bytearray(200 << 20); b[::4096] = b'x' * len(b[::4096])"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        group.admit(child.pid)
        child.communicate(b"x", timeout=60)
        assert child.returncode == -9
        assert group.oom_kills() >= 1
        assert group.hits() == ["memory"]
        assert group.apply(Amounts(memory=64 << 20)) == {}  # raised
        assert group.apply(Amounts(memory=48 << 20)) == {}  # and lowered
    finally:
        group.remove()
    assert not any(path.name == group.name for path in cgroup.leftovers(real))


def test_groups_nobody_is_in_are_found(real: dict[str, Hierarchy]) -> None:
    group = Group(f"sb-test-{os.getpid()}-x", real, list)
    assert group.apply(Amounts(memory=32 << 20)) == {}
    assert [path.name for path in cgroup.leftovers(real)].count(group.name) == 1
    group.remove()
