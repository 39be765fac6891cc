"""The snapshot store: stage, fsync, rename. A directory that has its tag's name is whole."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forkd.linux.exchange import exchange
from forkd.linux.filelock import file_lock
from forkd.specs.errors import SnapshotBroken, SnapshotNotFound, SnapshotPinned, TagTaken
from forkd.specs.models import SNAPSHOT_FORMAT, Snapshot
from forkd.specs.tags import check_tag
from forkd.store import files
from forkd.store.locks import FileLock, brief, is_held

log = logging.getLogger("forkd")
MANIFEST = "snapshot.json"
VMSTATE = "vmstate"
IMAGE = "memory.bin"
DELTA = "memory.delta"
PINNED = "pinned"
STAGE = ".stage-"
DOOMED = ".doomed-"
MAX_MANIFEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot of the store: its directory and what its manifest says."""

    directory: Path
    manifest: Snapshot

    @property
    def vmstate(self) -> Path:
        """The device state file."""
        return self.directory / VMSTATE

    @property
    def memory(self) -> Path:
        """The memory file: an image or a delta, as the manifest says."""
        return self.directory / (IMAGE if self.manifest.memory.kind == "image" else DELTA)

    @property
    def pinned(self) -> bool:
        """Whether it must not be removed."""
        return (self.directory / PINNED).exists()

    def check_files(self) -> None:
        """Raise SnapshotBroken, naming the file, unless every file is there at its recorded size."""
        for path, size in ((self.vmstate, self.manifest.vmstate.size), (self.memory, self.manifest.memory.size)):
            _check_size(self.manifest.tag, path, size)


@dataclass(frozen=True, slots=True)
class Broken:
    """A directory with a tag's name that is not a usable snapshot, and why."""

    tag: str
    directory: Path
    reason: str


class Stage:
    """A snapshot in the making: a hidden directory that becomes ``tag`` on ``commit`` and vanishes on ``abandon``."""

    def __init__(self, tag: str, directory: Path, target: Path, lock: FileLock, replaces: bool) -> None:
        self.tag = tag
        self.directory = directory
        self._target = target
        self._lock = lock
        self._replaces = replaces

    def commit(self, manifest: Snapshot) -> Stored:
        """Sync everything, write the manifest, take the tag's name. Raises TagTaken, NoSpace."""
        with files.disk_full_as_no_space(self.directory):
            for path in self.directory.iterdir():
                files.sync_file(path)
            files.write_durably(self.directory / MANIFEST, encode(manifest))
            files.sync_directory(self.directory)
            old = self._take_name()
            # The lock file goes last: while it is held, nobody takes the staging directory for a dead one.
            (self._target / "lock").unlink()
            files.sync_directory(self._target.parent)
        self._lock.release()
        if old is not None:
            files.remove_tree(old)
        return Stored(self._target, manifest)

    def _take_name(self) -> Path | None:
        """Where what had the name until now is then."""
        old = None
        if self._replaces and self._target.exists():
            if exchange(self.directory, self._target):
                return self.directory
            old = self._target.rename(self._target.with_name(f"{DOOMED}{self.tag}-{time.time_ns():x}"))
        try:
            self.directory.rename(self._target)
        except OSError as error:
            if self._target.exists():
                raise TagTaken(f"snapshot {self.tag!r} exists already") from error
            raise
        return old

    def abandon(self) -> None:
        """Remove whatever was staged; harmless after a commit. What stays for now, the tag's next maker removes."""
        try:
            files.remove_tree(self.directory)
        except OSError as error:  # a failing disk; whoever abandons has told what failed before
            log.warning("%s is not wholly removed: %s", self.directory, error)
        finally:
            self._lock.release()


class SnapshotStore:
    """Snapshots under one directory. Safe for several processes at once."""

    def __init__(self, root: Path, low_water: int | None = None) -> None:
        self.root = root
        self._low_water = low_water

    def path(self, tag: str) -> Path:
        """The directory a snapshot with this tag has, or would have."""
        return self.root / check_tag(tag)

    def stage(self, tag: str, *, replaces: bool = False) -> Stage:
        """Begin a new snapshot. Raises TagTaken if the tag exists or somebody alive is making it, NoSpace.

        With ``replaces`` the tag may exist: who has it keeps it until the new one is whole, and is removed then.
        """
        target = self.path(tag)
        directory = self.root / f"{STAGE}{tag}"
        with files.disk_full_as_no_space(self.root), brief(self.root / ".lock"):
            if target.exists() and not replaces:
                raise TagTaken(
                    f"snapshot {tag!r} exists already", hint=f"pick another tag, or remove it: forkd rmi {tag}"
                )
            if directory.exists():
                if is_held(directory / "lock"):
                    raise TagTaken(f"snapshot {tag!r} is being made by another forkd")
                files.remove_tree(directory)  # its maker died
            files.check_low_water(self.root, self._low_water)
            directory.mkdir()
            lock = FileLock.try_take(directory / "lock")
        assert lock is not None, "a directory we made under the store lock cannot be locked by another"
        return Stage(tag, directory, target, lock, replaces)

    async def until_made(self, tag: str) -> None:
        """Wait while somebody alive is making ``tag``; he may have failed."""
        with suppress(FileNotFoundError):
            async with file_lock(self.root / f"{STAGE}{check_tag(tag)}" / "lock", make=False):
                pass

    def load(self, tag: str) -> Stored:
        """Read one snapshot's manifest. Raises SnapshotNotFound, SnapshotBroken."""
        directory = self.path(tag)
        try:
            with open(directory / MANIFEST, "rb") as source:
                data = source.read(MAX_MANIFEST + 1)
        except FileNotFoundError as error:
            if directory.is_dir():
                raise SnapshotBroken(
                    f"snapshot {tag!r} has no {MANIFEST}", hint=f"remove it: forkd rmi {tag}"
                ) from error
            raise SnapshotNotFound(f"there is no snapshot {tag!r}", hint="forkd images lists them") from error
        except OSError as error:
            raise SnapshotBroken(f"snapshot {tag!r}: {MANIFEST} cannot be read: {error.strerror}") from error
        return Stored(directory, decode(tag, data))

    def entries(self) -> list[Stored | Broken]:
        """Every snapshot by tag, with those that are broken and why."""
        found: list[Stored | Broken] = []
        try:
            names = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        except FileNotFoundError:
            return []
        for name in names:
            if name.startswith("."):
                continue
            try:
                stored = self.load(name)
                stored.check_files()
                found.append(stored)
            except SnapshotNotFound:
                continue  # removed while we looked
            except SnapshotBroken as error:
                found.append(Broken(name, self.root / name, error.message))
        return found

    def manifests(self) -> list[Snapshot]:
        """What every snapshot that can be read says of itself; its files are not looked at."""
        found = []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            try:
                if not path.name.startswith("."):
                    found.append(self.load(path.name).manifest)
            except (SnapshotBroken, SnapshotNotFound):
                continue
        return found

    def dependents(self, tag: str) -> list[str]:
        """Tags of the snapshots whose delta is directly against ``tag``."""
        return [found.tag for found in self.manifests() if found.parent is not None and found.parent.tag == tag]

    def note(self, tag: str, *, pinned: bool | None = None, labels: dict[str, str] | None = None) -> Stored:
        """Pin or unpin a snapshot, give it other labels; on the disk when this returns. What is None stays.

        Raises SnapshotNotFound, SnapshotBroken.
        """
        with files.disk_full_as_no_space(self.root), brief(self.root / ".lock"):
            stored = self.load(tag)
            if labels is not None:
                manifest = msgspec.structs.replace(stored.manifest, labels=labels)
                files.write_durably(stored.directory / MANIFEST, encode(manifest))
                stored = Stored(stored.directory, manifest)
            if pinned is True:
                (stored.directory / PINNED).touch()
            elif pinned is False:
                (stored.directory / PINNED).unlink(missing_ok=True)
            files.sync_directory(stored.directory)
        return stored

    def remove(self, tag: str, *, force: bool = False) -> None:
        """Remove a snapshot: it is gone for everybody the moment its name is.

        Raises SnapshotNotFound, and SnapshotPinned unless forced.
        """
        directory = self.path(tag)
        doomed = self.root / f"{DOOMED}{tag}-{time.time_ns():x}"
        with brief(self.root / ".lock"):
            if not force and (directory / PINNED).exists():
                raise SnapshotPinned(f"snapshot {tag!r} is pinned", hint=f"forkd unpin {tag}")
            try:
                directory.rename(doomed)
            except FileNotFoundError as error:
                raise SnapshotNotFound(f"there is no snapshot {tag!r}", hint="forkd images lists them") from error
        files.sync_directory(self.root)
        files.remove_tree(doomed)

    def leftovers(self) -> list[Path]:
        """Hidden directories that no living process is working on."""
        if not self.root.is_dir():
            return []
        hidden = [path for path in sorted(self.root.iterdir()) if path.name.startswith((STAGE, DOOMED))]
        return [path for path in hidden if path.is_dir() and not is_held(path / "lock")]

    def remove_leftover(self, path: Path) -> bool:
        """Remove a leftover unless somebody has taken it up since; whether it was removed."""
        with brief(self.root / ".lock"):
            if is_held(path / "lock"):
                return False
            files.remove_tree(path)
            return True


def content_id(manifest: Snapshot) -> str:
    """The identity of what a snapshot holds, whatever it is called and wherever it is."""
    parent = manifest.parent.content if manifest.parent else None
    parts: list[object] = [
        manifest.vmstate.digest,
        manifest.memory,
        parent,
        manifest.rootfs,
        manifest.hardware,
        manifest.platform,
    ]
    if manifest.volumes:
        parts.append(manifest.volumes)
    return "sha256:" + hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def encode(manifest: Snapshot) -> bytes:
    """The manifest as it is written to disk."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode(tag: str, data: bytes) -> Snapshot:
    """Parse and check a manifest. Raises SnapshotBroken saying what is wrong with it."""
    hint = f"remove it: forkd rmi {tag}"
    if len(data) > MAX_MANIFEST:
        raise SnapshotBroken(f"snapshot {tag!r}: {MANIFEST} is larger than {MAX_MANIFEST} bytes", hint=hint)
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != SNAPSHOT_FORMAT:
            raise SnapshotBroken(
                f"snapshot {tag!r} has format {found}; this forkd reads {SNAPSHOT_FORMAT}", hint="use a newer forkd"
            )
        manifest = msgspec.json.decode(data, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise SnapshotBroken(f"snapshot {tag!r}: {MANIFEST} is corrupt: {error}", hint=hint) from error
    if manifest.tag != tag:
        raise SnapshotBroken(f"snapshot {tag!r}: {MANIFEST} is that of {manifest.tag!r}", hint=hint)
    if manifest.content != content_id(manifest):
        raise SnapshotBroken(f"snapshot {tag!r}: {MANIFEST} was altered: its content id does not match", hint=hint)
    if manifest.memory.kind != ("delta" if manifest.parent else "image"):
        raise SnapshotBroken(f"snapshot {tag!r}: a delta needs a parent and an image has none", hint=hint)
    return manifest


class _Format(msgspec.Struct):
    format: int


def _check_size(tag: str, path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise SnapshotBroken(f"snapshot {tag!r}: {path} cannot be read: {error.strerror}") from error
    if found != size:
        raise SnapshotBroken(f"snapshot {tag!r}: {path} has {found} bytes, {size} are recorded")
