"""Questions to a registry: what is there, and would it run here; and signing a pack that exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import trio

from forkd.hub import pack as packs
from forkd.hub import refs, registry, signatures
from forkd.ops.keys import login_for, sign_document
from forkd.ops.transfer import read_manifest, transport_for
from forkd.ops.unpack import plan
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, SnapshotIncompatible
from forkd.specs.models import Snapshot


async def list_packages(runtime: Runtime, hub: str | None, words: str = "") -> list[dict[str, Any]]:
    """The versions a registry offers whose package or description has all ``words``, sorted."""
    chosen = hub or runtime.settings.hub_url
    if chosen is None:
        raise BadInput("no registry is given", hint="give --hub URL, or set FORKD_HUB_URL")
    base = refs.base_url(chosen)
    data = await transport_for(runtime, refs.scheme_of(base)).index(base, login_for(runtime, base))
    index = registry.decode(data) if data is not None else registry.EMPTY
    rows = []
    for name, package in sorted(index.packages.items()):
        text = f"{name} {package.description}".lower()
        if all(word in text for word in words.lower().split()):
            rows += [
                {
                    "package": name,
                    "version": version,
                    "size_bytes": entry.size_bytes,
                    "memory_mib": entry.memory_mib,
                    "base_image": entry.base_image,
                    "created_at": entry.created_at,
                    "description": package.description,
                }
                for version, entry in sorted(package.versions.items())
            ]
    return rows


async def check(runtime: Runtime, target: str, hub: str | None) -> dict[str, Any]:
    """Whether a package would run here, who signed it and how much would be fetched; only its manifest is read."""
    ref = refs.parse(target, hub or runtime.settings.hub_url)
    body, signed = await read_manifest(runtime, ref)
    planned = plan(runtime, body, signed, tag=None, force=True, policy="warn")
    head = planned.manifest.layers[-1]
    runs, why = await _runs_here(runtime, head)
    return {
        "ref": str(ref),
        "tag": head.tag,
        "runs_here": runs,
        "why": why,
        "platform": head.platform,
        "hardware": head.hardware,
        "description": planned.manifest.description,
        "base_image": planned.manifest.base_image,
        "created_at": planned.manifest.created_at,
        "layers": [layer.tag for layer in planned.manifest.layers],
        "trust": planned.verdict.trust,
        "signed_by": list(planned.verdict.signers),
        "total_bytes": sum(blob.stored for blob in planned.manifest.blobs),
        "fetch_bytes": sum(blob.stored for blob in planned.wanted()),
    }


async def _runs_here(runtime: Runtime, head: Snapshot) -> tuple[bool, str]:
    try:
        engine = runtime.engine(head.platform.engine)
        here = await engine.describe()
        engine.check(head.platform, here)
    except (SnapshotIncompatible, BadInput) as error:
        return False, error.message
    return True, f"{here.platform.engine} {here.platform.engine_version}, {here.platform.accelerator}"


async def sign_pack(runtime: Runtime, path: str, key: str) -> dict[str, Any]:
    """Add a signature to a pack file, which is replaced by a rename."""
    return await trio.to_thread.run_sync(_sign, runtime, Path(path).absolute(), key)


def _sign(runtime: Runtime, path: Path, key: str) -> dict[str, Any]:
    staged = path.with_name(f".{path.name[:200]}.part")
    try:
        with open(path, "rb") as source:
            found = packs.read(source)
            document = sign_document(runtime, found.document, key)
            try:
                with open(staged, "wb") as out:
                    packs.resign(source, out, document)
                    out.flush()
                    os.fsync(out.fileno())
                staged.replace(path)
            except BaseException:
                staged.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise BadInput(f"{path} cannot be signed: {error.strerror}") from error
    return {"path": str(path), "signed_by": [one.key for one in signatures.split(document)[1]]}
