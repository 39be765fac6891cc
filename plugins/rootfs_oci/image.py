"""An image as its registry describes it: which layers for this machine, and how its processes run."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from typing import Any

from forkd.plugins.rootfs_oci.registry import INDEXES, MANIFESTS, Registry
from forkd.specs.errors import BuildFailed
from forkd.specs.rootfs import ImageConfig

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MAX_LAYERS = 256
MAX_INDEX_DEPTH = 3
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob that is one layer: what it is packed with, and the digest of what is inside (``diff_id``)."""

    digest: str
    size: int
    packing: str
    diff_id: str


@dataclass(frozen=True, slots=True)
class Image:
    """What to fetch, bottom layer first, and the defaults of its processes."""

    layers: tuple[Layer, ...]
    config: ImageConfig


async def read_image(registry: Registry) -> Image:
    """Follow the reference to the manifest for this machine and read it. Raises BuildFailed."""
    version = registry.reference.version
    for _ in range(MAX_INDEX_DEPTH):
        kind, document = await registry.manifest(version)
        if kind in INDEXES or (kind not in MANIFESTS and "manifests" in document):
            version = _pick(registry, document)
        elif kind in MANIFESTS or "layers" in document:
            return await _read(registry, document)
        else:
            raise BuildFailed(f"{registry.reference} is of an unknown kind: {kind[:100]!r}")
    raise BuildFailed(f"{registry.reference}: indexes point at indexes, more than {MAX_INDEX_DEPTH} deep")


def host_architecture() -> str:
    """This machine in the words of images."""
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def _pick(registry: Registry, index: dict[str, Any]) -> str:
    wanted, seen = host_architecture(), []
    for row in _rows(index.get("manifests"), "the index"):
        where = _table(row.get("platform"), "a platform")
        if where.get("os") == "linux" and where.get("architecture") == wanted:
            return _digest(row)
        seen.append(f"{where.get('os')}/{where.get('architecture')}"[:40])
    there = ", ".join(sorted(set(seen))[:20]) or "none"
    raise BuildFailed(f"{registry.reference} has no image for linux/{wanted}", hint=f"there are: {there}")


async def _read(registry: Registry, manifest: dict[str, Any]) -> Image:
    head = manifest.get("config")
    rows = _rows(manifest.get("layers"), "the manifest")
    if not isinstance(head, dict) or len(rows) > MAX_LAYERS:
        raise BuildFailed(f"{registry.reference}: the manifest has no config, or more than {MAX_LAYERS} layers")
    config = await registry.small_blob(_digest(head), _size(head))
    diff_ids = _table(config.get("rootfs"), "the list of layers").get("diff_ids")
    if not isinstance(diff_ids, list) or len(diff_ids) != len(rows):
        raise BuildFailed(f"{registry.reference}: configuration and manifest disagree about the layers")
    made = config.get("architecture")
    if made and made != host_architecture():
        raise BuildFailed(f"{registry.reference} is for {str(made)[:40]}, this machine is {host_architecture()}")
    layers = [
        Layer(_digest(row), _size(row), _packing(row), _digest({"digest": diff_id}))
        for row, diff_id in zip(rows, diff_ids, strict=True)
    ]
    return Image(tuple(layers), image_config(_table(config.get("config"), "the configuration")))


def image_config(settings: dict[str, Any]) -> ImageConfig:
    """The part of an image's configuration that commands in the guest get as defaults. Raises BuildFailed."""
    env: dict[str, str] = {}
    for line in _strings(settings.get("Env")):
        name, equals, value = line.partition("=")
        if not name or not equals or "\0" in line:
            raise BuildFailed(f"the image's environment has a line that sets nothing: {line[:80]!r}")
        env[name] = value
    workdir, user = settings.get("WorkingDir") or "/", settings.get("User") or "root"
    if not isinstance(workdir, str) or not isinstance(user, str) or "\0" in workdir + user:
        raise BuildFailed("the image's working directory or user is not text")
    workdir = workdir if workdir.startswith("/") else f"/{workdir}"
    command = (*_strings(settings.get("Entrypoint")), *_strings(settings.get("Cmd")))
    return ImageConfig(env=env, workdir=workdir, user=user, command=command)


def _rows(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise BuildFailed(f"{what} has no list of descriptors")
    return value


def _table(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BuildFailed(f"{what} of the image is not a table")
    return value


def _strings(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(row, str) for row in value):
        raise BuildFailed("the image's configuration has something else where a list of strings belongs")
    return value


def _digest(row: dict[str, Any]) -> str:
    digest = row.get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BuildFailed(f"{str(digest)[:80]!r} is no SHA-256 digest")
    return digest


def _size(row: dict[str, Any]) -> int:
    size = row.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 40:
        raise BuildFailed(f"a descriptor says its blob has {str(size)[:40]} bytes")
    return size


def _packing(row: dict[str, Any]) -> str:
    kind = str(row.get("mediaType"))
    for suffix, packing in (("gzip", "gzip"), ("zstd", "zstd"), ("tar", "none")):
        if kind.endswith(suffix):
            return packing
    raise BuildFailed(f"a layer is packed in an unknown way: {kind[:100]!r}")
