"""Slots: one private directory for each machine, below one directory for each forkd process that owns machines."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from forkd.limits import Limiter
from forkd.linux.netns import NetworkError
from forkd.network import Networks, remove_network, system_resolver
from forkd.specs.engine import Slot
from forkd.specs.errors import Conflict
from forkd.specs.models import SandboxInfo
from forkd.store.files import disk_full_as_no_space, remove_tree
from forkd.store.locks import FileLock, is_held

log = logging.getLogger("forkd")
SNAPSHOT = "snapshot"
ROOT = Path("/")
JAILS = "jail/*/*/root"
"""Where in a slot a jailer keeps the root of a machine: program, id."""


def new_sandbox_id() -> str:
    """An id nobody has used: the second, and enough chance that no two processes ever agree."""
    return f"sb-{int(time.time()):x}-{secrets.token_hex(4)}"


class SlotOwner:
    """This process's directory of slots, locked for as long as it lives."""

    def __init__(self, run_dir: Path, name: str | None = None, *, die_with_owner: bool = True) -> None:
        self.directory = run_dir / (name or f"p{os.getpid()}-{secrets.token_hex(2)}")
        self.die_with_owner = die_with_owner
        self.limits = Limiter(run_dir)
        self.networks = Networks(root=os.geteuid() == 0)
        with disk_full_as_no_space(run_dir):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=name is not None)
            lock = FileLock.try_take(self.directory / "lock")
        if lock is None:
            raise Conflict(
                f"another forkd process owns {self.directory}", hint="stop it first, or use another data directory"
            )
        self._lock = lock

    def take(self, sandbox_id: str, snapshot_tag: str = "") -> Slot:
        """Make the slot of a new machine, and note the snapshot it comes from, for whoever would remove that."""
        directory = self.directory / sandbox_id
        with disk_full_as_no_space(directory):
            directory.mkdir(mode=0o700)
            if snapshot_tag:
                (directory / SNAPSHOT).write_text(snapshot_tag)
        return self._slot(directory)

    def existing(self) -> list[Slot]:
        """Slots an earlier process of this name left."""
        found = [path for path in sorted(self.directory.iterdir()) if path.is_dir()]
        return [self._slot(path) for path in found]

    async def attach(
        self, slot: Slot, info: SandboxInfo, nursery: trio.Nursery, dns: str | None, tap: bool = False
    ) -> Slot:
        """The slot with the network its sandbox is described with. Raises HostNotReady."""
        return await self.networks.attach(slot, info, nursery, upstream=dns or system_resolver(), tap=tap)

    async def release(self, slot: Slot, keep: Path | None = None) -> None:
        """Give back a slot whose machine is gone: its network, its control group, its directory."""
        self.networks.close(slot.id)
        await trio.to_thread.run_sync(self.give_back, slot, keep)

    def give_back(self, slot: Slot, keep: Path | None = None) -> None:
        """Remove what a slot has; with ``keep`` its directory stays, under that name.

        What the kernel does not let go of is told, and its directory stays to find it by.
        """
        try:
            remove_network(slot.directory)
            self.limits.release(slot.id)
        except (NetworkError, OSError) as error:
            log.warning("slot %s is not wholly removed: %s", slot.id, error)
            return
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            slot.directory.rename(keep)
        else:
            remove_tree(slot.directory)

    def _slot(self, directory: Path) -> Slot:
        name, limits = directory.name, self.limits
        return Slot(name, directory, self.die_with_owner, limits.admit(name), partial(limits.limited, name))

    def close(self) -> None:
        """Remove the directory if no slot is left, and let go of it."""
        if not self.existing():
            remove_tree(self.directory)
        self._lock.release()


@dataclass(frozen=True, slots=True)
class Orphan:
    """A slot directory whose owner is dead, and the processes still working in it."""

    directory: Path
    pids: tuple[int, ...]


def find_orphans(run_dir: Path) -> list[Orphan]:
    """Owner directories nobody holds, with every process whose working directory is inside one (a VMM's always is)."""
    if not run_dir.is_dir():
        return []
    dead = [path for path in sorted(run_dir.iterdir()) if path.is_dir() and not is_held(path / "lock")]
    jails = _jails(root for path in dead for root in path.glob(f"*/{JAILS}"))
    workers = _working_directories(jails) if dead else {}
    return [Orphan(path, tuple(pid for pid, cwd in workers.items() if path in cwd.parents)) for path in dead]


def snapshots_in_use(run_dir: Path) -> dict[str, str]:
    """Tags of the snapshots that machines of any forkd process came from, each with one such machine."""
    found = {}
    for path in run_dir.glob(f"*/*/{SNAPSHOT}"):
        try:
            found[path.read_text()] = path.parent.name
        except FileNotFoundError:
            continue  # it ended while we looked
    return found


def workers_in(directory: Path) -> list[int]:
    """Processes whose working directory is ``directory`` or below it."""
    workers = _working_directories(_jails(directory.glob(JAILS)))
    return [pid for pid, cwd in workers.items() if cwd == directory or directory in cwd.parents]


def _jails(roots: Iterable[Path]) -> dict[tuple[int, int], Path]:
    """The roots of jails, by what they are known by inside and outside."""
    found = {}
    for path in roots:
        try:
            status = path.stat()
        except OSError:
            continue  # it ended while we looked
        found[status.st_dev, status.st_ino] = path
    return found


def _working_directories(jails: Mapping[tuple[int, int], Path]) -> dict[int, Path]:
    """Where each process works. The kernel calls the root of a jail ``/``, so a jailed one is known by its inode."""
    found: dict[int, Path] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                cwd = Path(os.readlink(f"{entry.path}/cwd"))
                if jails and cwd == ROOT:
                    status = os.stat(f"{entry.path}/cwd")
                    cwd = jails.get((status.st_dev, status.st_ino), cwd)
                found[int(entry.name)] = cwd
            except OSError:
                continue  # ended meanwhile, or not ours to look at
    return found
