"""This host's snapshots as a registry for other hosts, read-only: ``local/TAG``, blobs made when first asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trio

from forkd.hub import manifest as manifests
from forkd.hub import registry
from forkd.ops.meter import Meter
from forkd.ops.pack import chain_of, ensure_blob, layers_of, sources_of
from forkd.runtime import Runtime
from forkd.specs.errors import NotFound
from forkd.specs.packs import Package, Registry, Version
from forkd.store.snapshots import Stored

OWNER = "local"
LATEST = "latest"
CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Served:
    """A blob's file and its size."""

    path: Path
    size: int


def index(runtime: Runtime) -> bytes:
    """``registry.json`` of all whole snapshots."""
    packages = {}
    for entry in runtime.snapshots.entries():
        if isinstance(entry, Stored):
            version = Version(memory_mib=entry.manifest.hardware.mem_mib, base_image=entry.manifest.image)
            packages[f"{OWNER}/{entry.manifest.tag}"] = Package(versions={LATEST: version})
    return registry.encode(Registry(packages=packages))


async def manifest(runtime: Runtime, owner: str, name: str, version: str) -> bytes:
    """The manifest of a snapshot; its blobs are there when this returns."""
    if owner != OWNER or version != LATEST:
        raise NotFound(f"this host offers {OWNER}/TAG@{LATEST} only")
    layers = chain_of(runtime, name)
    blobs = [await ensure_blob(runtime, source, Meter(1)) for source in sources_of(runtime, layers)]
    return manifests.encode(manifests.make(layers_of(layers), blobs, "", ""))


def blob(runtime: Runtime, sha256: str) -> Served:
    """A blob to be read. Raises NotFound."""
    try:
        path = runtime.blobs.path(sha256)
        return Served(path, path.stat().st_size)
    except (ValueError, OSError) as error:
        raise NotFound("there is no such blob here", hint="ask for the manifest first") from error


async def read(served: Served, begin: int, end: int) -> AsyncIterator[bytes]:
    """Bytes of a blob from ``begin`` to before ``end``."""
    with open(served.path, "rb") as source:  # noqa: ASYNC230
        source.seek(begin)
        while begin < end and (chunk := await trio.to_thread.run_sync(source.read, min(CHUNK, end - begin))):
            begin += len(chunk)
            yield chunk
