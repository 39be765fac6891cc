"""Pack: a snapshot and all it builds on as one file that can be carried anywhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import trio

from forkd.hub import manifest as manifests
from forkd.hub import pack as packs
from forkd.linux import sparse
from forkd.ops.blobfiles import compress, total
from forkd.ops.keys import sign_document
from forkd.ops.meter import ByteProgress, Meter, metered
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, SnapshotNotReady
from forkd.specs.models import Snapshot
from forkd.specs.packs import PACK_SUFFIX, Blob, PackManifest
from forkd.specs.requests import PackRequest
from forkd.store import files
from forkd.store.chain import resolve
from forkd.store.snapshots import Stored


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the store that travels in a blob of its own."""

    kind: str
    digest: str
    size: int
    path: Path

    @property
    def bytes(self) -> int:
        """How much there is to read."""
        return files.physical_bytes(self.path)


def chain_of(runtime: Runtime, tag: str) -> list[Stored]:
    """The layers of a snapshot, whole and ready. Raises what resolving a chain raises."""
    if tag in runtime.writing:
        raise SnapshotNotReady(f"snapshot {tag!r} is still being written", hint="wait until its status is ready")
    layers = resolve(runtime.snapshots, tag)
    for layer in layers:
        layer.check_files()
    return layers


def sources_of(runtime: Runtime, layers: list[Stored]) -> list[Source]:
    """The different files of a chain, root first, disks last."""
    found: dict[tuple[str, str], Source] = {}
    for layer in layers:
        paths = {layer.manifest.vmstate.digest: layer.vmstate, layer.manifest.memory.digest: layer.memory}
        paths |= {disk.digest: runtime.disks.find(disk) for disk in layer.manifest.disks()}
        for kind, digest, size in manifests.files_of(layer.manifest):
            found.setdefault((kind, digest), Source(kind, digest, size, paths[digest]))
    return sorted(found.values(), key=lambda source: source.kind == "rootfs")


async def ensure_blob(runtime: Runtime, source: Source, meter: Meter) -> Blob:
    """The blob of a file, compressed unless it is in the blob store. Raises SnapshotBroken, NoSpace."""
    store = runtime.blobs
    known = store.known(source.digest, source.size)
    if known is not None and store.find(known.sha256, known.stored) is not None:
        meter.add(source.bytes)
        return msgspec.structs.replace(known, kind=source.kind)
    return await trio.to_thread.run_sync(_compress, runtime, source, meter)


THREADS = 4
"""More take tens of MiB each for what the disk gives slower anyway."""


def _compress(runtime: Runtime, source: Source, meter: Meter) -> Blob:
    store = runtime.blobs
    threads = min(os.cpu_count() or 1, THREADS)
    with store.stage() as directory:
        with open(directory / "blob", "xb") as out:
            blob = compress(source.kind, source.path, source.digest, source.size, out, threads, advance=meter.add)
        store.adopt(directory / "blob", blob.sha256)
        store.remember(blob)
    store.evict()
    return blob


def layers_of(layers: list[Stored]) -> list[Snapshot]:
    """What manifests hold of a chain."""
    return [layer.manifest for layer in layers]


async def pack(runtime: Runtime, request: PackRequest, progress: ByteProgress) -> dict[str, Any]:
    """Write the pack of a snapshot, and the disk it needs beside it (or inside, with ``bundle``)."""
    layers = chain_of(runtime, request.tag)
    out = Path(request.out or f"./{request.tag}{PACK_SUFFIX}").absolute()
    if not out.parent.is_dir():
        raise BadInput(f"there is no directory {out.parent}")
    with runtime.reading(request.tag):
        manifest = await build_manifest(runtime, layers, request, progress)
    document = sign_document(runtime, manifests.encode(manifest), request.sign)
    await trio.to_thread.run_sync(partial(_assemble, runtime, manifest, document, out))
    beside = [] if request.bundle or request.since else await _sidecars(runtime, manifest, out.parent)
    inside = [blob for blob in manifest.blobs if blob.inside]
    runtime.observe("pack", tag=request.tag)
    return {
        "tag": request.tag,
        "path": str(out),
        "bytes": out.stat().st_size,
        "memory_bytes": layers[-1].manifest.hardware.mem_mib << 20,
        "layers": [layer.manifest.tag for layer in layers],
        "blobs": len(inside),
        "blob_bytes": total(inside),
        "beside": [str(path) for path in beside],
    }


async def build_manifest(
    runtime: Runtime, layers: list[Stored], request: PackRequest, progress: ByteProgress
) -> PackManifest:
    """Compress what is needed and describe it. What is not inside keeps its blob's name, so it can be found."""
    apart = left_out(layers, request.since)
    sources = sources_of(runtime, layers)
    blobs = []
    async with metered(progress, "packing", sum(source.bytes for source in sources)) as meter:
        for source in sources:
            inside = source.digest not in apart and (source.kind != "rootfs" or request.bundle)
            blob = await ensure_blob(runtime, source, meter)
            blobs.append(msgspec.structs.replace(blob, inside=inside))
    return manifests.make(layers_of(layers), blobs, request.description, request.base_image)


def left_out(layers: list[Stored], since: str | None) -> set[str]:
    """Digests of the files of all layers up to ``since``. Raises BadInput if that is not an ancestor."""
    if since is None:
        return set()
    tags = [layer.manifest.tag for layer in layers]
    if since not in tags[:-1]:
        raise BadInput(
            f"{since!r} is not an ancestor of {tags[-1]!r}", hint=f"its ancestors: {', '.join(tags[:-1]) or 'none'}"
        )
    known = layers[: tags.index(since) + 1]
    return {digest for layer in known for _, digest, _ in manifests.files_of(layer.manifest)}


def _assemble(runtime: Runtime, manifest: PackManifest, document: bytes, out: Path) -> None:
    def copy(blob: Blob, target: IO[bytes]) -> None:
        target.flush()
        with open(runtime.blobs.path(blob.sha256), "rb") as source:
            sparse.copy_range(source.fileno(), 0, target.fileno(), target.tell(), blob.stored)
        target.seek(0, os.SEEK_END)

    with _replacing(out) as target:
        packs.write(target, document, manifest.blobs, copy)


async def _sidecars(runtime: Runtime, manifest: PackManifest, directory: Path) -> list[Path]:
    """Put disks beside the pack unless they lie there already."""
    found = []
    for blob in manifest.blobs:
        if blob.kind == "rootfs":
            path = directory / packs.sidecar(blob)
            found.append(path)
            if not path.exists() or path.stat().st_size != blob.stored:
                await trio.to_thread.run_sync(_copy_file, runtime.blobs.path(blob.sha256), path)
    return found


def _copy_file(source: Path, out: Path) -> None:
    with _replacing(out) as target, open(source, "rb") as blob:
        sparse.copy_range(blob.fileno(), 0, target.fileno(), 0, os.fstat(blob.fileno()).st_size)


class _replacing:
    """A file beside ``path`` that takes its name when whole; one that was left half is written over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged = path.with_name(f".{path.name[:200]}.part")

    def __enter__(self) -> IO[bytes]:
        self._out = open(self._staged, "wb")
        return self._out

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._out:
            if error is None:
                self._out.flush()
                os.fsync(self._out.fileno())
        if error is None:
            self._staged.replace(self._path)
            files.sync_directory(self._path.parent)
        else:
            self._staged.unlink(missing_ok=True)
