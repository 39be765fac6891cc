"""From a request to a parent: find or build its disk and kernel, then boot and capture it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from forkd.network import check_host_tap
from forkd.ops.build import build_rootfs
from forkd.ops.lifecycle import check_pairs
from forkd.ops.setup import kernel_files
from forkd.ops.snapshot import ParentSpec, check_hardware, snapshot_parent
from forkd.ops.volumes import check_ext4, check_volumes, take_in
from forkd.provision import add_kernel
from forkd.runtime import Progress, Runtime
from forkd.specs.errors import BadInput, SnapshotNotFound, TagTaken
from forkd.specs.models import FileRef
from forkd.specs.requests import CreateSnapshot
from forkd.store.snapshots import Stored

MAX_BOOT_WAIT = 60


async def create_parent(runtime: Runtime, request: CreateSnapshot, progress: Progress) -> Stored:
    """Make the snapshot ``request`` describes, or with ``reuse`` take the one of its tag, waiting for its maker."""
    while True:
        try:
            return await _create(runtime, request, progress)
        except TagTaken:
            if not request.reuse:
                raise
        await runtime.snapshots.until_made(request.tag)
        with suppress(SnapshotNotFound):  # its maker failed: it is ours to make
            return runtime.snapshots.load(request.tag)


async def _create(runtime: Runtime, request: CreateSnapshot, progress: Progress) -> Stored:
    """Refuses everything it can before the long work begins."""
    check_pairs("labels", request.labels)
    hardware = check_hardware(request.vcpus, request.mem_size_mib)
    if not 0 <= request.boot_wait_secs <= MAX_BOOT_WAIT:
        raise BadInput(f"boot_wait_secs is {request.boot_wait_secs:g}", hint=f"give 0 to {MAX_BOOT_WAIT}")
    if (request.image is None) == (request.rootfs is None):
        raise BadInput("give either image or rootfs", hint="image: debian:bookworm; rootfs: the path of an ext4 image")
    if runtime.snapshots.path(request.tag).exists():
        raise TagTaken(
            f"snapshot {request.tag!r} exists already", hint=f"pick another tag, or remove it: forkd rmi {request.tag}"
        )
    if request.rootfs is not None:
        check_ext4(Path(request.rootfs), "rootfs", "forkd parent build makes one of an image or a directory")
    check_volumes(request.volumes)
    if request.tap is not None:
        check_host_tap(request.tap)
    if request.kernel is not None:
        initrd = Path(request.initrd) if request.initrd is not None else None
        kernel = await add_kernel(runtime.settings.data_dir, Path(request.kernel), initrd, progress)
    else:
        kernel = await kernel_files(runtime, progress)
    spec = ParentSpec(
        tag=request.tag,
        kernel=kernel,
        rootfs=await _rootfs(runtime, request, progress),
        hardware=hardware,
        image=request.image,
        warmup=tuple(request.warmup),
        settle=request.boot_wait_secs,
        labels=request.labels,
        volumes=await take_in(runtime, request.volumes, progress),
        tap=request.tap,
    )
    return await snapshot_parent(runtime, spec, progress)


async def _rootfs(runtime: Runtime, request: CreateSnapshot, progress: Progress) -> FileRef:
    if request.rootfs is not None:
        progress("taking in the rootfs", None)
        return await runtime.disks.add(Path(request.rootfs))
    assert request.image is not None
    return (await build_rootfs(runtime, request.image, tuple(request.extras), request.size_mib, progress)).ref
