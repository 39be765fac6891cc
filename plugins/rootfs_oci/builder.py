"""Builds a root file system from an image in a registry."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import IO

import trio

from forkd.plugins.rootfs_oci.image import Image, host_architecture, read_image
from forkd.plugins.rootfs_oci.layers import Limits, Unpacker
from forkd.plugins.rootfs_oci.reference import Reference, parse_reference, require_reference
from forkd.plugins.rootfs_oci.registry import Registry
from forkd.specs.errors import BadInput, BuildFailed, ForkdError
from forkd.specs.rootfs import ImageConfig, ImageRequest, Progress

VERSION = "1"
AT_ONCE = 3


class OciBuilder:
    """``oci://HOST/NAME:TAG``, ``docker://…``, or a bare name that no other builder knows (``python:3.12-slim``)."""

    name = "oci"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()

    def accepts(self, reference: str) -> bool:
        """Whatever can be an image's name."""
        return parse_reference(reference) is not None

    async def content_key(self, request: ImageRequest) -> str:
        """The digest of every layer, asked of the registry; a reference with a digest needs no asking."""
        reference = _reference(request)
        if reference.pinned:
            return f"{VERSION} {host_architecture()} {reference.version}"
        async with Registry(reference) as registry:
            image = await read_image(registry)
        return f"{VERSION} {image.config} {[layer.diff_id for layer in image.layers]}"

    async def build(self, request: ImageRequest, target: Path, progress: Progress) -> ImageConfig:
        """Fetch all layers, a few at a time, each checked before any of it is unpacked; apply them in order."""
        reference = _reference(request)
        async with Registry(reference) as registry:
            progress(f"asking for {reference}", None)
            image = await read_image(registry)
            if sum(layer.size for layer in image.layers) > self._limits.unpacked:
                raise BuildFailed(f"{reference} has layers of more than {self._limits.unpacked >> 20} MiB")
            blobs = [_nameless(target.parent) for _ in image.layers]
            try:
                await _fetch_all(registry, image, blobs, progress)
                unpacker = Unpacker(target, self._limits)
                for number, (layer, blob) in enumerate(zip(image.layers, blobs, strict=True), 1):
                    progress(f"unpacking layer {number} of {len(blobs)}", None)
                    name = layer.digest.removeprefix("sha256:")[:12]
                    apply = partial(unpacker.apply, blob, layer.packing, layer.diff_id, name)
                    await trio.to_thread.run_sync(apply)
                    blob.close()
                await trio.to_thread.run_sync(unpacker.finish)
            finally:
                for blob in blobs:
                    blob.close()
        return image.config


async def _fetch_all(registry: Registry, image: Image, blobs: list[IO[bytes]], progress: Progress) -> None:
    total = sum(layer.size for layer in image.layers) or 1
    done, slots, failures = 0, trio.Semaphore(AT_ONCE), list[ForkdError]()

    async def fetch(index: int) -> None:
        nonlocal done
        layer = image.layers[index]
        try:
            async with slots:
                await registry.fetch_blob(layer.digest, layer.size, blobs[index])
        except ForkdError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()
            return
        done += layer.size
        progress(f"fetching {registry.reference}", done / total)

    progress(f"fetching {registry.reference}", 0.0)
    async with trio.open_nursery() as nursery:
        for index in range(len(blobs)):
            nursery.start_soon(fetch, index)
    if failures:
        raise failures[0]


def _nameless(folder: Path) -> IO[bytes]:
    """A file without a name: whatever happens, nothing of it is left."""
    return tempfile.TemporaryFile(dir=folder)


def _reference(request: ImageRequest) -> Reference:
    if request.extras:
        hint = "add them in a recipe: forkd build"
        raise BadInput("an image from a registry takes no extra packages", hint=hint)
    return require_reference(request.reference)
