"""``manifest.toml``: written the same for the same snapshot, and believed only after everything in it is checked."""

from __future__ import annotations

import itertools
import re
import tomllib
from datetime import UTC, datetime
from typing import Any

import msgspec
import tomli_w

from forkd.specs.errors import BadTag, PackError
from forkd.specs.models import SNAPSHOT_FORMAT, Snapshot
from forkd.specs.packs import (
    MAX_BLOB,
    MAX_DISK,
    MAX_LAYERS,
    MAX_MANIFEST,
    MAX_RATIO,
    MAX_VMSTATE,
    PACK_VERSION,
    RATIO_SLACK,
    Blob,
    PackManifest,
)
from forkd.specs.tags import check_tag

MAX_TEXT = 4096
MAX_RAM = 1 << 40
MAX_NUMBER = 1 << 53
MAX_DOTS = 32
DIGEST_KINDS = {"vmstate": ("sha256",), "image": ("sparse256",), "delta": ("delta256",), "rootfs": ("sparse256",)}
_DIGEST = re.compile(r"(sha256|sparse256|delta256):[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]{64}")
_INDEX_ENTRY = 16
_STRING = re.compile(rb'"""|\'\'\'|"(?:[^"\\]+|\\.?)*"?|\'[^\']*\'?')


def make(layers: list[Snapshot], blobs: list[Blob], description: str, base_image: str) -> PackManifest:
    """The manifest of a chain, root first. Only what the snapshot itself holds goes in: no time, host or source."""
    head = layers[-1]
    created = datetime.fromtimestamp(head.created_at_unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return PackManifest(
        forkd_pack_version=PACK_VERSION,
        tag=head.tag,
        created_at=created,
        forkd_version=head.forkd_version,
        description=description,
        base_image=base_image or head.image or "",
        layers=[msgspec.structs.replace(layer, source=None) for layer in layers],
        blobs=blobs,
    )


def encode(manifest: PackManifest) -> bytes:
    """The manifest as TOML. Raises PackError if it breaks its own rules."""
    body = tomli_w.dumps(_without_none(msgspec.to_builtins(manifest))).encode()
    if decode(body) != manifest:
        raise PackError("the manifest does not survive being written")
    return body


def decode(body: bytes) -> PackManifest:
    """Parse and check a manifest without its signatures. Raises PackError saying what is wrong with it."""
    if len(body) > MAX_MANIFEST:
        raise PackError(f"the manifest has {len(body)} bytes; {MAX_MANIFEST} are allowed")
    _check_text(body)
    try:
        table = tomllib.loads(body.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise PackError(f"the manifest is not TOML: {str(error)[:200]}") from error
    version = table.get("forkd_pack_version")
    if version != PACK_VERSION or isinstance(version, bool):
        hint = (
            "use a newer forkd" if isinstance(version, int) and version > PACK_VERSION else "pack it again with forkd"
        )
        raise PackError(f"the pack has format {str(version)[:20]}; this forkd reads {PACK_VERSION}", hint=hint)
    try:
        manifest = msgspec.convert(table, PackManifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PackError(f"the manifest does not fit: {str(error)[:300]}") from error
    _check_values(table)
    _check_chain(manifest)
    _check_blobs(manifest)
    return manifest


def files_of(layer: Snapshot) -> list[tuple[str, str, int]]:
    """``(kind, digest, size)`` of each file a layer is made of; disks are last, of whatever use ``rootfs`` by kind."""
    return [
        ("vmstate", layer.vmstate.digest, layer.vmstate.size),
        ("memory", layer.memory.digest, layer.memory.size),
        *(("rootfs", disk.digest, disk.size) for disk in layer.disks()),
    ]


def _check_text(body: bytes) -> None:
    """Refuse what would keep the TOML parser busy: it takes time and memory by the square of a dotted key's length.

    A key is on one line and its dots are outside of strings. Strings of several lines, which forkd never writes, are
    refused: without them each line can be read by itself.
    """
    for line in body.split(b"\n"):
        strings = _STRING.findall(line)
        if b'"""' in strings or b"'''" in strings:
            raise PackError("the manifest is not TOML as forkd writes it: it has a text of several lines")
        if _STRING.sub(b"", line).count(b".") > MAX_DOTS:
            raise PackError(f"the manifest has a key of more than {MAX_DOTS} parts")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_none(entry) for entry in value]
    return value


def _check_values(value: Any) -> None:
    """Text reaches terminals and numbers are computed with: no control characters, nothing negative, huge or NaN."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT or any(not char.isprintable() for char in value):
            raise PackError("the manifest has a text with control characters, or one that is too long")
    elif isinstance(value, int | float):
        if not 0 <= value <= MAX_NUMBER:  # false for NaN too
            raise PackError("the manifest has a number that is negative, too large or none")
    elif isinstance(value, dict):
        for key, entry in value.items():
            _check_values(key)
            _check_values(entry)
    elif isinstance(value, list):
        for entry in value:
            _check_values(entry)
    else:
        raise PackError("the manifest has a value of a kind it must not have")


def _check_chain(manifest: PackManifest) -> None:
    layers = manifest.layers
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise PackError(f"the pack has {len(layers)} layers; 1 to {MAX_LAYERS} are allowed")
    for layer in layers:
        _check_layer(layer)
    if layers[0].parent is not None:
        raise PackError(f"the pack's first layer builds on {layers[0].parent.tag!r}, which is not in it")
    for before, layer in itertools.pairwise(layers):
        if layer.parent is None or (layer.parent.tag, layer.parent.content) != (before.tag, before.content):
            raise PackError(f"layer {layer.tag!r} does not build on the layer before it, {before.tag!r}")
        if layer.hardware.mem_mib != before.hardware.mem_mib:
            raise PackError(f"layer {layer.tag!r} has other RAM than the layer before it")
    for what, names in (("tag", [layer.tag for layer in layers]), ("content", [layer.content for layer in layers])):
        if len(set(names)) < len(names):
            raise PackError(f"two layers of the pack have the same {what}: the chain is a circle")
    if manifest.tag != layers[-1].tag:
        raise PackError(f"the pack is of {manifest.tag!r}, but its last layer is {layers[-1].tag!r}")


def _check_layer(layer: Snapshot) -> None:
    try:
        check_tag(layer.tag)
    except BadTag as error:
        raise PackError(f"a layer has the {error.message}") from error
    if layer.format != SNAPSHOT_FORMAT:
        raise PackError(f"layer {layer.tag!r} has snapshot format {layer.format}; this forkd reads {SNAPSHOT_FORMAT}")
    if layer.source is not None:
        raise PackError(f"layer {layer.tag!r} says where it was pulled from; a pack must not")
    if not _DIGEST.fullmatch(layer.content) or not layer.content.startswith("sha256:"):
        raise PackError(f"layer {layer.tag!r} has no proper content id")
    if layer.memory.kind != ("delta" if layer.parent else "image"):
        raise PackError(f"layer {layer.tag!r}: a delta needs a parent and an image has none")
    ram = layer.hardware.mem_mib << 20
    if not 0 < ram <= MAX_RAM:
        raise PackError(f"layer {layer.tag!r} has {layer.hardware.mem_mib} MiB of RAM")
    if layer.memory.kind == "image" and layer.memory.size != ram:
        raise PackError(f"the memory image of layer {layer.tag!r} is not as large as its RAM")
    limits = {"vmstate": MAX_VMSTATE, "memory": ram + 4096 + ram // 4096 * _INDEX_ENTRY, "rootfs": MAX_DISK}
    for kind, digest, size in files_of(layer):
        kinds = DIGEST_KINDS[layer.memory.kind if kind == "memory" else kind]
        if not _DIGEST.fullmatch(digest) or digest.partition(":")[0] not in kinds:
            raise PackError(f"layer {layer.tag!r}: {kind} has no proper digest")
        if not 0 < size <= limits[kind]:
            raise PackError(f"layer {layer.tag!r}: {kind} has {size} bytes; 1 to {limits[kind]} are allowed")


def _check_blobs(manifest: PackManifest) -> None:
    wanted = {(kind, digest, size) for layer in manifest.layers for kind, digest, size in files_of(layer)}
    given = [(blob.kind, blob.digest, blob.size) for blob in manifest.blobs]
    if len(set(given)) < len(given) or len({blob.sha256 for blob in manifest.blobs}) < len(given):
        raise PackError("the manifest has a blob twice")
    if missing := wanted - set(given):
        raise PackError(f"the manifest has no blob for {min(missing)[0]} {min(missing)[1][:24]}…")
    if extra := set(given) - wanted:
        raise PackError(f"the manifest has a blob that no layer needs: {min(extra)[1][:24]}…")
    for blob in manifest.blobs:
        name = f"blob {blob.sha256[:12]!r}"
        if not _HEX.fullmatch(blob.sha256):
            raise PackError(f"{name} has no proper SHA-256")
        if not 0 < blob.stored <= MAX_BLOB or blob.stream <= 0:
            raise PackError(f"{name} has {blob.stored} bytes that become {blob.stream}")
        if blob.sparse != blob.digest.startswith("sparse256:") or (not blob.sparse and blob.stream != blob.size):
            raise PackError(f"{name} does not say rightly whether it is sparse, or how long")
        if blob.stream > blob.stored * MAX_RATIO + RATIO_SLACK:
            raise PackError(f"{name} would grow from {blob.stored} to {blob.stream} bytes")
        if blob.stream > 2 * blob.size + RATIO_SLACK:
            raise PackError(f"{name} holds more than the file it is for")
