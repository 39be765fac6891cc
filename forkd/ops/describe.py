"""Describe snapshots for people and programs."""

from __future__ import annotations

import trio

from forkd.runtime import Runtime
from forkd.specs.errors import ChainBroken, SnapshotBroken
from forkd.specs.models import Snapshot, SnapshotInfo
from forkd.store.chain import resolve
from forkd.store.files import physical_bytes
from forkd.store.snapshots import Broken, Stored


async def list_snapshots(runtime: Runtime) -> list[SnapshotInfo]:
    """Every snapshot, those that cannot be used included, with the reason."""
    writing = dict(runtime.writing)  # asked first: one that is finished while we look is seen there, or here
    rows = await trio.to_thread.run_sync(lambda: [describe(runtime, entry) for entry in runtime.snapshots.entries()])
    whole = {row.tag for row in rows}
    unfinished = writing | {tag: _failed(runtime, tag, why) for tag, why in runtime.failed.items()}
    return rows + [row for tag, row in unfinished.items() if tag not in whole]


def get_snapshot(runtime: Runtime, tag: str) -> SnapshotInfo:
    """One snapshot. Raises SnapshotNotFound, SnapshotBroken."""
    if (row := runtime.writing.get(tag)) is not None:
        return row
    if (why := runtime.failed.get(tag)) is not None and not runtime.snapshots.path(tag).exists():
        return _failed(runtime, tag, why)
    return describe(runtime, runtime.snapshots.load(tag))


def _failed(runtime: Runtime, tag: str, why: str) -> SnapshotInfo:
    """A branch that was answered before it was written, and then could not be."""
    return SnapshotInfo(
        tag=tag,
        dir=str(runtime.snapshots.path(tag)),
        created_at_unix=0,
        status="failed",
        bootable=False,
        warning=why,
    )


def describe(runtime: Runtime, entry: Stored | Broken) -> SnapshotInfo:
    """A snapshot as the API shows it."""
    if isinstance(entry, Broken):
        return SnapshotInfo(
            tag=entry.tag,
            dir=str(entry.directory),
            created_at_unix=int(entry.directory.stat().st_mtime),
            status="failed",
            bootable=False,
            warning=f"snapshot is not bootable: {entry.reason}",
        )
    manifest = entry.manifest
    warning = None
    try:
        entry.check_files()
        for disk in manifest.disks():
            runtime.disks.find(disk)
    except SnapshotBroken as error:
        warning = f"snapshot is not bootable: {error.message}"
    physical = physical_bytes(entry.memory) + physical_bytes(entry.vmstate) if warning is None else None
    delta = manifest.memory.kind == "delta"
    return SnapshotInfo(
        tag=manifest.tag,
        dir=str(entry.directory),
        created_at_unix=manifest.created_at_unix,
        status="ready" if warning is None else "failed",
        bootable=warning is None,
        branched_from=manifest.branched_from,
        parent_tag=manifest.parent.tag if manifest.parent else None,
        pause_ms=round(manifest.pause_ms) if manifest.pause_ms is not None else None,
        pause_exact_ms=manifest.pause_ms,
        capture_ms=manifest.capture_ms,
        changed_pages=manifest.memory.changed_pages if delta else None,
        diff_physical_bytes=manifest.memory.size if delta else None,
        diff_logical_bytes=manifest.hardware.mem_mib << 20 if delta else None,
        mem_mib=manifest.hardware.mem_mib,
        vcpus=manifest.hardware.vcpus,
        physical_bytes=physical,
        logical_bytes=_logical_bytes(manifest),
        shared_bytes=_shared_bytes(runtime, manifest) if warning is None else None,
        engine=f"{manifest.platform.engine} {manifest.platform.engine_version}",
        accelerator=manifest.platform.accelerator,
        image=manifest.image,
        warning=warning,
        labels=manifest.labels,
        pinned=entry.pinned,
        source=manifest.source,
        volumes=manifest.volumes,
    )


def _logical_bytes(manifest: Snapshot) -> int:
    """What a snapshot would take alone and without holes: RAM, device state and disks."""
    disks = sum(disk.size for disk in manifest.disks())
    return (manifest.hardware.mem_mib << 20) + manifest.vmstate.size + disks


def _shared_bytes(runtime: Runtime, manifest: Snapshot) -> int:
    """What it uses but does not own alone: its disks and the memory of the snapshots it builds on."""
    shared = sum(physical_bytes(runtime.disks.find(disk)) for disk in manifest.disks())
    try:
        ancestors = resolve(runtime.snapshots, manifest.tag)[:-1]
        return shared + sum(physical_bytes(layer.memory) for layer in ancestors)
    except (ChainBroken, SnapshotBroken, OSError):
        return shared  # the chain's fault is told where the chain is used
