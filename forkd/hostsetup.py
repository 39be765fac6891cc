"""Prepares a host for all that forkd can do, remembers what was before, and puts it back on request."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.specs.errors import HostNotReady
from forkd.specs.host import Host

RECORD = "var/lib/forkd/host-setup.json"
SYSCTL_FILE = "etc/sysctl.d/90-forkd.conf"
HUGE_PAGES = "512"
HEADER = "# Made by forkd setup --host; forkd setup --host --undo removes it.\n"


@dataclass(frozen=True, slots=True)
class Change:
    """A kernel setting to change: ``key`` as sysctl spells it, and why."""

    key: str
    old: str
    new: str
    why: str

    @property
    def path(self) -> str:
        """Its file."""
        return f"/proc/sys/{self.key.replace('.', '/')}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done: settings we change (and can put back), packages that are missing (left to their manager)."""

    changes: tuple[Change, ...]
    packages: tuple[str, ...]


_WISHES = (
    ("net.ipv4.ip_forward", ("1",), "1", "children with networking reach what their allow-list says"),
    ("vm.overcommit_memory", ("0", "1"), "0", "children count with the memory they use, not with all their RAM"),
    ("kernel.yama.ptrace_scope", ("0", "1"), "1", "live branch and cloned children trace their own machines"),
)
_PROGRAMS = (("qemu-system-x86_64", "qemu-system-x86"), ("nft", "nftables"), ("mmdebstrap", "mmdebstrap"))


def plan(host: Host, *, hugepages: bool = False) -> Plan:
    """What this host lacks."""
    changes = []
    wishes = list(_WISHES)
    if hugepages and host.read("/proc/sys/vm/nr_hugepages") == "0":
        wishes.append(("vm.nr_hugepages", (HUGE_PAGES,), HUGE_PAGES, "--hugepages has 1 GiB of pages to use"))
    for key, good, new, why in wishes:
        old = host.read(f"/proc/sys/{key.replace('.', '/')}")
        if old is not None and old not in good:
            changes.append(Change(key, old, new, why))
    packages = tuple(package for program, package in _PROGRAMS if host.which(program) is None)
    return Plan(tuple(changes), packages)


def apply(root: Path, changes: Sequence[Change]) -> None:
    """Record what was, then change it, now and for the next boot. Raises HostNotReady."""
    record = root / RECORD
    before = _recorded(record)
    before.update({change.key: change.old for change in changes if change.key not in before})
    lines = "".join(f"{change.key} = {change.new}\n" for change in changes)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        _replace(record, json.dumps(before, indent=2) + "\n")
        kept = root / SYSCTL_FILE
        kept.parent.mkdir(parents=True, exist_ok=True)
        former = kept.read_text() if kept.exists() else HEADER
        _replace(kept, former + lines)
        for change in changes:
            (root / change.path.lstrip("/")).write_text(change.new)
    except OSError as error:
        raise HostNotReady(f"{error.filename} cannot be written: {error.strerror}", hint="run it as root") from error


def undo(root: Path) -> dict[str, str]:
    """Put back what ``apply`` recorded, and forget it: the keys with the values they have again."""
    record = root / RECORD
    before = _recorded(record)
    try:
        for key, old in before.items():
            (root / "proc/sys" / key.replace(".", "/")).write_text(old)
        (root / SYSCTL_FILE).unlink(missing_ok=True)
        record.unlink(missing_ok=True)
    except OSError as error:
        raise HostNotReady(f"{error.filename} cannot be written: {error.strerror}", hint="run it as root") from error
    return before


def _recorded(record: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(record.read_text())
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HostNotReady(
            f"{record} cannot be read: {error}", hint="look at it, and remove it if it is worthless"
        ) from error


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text)
    staged.replace(path)
