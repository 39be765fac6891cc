"""Blobs on this host: compressed for the first time, fetched, or kept because they may be asked for again."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from forkd.specs.packs import Blob
from forkd.store import files
from forkd.store.locks import FileLock, is_held

PART = ".part-"
STAGE = ".stage-"
RECENT_SECONDS = 3600.0
MAX_PACKAGES = 8
_HEX = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """Blobs by SHA-256 under one directory; beyond a limit those not used for longest go. Also: what became of files.

    A file with a digest's name is whole. ``.part-`` files are downloads that can be continued; ``.stage-`` directories
    belong to a living process or are leftovers.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self._limit = limit_bytes

    def path(self, sha256: str) -> Path:
        """Where a blob is, or would be."""
        if not _HEX.fullmatch(sha256):
            raise ValueError(f"{sha256[:80]!r} is not a SHA-256")
        return self.root / sha256

    def part(self, sha256: str) -> Path:
        """Where a download of it grows."""
        return self.root / f"{PART}{self.path(sha256).name}"

    def find(self, sha256: str, size: int) -> Path | None:
        """The blob's file if it is here; it then stays for a while."""
        path = self.path(sha256)
        try:
            os.utime(path)
            return path if path.stat().st_size == size else None
        except FileNotFoundError:
            return None

    def adopt(self, staged: Path, sha256: str) -> Path:
        """Give a whole file, synced here, its name."""
        files.sync_file(staged)
        staged.replace(self.path(sha256))
        files.sync_directory(self.root)
        return self.path(sha256)

    @contextmanager
    def stage(self) -> Iterator[Path]:
        """A scratch directory on the store's file system, gone afterwards."""
        directory = self.root / f"{STAGE}{os.getpid()}-{secrets.token_hex(4)}"
        with files.disk_full_as_no_space(self.root):
            directory.mkdir(parents=True)
            lock = FileLock.try_take(directory / "lock")
            assert lock is not None
            try:
                yield directory
            finally:
                files.remove_tree(directory)
                lock.release()

    # -- which blob holds which file ---------------------------------------------------------------------------------

    def known(self, digest: str, size: int) -> Blob | None:
        """The blob a file with this digest became earlier, whether or not it is still here."""
        try:
            blob = msgspec.json.decode(self._record(digest).read_bytes(), type=Blob)
        except (OSError, msgspec.MsgspecError):
            return None
        return blob if (blob.digest, blob.size) == (digest, size) else None

    def remember(self, blob: Blob) -> None:
        """Record a blob whose content was verified, or made, here."""
        self.root.mkdir(parents=True, exist_ok=True)
        plain = msgspec.structs.replace(blob, inside=True)
        files.write_durably(self._record(blob.digest), msgspec.json.encode(plain))

    def packages(self, base: str) -> list[str]:
        """Packages of a registry that were pushed or pulled from here, the latest first: blobs may be found there."""
        try:
            return msgspec.json.decode(self._places().read_bytes(), type=dict[str, list[str]]).get(base, [])
        except (OSError, msgspec.MsgspecError):
            return []

    def note_package(self, base: str, package: str) -> None:
        """Remember a package of a registry."""
        try:
            found = msgspec.json.decode(self._places().read_bytes(), type=dict[str, list[str]])
        except (OSError, msgspec.MsgspecError):
            found = {}
        found[base] = [package, *(other for other in found.get(base, []) if other != package)][:MAX_PACKAGES]
        self.root.mkdir(parents=True, exist_ok=True)
        files.write_durably(self._places(), msgspec.json.encode(found))

    def _places(self) -> Path:
        return self.root / "places.json"

    def _record(self, digest: str) -> Path:
        return self.root / f"{hashlib.sha256(digest.encode()).hexdigest()[:32]}.json"

    # -- housekeeping ------------------------------------------------------------------------------------------------

    def evict(self) -> None:
        """Drop blobs beyond the limit, those not used for longest first, none that was used within the hour."""
        found = [path for path in self.root.iterdir() if _HEX.fullmatch(path.name)] if self.root.is_dir() else []
        aged: list[tuple[float, int, Path]] = []
        for path in found:
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process was quicker
            aged.append((status.st_mtime, status.st_blocks * 512, path))
        total = 0
        for used, size, path in sorted(aged, reverse=True):
            total += size
            if total > self._limit and time.time() - used > RECENT_SECONDS:
                path.unlink(missing_ok=True)

    def remove_leftover(self, path: Path) -> None:
        """Remove what ``leftovers`` found."""
        if path.is_dir():
            files.remove_tree(path)
        else:
            path.unlink(missing_ok=True)

    def leftovers(self) -> list[Path]:
        """Downloads nobody is continuing and scratch directories of dead processes."""
        if not self.root.is_dir():
            return []
        staged = [path for path in sorted(self.root.iterdir()) if path.name.startswith(STAGE)]
        parts = [path for path in sorted(self.root.iterdir()) if path.name.startswith(PART)]
        return [path for path in staged if not is_held(path / "lock")] + [path for path in parts if not is_held(path)]
