"""Control groups: a group for each machine, on version 2 where it has the controller and on version 1 where it has not.

One machine's group may so be several directories. Its parent lies below the group this process is in wherever the
kernel allows it, so that a limit on forkd as a whole holds for all its machines together.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "cpu", "pids", "io")
V1_NAMES = {"memory": "memory", "cpu": "cpu", "pids": "pids", "io": "blkio"}
PERIOD_US = 100_000
SUPERVISOR = "forkd-supervisor"
REMOVE_DEADLINE = 5.0
Read = Callable[[str], str | None]


class CgroupError(Exception):
    """A limit cannot be applied; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted hierarchy: where it is, which of our controllers it has, and where in it this process is."""

    version: int
    mount: Path
    controllers: frozenset[str]
    own: str

    @property
    def own_path(self) -> Path:
        """The directory of the group this process is in."""
        return self.mount / self.own.lstrip("/")


def hierarchies(read: Read) -> list[Hierarchy]:
    """What is mounted, version 2 first, so that it is preferred where both have a controller."""
    own = _own_groups(read("/proc/self/cgroup") or "")
    found = []
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        kind, mount = right.split(" ")[0], Path(_unescape(left.split(" ")[4]))
        if kind == "cgroup2":
            words = frozenset((read(f"{mount}/cgroup.controllers") or "").split())
            found.append(Hierarchy(2, mount, words & frozenset(CONTROLLERS), own.get("", "/")))
        elif kind == "cgroup":
            options = frozenset(right.rpartition(" ")[2].split(","))
            names = frozenset(name for name, old in V1_NAMES.items() if old in options)
            if names:
                found.append(Hierarchy(1, mount, names, own.get(V1_NAMES[min(names)], "/")))
    return sorted(found, key=lambda hierarchy: -hierarchy.version)


def homes(found: Iterable[Hierarchy]) -> dict[str, Hierarchy]:
    """For each controller there is, the hierarchy that has it."""
    table: dict[str, Hierarchy] = {}
    for hierarchy in found:
        for controller in hierarchy.controllers:
            table.setdefault(controller, hierarchy)
    return table


@dataclass(frozen=True, slots=True)
class Amounts:
    """Limits in the kernel's own units; None is no limit."""

    memory: int | None = None
    cpu: float | None = None
    pids: int | None = None
    io: int | None = None

    def wanted(self) -> dict[str, float]:
        """Those that are set, by controller."""
        return {name: value for name in CONTROLLERS if (value := getattr(self, name)) is not None}


class Group:
    """One machine's group. ``remove`` it when the machine is gone."""

    def __init__(self, name: str, table: Mapping[str, Hierarchy], disks: Callable[[], list[str]]) -> None:
        self.name = name
        self._table = table
        self._disks = disks
        self._paths: dict[str, Path] = {}

    def apply(self, amounts: Amounts) -> dict[str, str]:
        """Set every limit that is given; what could not be set, by controller, with the reason."""
        failed: dict[str, str] = {}
        for controller, value in amounts.wanted().items():
            try:
                self._set(controller, value)
            except CgroupError as error:
                failed[controller] = str(error)
            except OSError as error:
                failed[controller] = f"the kernel refused {error.filename or controller}: {error.strerror}"
        return failed

    def admit(self, pid: int) -> None:
        """Put a process with all its threads into the group. Raises OSError."""
        for path in set(self._paths.values()):
            (path / "cgroup.procs").write_text(str(pid))

    def hits(self) -> list[str]:
        """Controllers whose limit has held the machine back, or killed it, since it began."""
        found = []
        for controller, path in self._paths.items():
            if _was_hit(controller, self._table[controller].version, path):
                found.append(controller)
        return found

    def oom_kills(self) -> int:
        """How often the kernel ended a process of the group for want of memory."""
        path = self._paths.get("memory")
        return 0 if path is None else _oom_kills(path, self._table["memory"].version)

    def remove(self) -> None:
        """Remove the directories; the processes must have ended. Raises OSError if the kernel still holds one."""
        for path in set(self._paths.values()):
            remove_group(path)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # the last one out
        self._paths.clear()

    def _set(self, controller: str, value: float) -> None:
        hierarchy = self._table.get(controller)
        if hierarchy is None:
            raise CgroupError(f"this kernel has no cgroup controller for {controller}")
        path = self._paths.get(controller) or self._make(controller, hierarchy)
        settings = list(_settings(controller, hierarchy.version, value, self._disks))
        try:
            _write(path, settings)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Version 1 wants memory + swap never below memory: raised in one order, lowered in the other.
            _write(path, settings[::-1])

    def _make(self, controller: str, hierarchy: Hierarchy) -> Path:
        base = _base(hierarchy)
        path = base / self.name
        try:
            for last in (False, True):
                base.mkdir(exist_ok=True)
                if hierarchy.version == 2:
                    _enable(hierarchy, base)
                try:
                    path.mkdir(exist_ok=True)
                    break
                except FileNotFoundError:  # another forkd process just removed the empty base
                    if last:
                        raise
        except OSError as error:
            raise CgroupError(f"no cgroup can be made below {base}: {error.strerror}") from error
        self._paths[controller] = path
        return path


def leftovers(table: Mapping[str, Hierarchy]) -> list[Path]:
    """Groups of ours without a process in them."""
    found = []
    for hierarchy in set(table.values()):
        for base in {_base(hierarchy), hierarchy.mount / "forkd"}:
            for path in sorted(base.iterdir()) if base.is_dir() else []:
                if path.is_dir() and not _processes(path):
                    found.append(path)
    return found


def remove_group(path: Path) -> None:
    """Remove one directory. A process killed a moment ago may still count, so a busy group is tried again."""
    deadline = time.monotonic() + REMOVE_DEADLINE
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _base(hierarchy: Hierarchy) -> Path:
    """The directory our groups go into."""
    own = hierarchy.own_path
    if hierarchy.version == 1:
        return own / "forkd"
    if own != hierarchy.mount and os.access(own, os.W_OK) and set(_processes(own)) <= {os.getpid()}:
        return own / "forkd"  # a unit of our own, delegated to us
    if own.name == SUPERVISOR:
        return own.parent / "forkd"
    return hierarchy.mount / "forkd"


def _enable(hierarchy: Hierarchy, base: Path) -> None:
    """Hand the controllers down to ``base``'s children; a group that has processes may not do so, so ours move."""
    own = hierarchy.own_path
    if base.parent == own != hierarchy.mount:
        (own / SUPERVISOR).mkdir(exist_ok=True)
        for pid in _processes(own):
            (own / SUPERVISOR / "cgroup.procs").write_text(str(pid))
    words = " ".join(f"+{name}" for name in sorted(hierarchy.controllers))
    for group in (base.parent, base):
        (group / "cgroup.subtree_control").write_text(words)


_OPTIONAL = frozenset({"memory.swap.max", "memory.memsw.limit_in_bytes", "memory.oom.group"})


def _settings(controller: str, version: int, value: float, disks: Callable[[], list[str]]) -> Iterable[tuple[str, str]]:
    whole = str(int(value))
    if controller == "memory":
        # No swap on top: a limit is a limit. The files exist only where the kernel accounts swap.
        if version == 2:
            return (("memory.max", whole), ("memory.swap.max", "0"), ("memory.oom.group", "1"))
        return (("memory.limit_in_bytes", whole), ("memory.memsw.limit_in_bytes", whole))
    if controller == "cpu":
        quota = str(max(1000, int(value * PERIOD_US)))
        if version == 2:
            return (("cpu.max", f"{quota} {PERIOD_US}"),)
        return (("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", quota))
    if controller == "pids":
        return (("pids.max", whole),)
    if version == 2:
        return tuple(("io.max", f"{disk} rbps={whole} wbps={whole}") for disk in _some(disks))
    names = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")
    return tuple((name, f"{disk} {whole}") for disk in _some(disks) for name in names)


def _write(path: Path, settings: Iterable[tuple[str, str]]) -> None:
    for name, text in settings:
        try:
            (path / name).write_text(text)
        except FileNotFoundError:
            if name not in _OPTIONAL:
                raise


def _some(disks: Callable[[], list[str]]) -> list[str]:
    found = disks()
    if not found:
        raise CgroupError("no block device is below the data directory, so its io cannot be limited")
    return found


def block_device(path: Path) -> list[str]:
    """``major:minor`` of the whole disk under a file system, as io limits name it; empty where there is none."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return []
    whole = device.resolve()
    if (whole / "partition").exists():
        whole = whole.parent
    return [(whole / "dev").read_text().strip()]


def _was_hit(controller: str, version: int, path: Path) -> bool:
    if controller == "memory":
        return _oom_kills(path, version) > 0
    if controller == "cpu":
        return _counter(path / "cpu.stat", "nr_throttled") > 0
    return controller == "pids" and _counter(path / "pids.events", "max") > 0


def _oom_kills(path: Path, version: int) -> int:
    return _counter(path / ("memory.events" if version == 2 else "memory.oom_control"), "oom_kill")


def _counter(path: Path, word: str) -> int:
    match = re.search(rf"^{word} (\d+)$", _text(path), re.MULTILINE)
    return int(match[1]) if match else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the kernel has no such file, or the group is gone


def _processes(path: Path) -> list[int]:
    return [int(word) for word in _text(path / "cgroup.procs").split()]


def _own_groups(text: str) -> dict[str, str]:
    table = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            table[name] = path
    return table


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
