"""Preparing a host, and putting it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd import hostsetup
from forkd.linux.hostprobe import HostProbe
from forkd.specs.errors import HostNotReady


def machine(root: Path, **settings: str) -> HostProbe:
    for key, value in settings.items():
        path = root / "proc/sys" / key.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    return HostProbe(root, euid=0, abilities={})


def value(root: Path, key: str) -> str:
    return (root / "proc/sys" / key.replace(".", "/")).read_text()


def test_what_is_wrong_is_changed_and_undo_puts_it_back(tmp_path: Path) -> None:
    host = machine(tmp_path, net__ipv4__ip_forward="0\n", vm__overcommit_memory="2\n", vm__nr_hugepages="0\n")
    plan = hostsetup.plan(host)
    assert [(change.key, change.new) for change in plan.changes] == [
        ("net.ipv4.ip_forward", "1"),
        ("vm.overcommit_memory", "0"),
    ]
    assert plan.packages == ("qemu-system-x86", "nftables", "mmdebstrap")
    hostsetup.apply(tmp_path, plan.changes)
    assert value(tmp_path, "net.ipv4.ip_forward") == "1"
    assert "net.ipv4.ip_forward = 1" in (tmp_path / hostsetup.SYSCTL_FILE).read_text()
    assert hostsetup.plan(host).changes == ()
    assert hostsetup.undo(tmp_path) == {"net.ipv4.ip_forward": "0", "vm.overcommit_memory": "2"}
    assert value(tmp_path, "net.ipv4.ip_forward") == "0"
    assert not (tmp_path / hostsetup.SYSCTL_FILE).exists()
    assert hostsetup.undo(tmp_path) == {}


def test_a_second_setup_does_not_forget_the_first_values(tmp_path: Path) -> None:
    host = machine(tmp_path, net__ipv4__ip_forward="0", vm__nr_hugepages="0")
    hostsetup.apply(tmp_path, hostsetup.plan(host).changes)
    (tmp_path / "proc/sys/net/ipv4/ip_forward").write_text("2")
    hostsetup.apply(tmp_path, hostsetup.plan(host, hugepages=True).changes)
    assert hostsetup.undo(tmp_path) == {"net.ipv4.ip_forward": "0", "vm.nr_hugepages": "0"}


def test_a_prepared_host_is_left_alone(tmp_path: Path) -> None:
    host = machine(tmp_path, net__ipv4__ip_forward="1", vm__overcommit_memory="1", kernel__yama__ptrace_scope="1")
    assert hostsetup.plan(host).changes == ()


def test_a_spoiled_record_is_refused_and_kept(tmp_path: Path) -> None:
    record = tmp_path / hostsetup.RECORD
    record.parent.mkdir(parents=True)
    record.write_text("{half")
    with pytest.raises(HostNotReady, match="cannot be read"):
        hostsetup.undo(tmp_path)
    assert record.read_text() == "{half"
