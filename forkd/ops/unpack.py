"""Unpack: believe nothing, check everything in a staging directory, then put it into the store, root first."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from forkd.hub import manifest as manifests
from forkd.hub import pack as packs
from forkd.hub import signatures
from forkd.hub.signatures import Signature, Verdict
from forkd.linux import sparse
from forkd.linux.filelock import file_lock
from forkd.ops.blobfiles import expand
from forkd.ops.keys import trusted_keys
from forkd.ops.meter import ByteProgress, Meter, metered
from forkd.ops.remove import give_way
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, NoSpace, PackError, SnapshotInUse, SnapshotPinned, TagTaken
from forkd.specs.models import ParentRef, Snapshot
from forkd.specs.packs import Blob, PackManifest
from forkd.specs.requests import UnpackRequest
from forkd.specs.tags import check_tag
from forkd.store import deltas, digests, files
from forkd.store.snapshots import DELTA, IMAGE, PINNED, VMSTATE, Stage, Stored, content_id


@dataclass(frozen=True, slots=True)
class Region:
    """Where a blob's bytes are: a file, from an offset on."""

    path: Path
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be done to have a chain here: layers to add under which tags, and files that are here already."""

    manifest: PackManifest
    layers: list[Snapshot]
    local: dict[str, Path]
    replaced: str | None
    verdict: Verdict
    again: Callable[[], Plan]
    present: list[str] = field(default_factory=list)

    def wanted(self) -> list[Blob]:
        """The blobs that hold what is not here."""
        needed = {digest for layer in self.layers for _, digest, _ in manifests.files_of(layer)}
        return [blob for blob in self.manifest.blobs if blob.digest in needed and blob.digest not in self.local]


def plan(
    runtime: Runtime,
    body: bytes,
    signed: list[Signature],
    *,
    tag: str | None,
    force: bool,
    policy: str | None,
) -> Plan:
    """Check a manifest and compare it with the store. Raises PackError, TrustError, TagTaken, BadTag."""
    again = partial(plan, runtime, body, signed, tag=tag, force=force, policy=policy)
    manifest = manifests.decode(body)
    head = check_tag(tag) if tag is not None else manifest.tag
    for layer in manifest.layers:
        if layer.content != content_id(layer):
            raise PackError(f"layer {layer.tag!r} was altered: its content id does not fit")
    verdict = signatures.judge(body, signed, trusted_keys(runtime), policy or runtime.settings.trust)
    here = {_identity(entry.manifest): entry for entry in runtime.snapshots.entries() if isinstance(entry, Stored)}
    missing: list[Snapshot] = []
    present: list[str] = []
    parent: ParentRef | None = None
    replaced = None
    for layer in manifest.layers:
        last = layer is manifest.layers[-1]
        name = head if last else layer.tag
        found = here.get(_identity(layer))
        if found is not None and (not last or found.manifest.tag == name or tag is None):
            present.append(found.manifest.tag)
            parent = ParentRef(tag=found.manifest.tag, content=layer.content)
            continue
        if runtime.snapshots.path(name).exists() or (name == head and not last):
            if last and not force:
                raise TagTaken(
                    f"snapshot {name!r} exists already and is another one",
                    hint="give --tag NAME, or --force to replace it",
                )
            if last:
                replaced = name
            else:  # an ancestor is not asked for by name: it gets one that says which it is
                name = check_tag(f"{layer.tag[:51]}-{layer.content.removeprefix('sha256:')[:12]}")
        missing.append(msgspec.structs.replace(layer, tag=name, parent=parent))
        parent = ParentRef(tag=name, content=layer.content)
    kept = [entry for entry in here.values() if entry.manifest.tag != replaced]
    return Plan(manifest, missing, _local_files(runtime, missing, kept), replaced, verdict, again, present)


def _identity(layer: Snapshot) -> tuple[str, str]:
    """What a layer shares with one that is here if it is that one. No content id has the token that opens its guest."""
    return layer.content, layer.agent_sync


def check_replaced(runtime: Runtime, plan: Plan) -> None:
    """Whether the snapshot that has the tag may make room: nothing builds on it. Raises SnapshotInUse."""
    tag = plan.replaced
    if tag is None:
        return
    if tag in plan.present:
        raise SnapshotInUse(f"{tag!r} cannot be replaced: what is to replace it builds on it", hint="give --tag NAME")
    if dependents := runtime.snapshots.dependents(tag):
        raise SnapshotInUse(
            f"{tag!r} cannot be replaced: {', '.join(dependents)} build on it",
            hint="give --tag NAME, or remove them first: forkd rmi --cascade",
            dependents=dependents,
        )
    if (runtime.snapshots.path(tag) / PINNED).exists():
        raise SnapshotPinned(f"{tag!r} cannot be replaced: it is pinned", hint=f"give --tag NAME, or forkd unpin {tag}")


def _local_files(runtime: Runtime, missing: list[Snapshot], here: list[Stored]) -> dict[str, Path]:
    """Files of the layers that the store has already, by digest."""
    found: dict[str, Path] = {}
    for stored in here:
        found[stored.manifest.vmstate.digest] = stored.vmstate
        found[stored.manifest.memory.digest] = stored.memory
    for layer in missing:
        found |= {disk.digest: runtime.disks.find(disk) for disk in layer.disks() if runtime.disks.has(disk)}
    return found


async def install(
    runtime: Runtime, plan: Plan, regions: Mapping[str, Region], origin: dict[str, Any], progress: ByteProgress
) -> dict[str, Any]:
    """Expand and verify what is missing, then commit it. Nothing is left of what is wrong."""
    runtime.blobs.root.mkdir(parents=True, exist_ok=True)
    async with file_lock(runtime.blobs.root / "lock"):
        # One at a time, and planned again: another may have just added layers and disks that this one has too.
        return await _install_alone(runtime, plan.again(), regions, origin, progress)


async def _install_alone(
    runtime: Runtime, plan: Plan, regions: Mapping[str, Region], origin: dict[str, Any], progress: ByteProgress
) -> dict[str, Any]:
    check_replaced(runtime, plan)
    for blob in plan.wanted():
        if blob.sha256 not in regions:
            raise PackError(
                f"the pack needs {blob.kind} {blob.digest[:24]}…, which is neither in it nor here",
                hint="unpack or pull what it builds on first; a disk lies beside its pack",
            )
    check_space(runtime, plan)
    source = {
        **origin,
        "manifest": "sha256:" + hashlib.sha256(manifests.encode(plan.manifest)).hexdigest(),
        "trust": plan.verdict.trust,
        "signed_by": list(plan.verdict.signers),
        "at_unix": int(time.time()),
    }
    async with metered(progress, "unpacking", sum(blob.stored for blob in plan.wanted())) as meter:
        # Not abandoned on cancellation: the thread removes its staging directory itself.
        await trio.to_thread.run_sync(partial(_install, runtime, plan, regions, source, meter))
    for blob in plan.wanted():
        runtime.blobs.remember(blob)
    head = plan.layers[-1].tag if plan.layers else plan.present[-1]
    runtime.observe("unpack", tag=head)
    return {
        "tag": head,
        "added": [layer.tag for layer in plan.layers],
        "present": plan.present,
        "trust": plan.verdict.trust,
        "signed_by": list(plan.verdict.signers),
        "warning": plan.verdict.warning,
        "fetched_bytes": sum(blob.stored for blob in plan.wanted()),
    }


def _install(runtime: Runtime, plan: Plan, regions: Mapping[str, Region], source: dict[str, Any], meter: Meter) -> None:
    with runtime.blobs.stage() as stage:
        staged = {blob.digest: _staged(stage, blob) for blob in plan.manifest.blobs}
        for blob in plan.wanted():
            region = regions[blob.sha256]
            try:
                with open(region.path, "rb") as archive:
                    archive.seek(region.offset)
                    expand(blob, archive, staged[blob.digest], meter.add)
            except FileNotFoundError as error:
                raise PackError(f"{region.path} is gone", hint="run the same command again") from error
            if blob.digest.startswith("delta256:"):
                with deltas.Delta(staged[blob.digest]):
                    pass  # a delta that is not one is refused here, not when a child is forked
        for layer in plan.layers:
            _check_ram(layer, staged)
        _commit(runtime, plan, staged, source)


def _staged(stage: Path, blob: Blob) -> Path:
    return stage / f"{blob.kind}-{blob.sha256}"


def _check_ram(layer: Snapshot, staged: Mapping[str, Path]) -> None:
    path = staged[layer.memory.digest]
    if layer.memory.kind == "delta" and path.exists():
        with deltas.Delta(path) as delta:
            if delta.ram_pages * 4096 != layer.hardware.mem_mib << 20:
                raise PackError(f"the delta of layer {layer.tag!r} is for another size of RAM")


def _commit(runtime: Runtime, plan: Plan, staged: Mapping[str, Path], source: dict[str, Any]) -> None:
    for layer in plan.layers:
        for disk in layer.disks():
            if staged[disk.digest].exists():
                runtime.disks.adopt(staged[disk.digest], disk)
    stages: list[tuple[Snapshot, Stage]] = []
    local = dict(plan.local)
    try:
        for layer in plan.layers:
            target = runtime.snapshots.stage(layer.tag, replaces=layer.tag == plan.replaced)
            stages.append((layer, target))
            memory = IMAGE if layer.memory.kind == "image" else DELTA
            _place(local, staged, layer.vmstate.digest, target.directory / VMSTATE)
            _place(local, staged, layer.memory.digest, target.directory / memory)
        if plan.replaced is not None:
            trio.from_thread.run(give_way, runtime, plan.replaced)
        while stages:
            layer, target = stages[0]
            target.commit(msgspec.structs.replace(layer, source=source))
            stages.pop(0)
    except BaseException:
        for _, target in stages:
            target.abandon()
        raise


def _place(local: dict[str, Path], staged: Mapping[str, Path], digest: str, target: Path) -> None:
    """Move a staged file to its place, or copy one that another snapshot or layer has, checked again."""
    if staged[digest].exists():
        staged[digest].rename(target)
        local[digest] = target
    else:
        sparse.clone_file(local[digest], target)
        digests.verify_file(target, digest)


def check_space(runtime: Runtime, plan: Plan, to_fetch: int = 0) -> None:
    """Refuse early what cannot fit: streams are what files take on disk, roughly, besides what is yet to be fetched."""
    needed = sum(blob.stream for blob in plan.wanted()) + to_fetch
    runtime.blobs.root.mkdir(parents=True, exist_ok=True)
    kept = files.kept_free(runtime.blobs.root, runtime.settings.low_water_bytes)
    if needed + kept > (free := sparse.disk_free(runtime.blobs.root)):
        raise NoSpace(
            f"{needed >> 20} MiB are needed at {runtime.settings.data_dir}, {free >> 20} MiB are free"
            f" of which {kept >> 20} MiB are kept so",
            hint="free some space: forkd prune, forkd rmi, forkd cleanup",
        )


async def unpack(runtime: Runtime, request: UnpackRequest, progress: ByteProgress) -> dict[str, Any]:
    """Put a pack file of this host into the store; a disk it needs may lie beside it."""
    path = Path(request.path).absolute()
    return await unpack_file(runtime, path, request, {"from": f"file:{path}"}, progress)


async def unpack_file(
    runtime: Runtime,
    path: Path,
    request: UnpackRequest,
    origin: dict[str, Any],
    progress: ByteProgress,
    sidecar: Callable[[Blob], Path | None] | None = None,
) -> dict[str, Any]:
    """Read, plan and install a pack file; ``sidecar`` finds disks that are not inside it."""
    found = await trio.to_thread.run_sync(_read_pack, path)
    planned = plan(runtime, found.body, found.signatures, tag=request.tag, force=request.force, policy=request.trust)
    regions = {sha256: Region(path, offset) for sha256, offset in found.offsets.items()}
    for blob in planned.wanted():
        beside = sidecar(blob) if sidecar else path.parent / packs.sidecar(blob)
        if blob.kind == "rootfs" and not blob.inside and beside is not None and beside.is_file():
            regions[blob.sha256] = Region(beside)
    return await install(runtime, planned, regions, origin, progress)


def _read_pack(path: Path) -> packs.Pack:
    try:
        with open(path, "rb") as source:
            if not Path(f"/proc/self/fd/{source.fileno()}").is_file():
                raise BadInput(f"{path} is not a regular file")
            return packs.read(source)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
