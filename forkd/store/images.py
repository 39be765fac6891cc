"""Memory images a VMM can map: a base snapshot's own file, or a chain materialised once and cached."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import trio

from forkd.store import deltas, files
from forkd.store.snapshots import Stored

RECENT_SECONDS = 60.0
KEPT_SECONDS = 30 * 86400.0


class ImageCache:
    """Materialised images by content; those not used for long go, and the oldest where there are too many.

    Evicting one never harms a machine: a mapped file lives until it is unmapped. One used a moment ago stays, since a
    machine may be about to map it.
    """

    def __init__(self, root: Path, limit_bytes: int, limit_seconds: float = KEPT_SECONDS) -> None:
        self.root = root
        self._limit_bytes = limit_bytes
        self._limit_seconds = limit_seconds
        self._making: dict[str, trio.Lock] = {}

    async def image(self, layers: list[Stored]) -> Path:
        """One contiguous image of the chain ``layers`` (root first). Raises NoSpace, SnapshotBroken."""
        if len(layers) == 1:
            return layers[0].memory
        path = self._path(layers[-1].manifest.content)
        async with self._making.setdefault(path.name, trio.Lock()):
            if not _touch(path):
                await trio.to_thread.run_sync(self._make, layers, path)
        return path

    def forget(self, content: str) -> None:
        """Drop the image of a removed snapshot."""
        self._path(content).unlink(missing_ok=True)

    def cached_bytes(self, content: str) -> int:
        """The space the image of a snapshot takes, 0 if there is none."""
        try:
            return files.physical_bytes(self._path(content))
        except FileNotFoundError:
            return 0

    def leftovers(self) -> list[Path]:
        """Half-made images of processes that are gone."""
        if not self.root.is_dir():
            return []
        staged = [path for path in self.root.iterdir() if path.name.startswith(".")]
        return [path for path in staged if not _is_alive(path.name.rpartition("-")[2])]

    def _path(self, content: str) -> Path:
        return self.root / f"{content.partition(':')[2]}.bin"

    def _make(self, layers: list[Stored], path: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.evict()
        staged = self.root / f".{path.stem[:16]}-{os.getpid()}"
        with files.disk_full_as_no_space(self.root):
            try:
                deltas.materialise(layers[0].memory, [layer.memory for layer in layers[1:]], staged)
                staged.replace(path)
            finally:
                staged.unlink(missing_ok=True)

    def evict(self) -> list[Path]:
        """Remove what is too old or too much; what was removed."""
        removed = []
        total = 0
        for used, path in sorted(_used(self.root), reverse=True):
            age = time.time() - used
            total += files.physical_bytes(path) if path.exists() else 0
            if age > RECENT_SECONDS and (total > self._limit_bytes or age > self._limit_seconds):
                path.unlink(missing_ok=True)
                removed.append(path)
        return removed


def _used(root: Path) -> Iterator[tuple[float, Path]]:
    """The images and when each was used last."""
    for path in root.glob("*.bin"):
        try:
            yield path.stat().st_mtime, path
        except FileNotFoundError:
            continue  # evicted by another process just now


def _touch(path: Path) -> bool:
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _is_alive(pid: str) -> bool:
    return pid.isdigit() and os.path.exists(f"/proc/{pid}")
