"""Build a rootfs: from an image reference to a read-only disk of the store."""

from __future__ import annotations

from pathlib import Path

import trio

from forkd import diskimage, furnish
from forkd.runtime import Progress, Runtime
from forkd.specs.errors import BadInput
from forkd.specs.models import FileRef
from forkd.specs.rootfs import ImageRequest
from forkd.store.digests import sparse256_file
from forkd.store.disks import Disk
from forkd.store.files import remove_tree

DEFAULT_SIZE_MIB = 1536
MAX_SIZE_MIB = 256 * 1024
DISK_FORMAT = "ext4-1"


async def build_rootfs(
    runtime: Runtime, image: str, extras: tuple[str, ...], size_mib: int, progress: Progress
) -> Disk:
    """The disk of ``image`` with ``extras``, built unless it is there. Raises BadInput, BuildFailed, NoSpace."""
    if not 16 <= size_mib <= MAX_SIZE_MIB:
        raise BadInput(f"a rootfs of {size_mib} MiB is not possible", hint=f"give 16 to {MAX_SIZE_MIB}")
    builder = runtime.plugins.rootfs_builder(image)
    request = ImageRequest(image, extras)
    key = f"{builder.name}|{await builder.content_key(request)}|{size_mib}|{DISK_FORMAT}"
    if (disk := runtime.disks.built(key)) is not None:
        return disk

    async def make(work: Path, out: Path) -> Disk:
        tree = work / "tree"
        tree.mkdir()
        config = await builder.build(request, tree, progress)
        await furnish.furnish(tree, config, runtime.settings.data_dir, progress)
        progress("writing the disk image", None)
        await diskimage.make_ext4(tree, out, size_mib, label="forkd-rootfs")
        await trio.to_thread.run_sync(remove_tree, tree)
        progress("digesting the disk image", None)
        digest = await trio.to_thread.run_sync(sparse256_file, out)
        ref = FileRef(digest=digest, size=out.stat().st_size)
        return Disk(ref=ref, image=image, env=config.env, workdir=config.workdir, user=config.user)

    return await runtime.disks.build(key, make)
