"""Read-only disks by content: a rootfs is stored once, however many snapshots use it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import trio

from forkd.linux import sparse
from forkd.linux.filelock import file_lock
from forkd.specs.errors import BadInput, SnapshotBroken
from forkd.specs.models import FileRef
from forkd.store import files
from forkd.store.digests import sparse256_file
from forkd.store.locks import FileLock, is_held


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A disk of the store and what its image says about running processes."""

    ref: FileRef
    image: str
    env: dict[str, str] = {}
    workdir: str = "/"
    user: str = "root"


class DiskStore:
    """Disks under one directory, named by digest; a small file for each build key points at the disk it made."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, ref: FileRef) -> Path:
        """Where the disk is, or would be."""
        return self.root / f"{ref.digest.partition(':')[2]}.ext4"

    def find(self, ref: FileRef) -> Path:
        """The disk's file. Raises SnapshotBroken if it is not there at its recorded size."""
        path = self.path(ref)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise SnapshotBroken(
                f"the disk {path} cannot be read: {error.strerror}", hint="build or pull the snapshot's image again"
            ) from error
        if size != ref.size:
            raise SnapshotBroken(f"the disk {path} has {size} bytes, {ref.size} are recorded")
        return path

    def has(self, ref: FileRef) -> bool:
        """Whether the disk is here."""
        try:
            self.find(ref)
        except SnapshotBroken:
            return False
        return True

    def built(self, key: str) -> Disk | None:
        """The disk an earlier build with this key made, if it is still there."""
        try:
            disk = msgspec.json.decode(self._pointer(key).read_bytes(), type=Disk)
            self.find(disk.ref)
        except (OSError, msgspec.MsgspecError, SnapshotBroken):
            return None
        return disk

    async def build(self, key: str, make: Callable[[Path, Path], Awaitable[Disk]]) -> Disk:
        """Let ``make(work, out)`` write a disk to ``out``, ``work`` being scratch space; keep it under ``key``.

        Builds of one key take turns, in other processes too, and whoever waited has the disk of the first: a file
        system made anew has other bytes, and what is named by them would be two.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        async with file_lock(self.root / f".lock-{self._pointer(key).name[0]}"):  # one of few: they are never removed
            return self.built(key) or await self._build(key, make)

    async def _build(self, key: str, make: Callable[[Path, Path], Awaitable[Disk]]) -> Disk:
        work = self.root / f".stage-{os.getpid()}-{hashlib.sha256(os.urandom(16)).hexdigest()[:8]}"
        with files.disk_full_as_no_space(self.root):
            work.mkdir()
            lock = FileLock.try_take(work / "lock")
            assert lock is not None
            try:
                disk = await make(work, work / "disk.ext4")
                files.sync_file(work / "disk.ext4")
                (work / "disk.ext4").replace(self.path(disk.ref))
                files.write_durably(self._pointer(key), msgspec.json.encode(disk))
            finally:
                # Trees of root file systems are large: removed in a thread, also when cancelled.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(files.remove_tree, work)
                lock.release()
        return disk

    async def add(self, source: Path) -> FileRef:
        """Take in a disk image somebody else made. Raises BadInput if it cannot be read."""
        status = _readable(source)

        async def copy(work: Path, out: Path) -> Disk:
            await trio.to_thread.run_sync(sparse.clone_file, source, out)
            digest = await trio.to_thread.run_sync(sparse256_file, out)
            return Disk(ref=FileRef(digest=digest, size=status.st_size), image=str(source))

        key = f"file:{source.absolute()}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        disk = self.built(key) or await self.build(key, copy)
        return disk.ref

    def adopt(self, staged: Path, ref: FileRef) -> None:
        """Take in a disk whose digest was verified, from a staging directory of the same file system."""
        self.root.mkdir(parents=True, exist_ok=True)
        files.sync_file(staged)
        staged.replace(self.path(ref))
        files.sync_directory(self.root)

    def leftovers(self) -> list[Path]:
        """Scratch directories of builds whose process is gone."""
        if not self.root.is_dir():
            return []
        stages = [path for path in sorted(self.root.iterdir()) if path.name.startswith(".stage-")]
        return [path for path in stages if not is_held(path / "lock")]

    def _pointer(self, key: str) -> Path:
        return self.root / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _readable(source: Path) -> os.stat_result:
    try:
        with open(source, "rb") as probe:
            probe.read(1)
            return os.fstat(probe.fileno())
    except OSError as error:
        raise BadInput(f"rootfs {source} cannot be read: {error.strerror}") from error
