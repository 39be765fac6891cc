"""Cleanup: find what killed processes left behind, and remove it on request."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio

from forkd.linux.cgroup import remove_group
from forkd.linux.process import end_process
from forkd.network import remove_network
from forkd.runtime import Runtime
from forkd.slots import find_orphans
from forkd.store.files import physical_bytes, remove_tree, tree_bytes
from forkd.store.locks import is_held


class Leftover(msgspec.Struct, frozen=True):
    """One thing found: ``action`` is DEL, or SKIP with the reason why it is in use."""

    path: str
    bytes: int
    action: str
    reason: str


async def cleanup(runtime: Runtime, *, remove: bool, kept: bool = True) -> list[Leftover]:
    """Orphaned machines and their directories, half-made snapshots, disks and images. Anything in use is skipped.

    With ``kept`` also the work directories somebody wanted to look into.
    """
    rows = [_in_use(path) for path in _living_owners(runtime)]
    for orphan in find_orphans(runtime.settings.run_dir):
        rows.append(_doomed(orphan.directory, f"its owner is gone; machines still running: {len(orphan.pids)}"))
        if remove:
            for pid in orphan.pids:
                await end_process(pid)
            for slot in orphan.directory.iterdir():
                await trio.to_thread.run_sync(remove_network, slot)
            await trio.to_thread.run_sync(remove_tree, orphan.directory)
    for path in runtime.slots.limits.leftovers():
        rows.append(_doomed(path, "a control group without a machine"))
        if remove:
            remove_group(path)
    root = runtime.settings.kept_dir
    for path in sorted(root.iterdir()) if kept and root.is_dir() else []:
        rows.append(_doomed(path, "kept with --keep-workdir"))
        if remove:
            await trio.to_thread.run_sync(remove_tree, path)
    for path in runtime.snapshots.leftovers():
        rows.append(_doomed(path, "a snapshot that was never finished"))
        if remove:
            runtime.snapshots.remove_leftover(path)
    for path in runtime.disks.leftovers():
        rows.append(_doomed(path, "a rootfs build that was never finished"))
        if remove:
            await trio.to_thread.run_sync(remove_tree, path)
    for path in runtime.images.leftovers():
        rows.append(_doomed(path, "a memory image that was never finished"))
        if remove:
            path.unlink(missing_ok=True)
    for path in runtime.blobs.leftovers():
        rows.append(_doomed(path, "a transfer that was never finished"))
        if remove:
            runtime.blobs.remove_leftover(path)
    return rows


def _living_owners(runtime: Runtime) -> list[Path]:
    root = runtime.settings.run_dir
    owners = [path for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    return [path for path in owners if path != runtime.slots.directory and is_held(path / "lock")]


def _doomed(path: Path, reason: str) -> Leftover:
    return Leftover(str(path), _size(path), "DEL", reason)


def _in_use(path: Path) -> Leftover:
    return Leftover(str(path), _size(path), "SKIP", "its owner is alive")


def _size(path: Path) -> int:
    return physical_bytes(path) if path.is_file() else tree_bytes(path)
