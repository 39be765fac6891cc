"""Doctor on a bare machine, a prepared one and a broken one; each is a directory tree with its programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.doctor import Place, core_checks
from forkd.linux.hostprobe import HostProbe
from forkd.pluginmanager import load_plugins
from forkd.specs.hookspecs import Check

WORKS = dict.fromkeys(("userfaultfd", "memfd", "ptrace", "suspend_seccomp", "netns", "reflink"))
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def tree(root: Path, files: dict[str, str], programs: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, printed in programs.items():
        path = root / "usr/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{printed}'\n")
        path.chmod(0o755)


def rows(host: HostProbe) -> dict[str, Check]:
    found = [*core_checks(host, Place(Path("/data"))), *load_plugins().checks(host)]
    names = [row.name for row in found]
    assert len(names) == len(set(names)), names
    return {row.name: row for row in found}


def prepared(root: Path) -> HostProbe:
    files = {
        "/proc/version": "Linux version 6.14.0 (build@host)",
        "/proc/cpuinfo": "flags\t\t: fpu vmx sse",
        "/proc/self/mountinfo": V2,
        "/proc/self/cgroup": "0::/system.slice/forkd.service\n",
        "/proc/self/status": "Name:\tforkd\nCapEff:\t000001ffffffffff\n",
        "/proc/self/uid_map": "         0          0 4294967295\n",
        "/proc/self/gid_map": "         0          0 4294967295\n",
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids",
        "/proc/sys/net/ipv4/ip_forward": "1\n",
        "/proc/sys/vm/overcommit_memory": "0\n",
        "/proc/meminfo": "HugePages_Total:     512\nHugePages_Free:      500\n",
        "/sys/kernel/mm/ksm/run": "1",
        "/sys/kernel/mm/ksm/pages_to_scan": "1000",
        "/dev/kvm": "",
        "/dev/net/tun": "",
        "/data/kernels/default": "",
        "/data/snapshots/py/snapshot.json": "{}",
    }
    programs = {
        "qemu-system-x86_64": "QEMU emulator version 8.2.1",
        "nft": "nftables v1.0.6",
        "mmdebstrap": "",
        "firecracker": "Firecracker v1.12.0",
    }
    tree(root, files, programs)
    return HostProbe(root, euid=0, abilities=WORKS)


def test_a_prepared_machine_has_nothing_to_complain_of(tmp_path: Path) -> None:
    found = rows(prepared(tmp_path))
    assert [row for row in found.values() if row.status in ("WARN", "FAIL")] == []
    assert found["kvm"].detail == "/dev/kvm opens and the CPU has vmx or svm"
    assert found["snapshot dir"].detail == "/data/snapshots (1 snapshots)"
    assert found["qemu"].detail.endswith("8.2.1")
    assert found["cgroup"].detail == "memory (v2), cpu (v2), pids (v2), io (v2)"


def test_a_bare_machine_is_told_what_to_install_and_only_what_stops_it_fails(tmp_path: Path) -> None:
    files = {"/proc/version": "Linux version 6.1.0 (build@host)", "/proc/cpuinfo": "flags : fpu"}
    tree(tmp_path, files, {})
    found = rows(HostProbe(tmp_path, euid=1000, abilities=WORKS))
    assert {row.name for row in found.values() if row.status == "FAIL"} == {"qemu"}
    assert "apt-get install qemu-system-x86" in (found["qemu"].hint or "")
    assert found["kvm"].status == "WARN" and "No such file" in found["kvm"].detail
    assert found["kernel image"].status == "WARN" and "forkd setup" in (found["kernel image"].hint or "")
    skipped = ("ip_forward", "tap device", "per-child netns", "nftables", "vmm user")
    assert {found[name].status for name in skipped} == {"SKIP"}
    assert found["cgroup"].status == "WARN"


def test_a_broken_machine_has_each_fault_named(tmp_path: Path) -> None:
    prepared(tmp_path)
    changes = {
        "/proc/cpuinfo": "flags : fpu sse",
        "/proc/self/mountinfo": V1,
        "/proc/self/cgroup": "1:memory:/a\n2:cpu,cpuacct:/b\n0::/\n",
        "/sys/fs/cgroup/unified/cgroup.controllers": "hugetlb",
        "/proc/sys/net/ipv4/ip_forward": "0",
        "/proc/sys/vm/overcommit_memory": "2",
        "/proc/sys/kernel/yama/ptrace_scope": "3",
        "/proc/meminfo": "HugePages_Total: 8\nHugePages_Free: 0\n",
        "/proc/self/uid_map": "         0     100000      65536\n",
    }
    tree(tmp_path, changes, {"qemu-system-x86_64": "QEMU emulator version 5.2.0"})
    (tmp_path / "dev/net/tun").unlink()
    refused = dict.fromkeys(WORKS, "Operation not permitted")
    found = rows(HostProbe(tmp_path, euid=0, abilities=refused))
    assert found["qemu"].status == "FAIL" and "5.2.0" in found["qemu"].detail
    assert "would hang" in found["kvm"].detail
    assert found["cgroup"].detail == "no controller for pids, io; there are: memory (v1), cpu (v1)"
    assert "ip_forward=1" in (found["ip_forward"].hint or "")
    assert "ptrace_scope=1" in (found["ptrace"].hint or "")
    assert "all 8 are in use" in found["hugepages"].detail
    assert "runs as root: this user namespace" in found["vmm user"].detail
    warned = {"vmm user", "tap device", "per-child netns", "overcommit", "reflink", "uffd_wp", "memfd_create"}
    assert {found[name].status for name in warned} == {"WARN"}
    for row in found.values():
        assert row.hint or row.status not in ("FAIL", "WARN"), row


@pytest.mark.parametrize(("free", "status"), [(6 << 30, "PASS"), (2 << 30, "WARN"), (1 << 20, "FAIL")])
def test_little_space_warns_and_none_fails(tmp_path: Path, free: int, status: str) -> None:
    class Disk(HostProbe):
        def free_bytes(self, path: str) -> int | None:
            return free

    prepared(tmp_path)
    assert rows(Disk(tmp_path, euid=0, abilities=WORKS))["snapshot dir space"].status == status


def test_this_machine_can_be_examined_for_real() -> None:
    found = rows(HostProbe())
    assert found["platform"].status == "PASS"
    assert found["memfd_create"].status == "PASS"
    assert found["ptrace"].detail
