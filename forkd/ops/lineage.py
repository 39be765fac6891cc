"""Lineage of snapshots: what one builds on, what builds on it, what it takes; and flattening a chain."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import trio

from forkd import __version__
from forkd.linux import sparse
from forkd.ops.describe import describe
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput
from forkd.specs.models import FileRef, MemoryRef, SnapshotInfo
from forkd.store import deltas, digests
from forkd.store.chain import resolve
from forkd.store.files import disk_full_as_no_space, physical_bytes
from forkd.store.snapshots import IMAGE, VMSTATE, Stage, Stored, content_id


def snapshot_lineage(runtime: Runtime, tag: str) -> dict[str, Any]:
    """Depth, ancestors, dependents and sizes. Raises ChainBroken where the ancestry is."""
    layers = resolve(runtime.snapshots, tag)
    head = layers[-1]
    head.check_files()
    manifest = head.manifest
    ancestors = layers[:-1]
    unique = physical_bytes(head.memory) + physical_bytes(head.vmstate)
    return {
        "tag": tag,
        "dir": str(head.directory),
        "created_at_unix": manifest.created_at_unix,
        "content": manifest.content,
        "memory_logical_bytes": manifest.hardware.mem_mib << 20,
        "memory_physical_bytes": physical_bytes(head.memory),
        "vmstate_bytes": manifest.vmstate.size,
        "parent_tag": manifest.parent.tag if manifest.parent else None,
        "parent_content_hash": manifest.parent.content if manifest.parent else None,
        "chain_depth": len(ancestors),
        "ancestors": [layer.manifest.tag for layer in ancestors],
        "dependents": runtime.snapshots.dependents(tag),
        "unique_bytes": unique,
        "shared_bytes": sum(physical_bytes(layer.memory) for layer in ancestors),
        "changed_pages": manifest.memory.changed_pages,
        "engine": manifest.platform.engine,
        "engine_version": manifest.platform.engine_version,
        "accelerator": manifest.platform.accelerator,
        "cpu": manifest.platform.cpu,
        "vcpus": manifest.hardware.vcpus,
        "image": manifest.image,
        "source": manifest.source,
    }


async def compact(runtime: Runtime, tag: str, to: str) -> SnapshotInfo:
    """Write the whole chain of ``tag`` as the new snapshot ``to`` that stands alone."""
    if tag == to:
        raise BadInput("a snapshot cannot be compacted onto itself", hint="give another tag")
    layers = resolve(runtime.snapshots, tag)
    for layer in layers:
        layer.check_files()
    stage = runtime.snapshots.stage(to)
    try:
        with runtime.reading(tag):
            stored = await trio.to_thread.run_sync(_flatten, layers, stage)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(stage.abandon)
    return describe(runtime, stored)


def _flatten(layers: list[Stored], stage: Stage) -> Stored:
    head = layers[-1]
    image = stage.directory / IMAGE
    with disk_full_as_no_space(stage.directory):
        deltas.materialise(layers[0].memory, [layer.memory for layer in layers[1:]], image)
        sparse.clone_file(head.vmstate, stage.directory / VMSTATE)
    manifest = msgspec.structs.replace(
        head.manifest,
        tag=stage.tag,
        created_at_unix=int(time.time()),
        forkd_version=__version__,
        vmstate=FileRef(digest=head.manifest.vmstate.digest, size=head.manifest.vmstate.size),
        memory=MemoryRef(kind="image", digest=digests.sparse256_file(image), size=image.stat().st_size),
        parent=None,
        branched_from=f"compact:{head.manifest.tag}",
        pause_ms=None,
        capture_ms=None,
    )
    return stage.commit(msgspec.structs.replace(manifest, content=content_id(manifest)))
