"""The guest kernel and its initramfs: fetched or given once, kept in the cache, never installed on the host."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from forkd import aptfetch
from forkd.kernelcache import (
    DEFAULT,
    make_default,
    publish_kernel,
    read_cached,
    stage_kernel,
    sync_directory,
    write_durably,
)
from forkd.kerneltree import read_kernel_tree
from forkd.linux.filelock import file_lock
from forkd.specs.errors import BadInput, HostNotReady, KernelMissing, NoSpace
from forkd.specs.rootfs import Progress
from forkd.vmlinux import ELF_MAGIC, is_bzimage, kernel_release

KERNEL_PACKAGE = "linux-image-cloud-amd64"
KERNEL_PATTERN = r"linux-image-\d\S*-cloud-amd64"
BUSYBOX_PACKAGE = "busybox-static"
GUEST_DIR = Path(__file__).parent / "guest"


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """A guest kernel ready to boot. ``digest`` is of ``vmlinuz``: the file as its packager or the user gave it."""

    vmlinuz: Path
    vmlinux: Path | None
    initrd: Path
    version: str
    digest: str

    @property
    def kernel(self) -> Path:
        """The file to boot from: the ELF kernel, with nothing to decompress in the guest, where there is one."""
        return self.vmlinux or self.vmlinuz


async def find_kernel(cache: Path, *, guest_dir: Path = GUEST_DIR) -> KernelFiles:
    """The cached default kernel, with an initramfs that carries the guest files as they are now.

    Runs no other program and takes milliseconds. Raises KernelMissing, with the command that helps.
    """
    found = await _open(cache, DEFAULT, guest_dir)
    if found is None:
        raise KernelMissing(f"there is no guest kernel in {cache / 'kernels'}", hint="run `forkd setup`")
    return found


async def ensure_kernel(cache: Path, progress: Progress, *, guest_dir: Path = GUEST_DIR) -> KernelFiles:
    """The cached default kernel; where there is none yet, Debian's cloud kernel, fetched by package name.

    Safe for concurrent use by several processes and after a crash at any point: the kernel's directory appears whole,
    by a rename. Raises HostNotReady or ToolMissing with what to do, NoSpace for a full disk.
    """
    found = await _open(cache, DEFAULT, guest_dir)
    if found is not None:
        return found
    async with _staging(cache) as staging:
        if read_cached(cache / "kernels" / DEFAULT) is None:  # another process may have been quicker
            progress("looking for the guest kernel", None)
            package = await aptfetch.resolve_dependency(KERNEL_PACKAGE, KERNEL_PATTERN)
            tree = await _fetch([package, BUSYBOX_PACKAGE], staging, progress)
            await trio.to_thread.run_sync(_take_package, cache / "kernels", staging, tree)
    return await find_kernel(cache, guest_dir=guest_dir)


async def add_kernel(
    cache: Path,
    kernel: Path,
    initrd: Path | None,
    progress: Progress,
    *,
    default: bool = False,
    guest_dir: Path = GUEST_DIR,
) -> KernelFiles:
    """Take a kernel of the user's (bzImage or ELF) into the cache; ``default`` makes it what ``find_kernel`` returns.

    Without ``initrd`` it gets our initramfs with no modules, so virtio-mmio, -blk and -console, ext4 and overlay must
    be built in. An ``initrd`` given is used as it is. Raises BadInput for files that are no kernel or cannot be read.
    """
    image = await trio.to_thread.run_sync(_read_kernel, kernel)
    given = None if initrd is None else await trio.to_thread.run_sync(_read_given, initrd)
    content = hashlib.sha256(image + (given or b"")).hexdigest()
    version = kernel_release(image) or "unknown"
    name = f"{version}-{content[:12]}"
    kernels = cache / "kernels"
    found = await _open(cache, name, guest_dir)
    if found is not None and not default:
        return found
    async with _staging(cache) as staging:
        if read_cached(kernels / name) is None:
            busybox = None
            if given is None:
                busybox = _busybox(await _fetch([BUSYBOX_PACKAGE], staging, progress))
            stage = partial(stage_kernel, staging / "kernel", image, version, busybox=busybox, initrd=given)
            await trio.to_thread.run_sync(stage)
            publish_kernel(kernels, staging, staging / "kernel", name)
        if default:
            make_default(kernels, staging, name)
    found = await _open(cache, name, guest_dir)
    assert found is not None
    return found


async def _open(cache: Path, name: str, guest_dir: Path) -> KernelFiles | None:
    """A cached kernel by directory name, its initramfs written if these guest files are new to it."""
    kernel = await trio.to_thread.run_sync(read_cached, cache / "kernels" / name)
    if kernel is None:
        return None
    initrd = kernel.given_initrd
    if initrd is None:
        file_name, image = await trio.to_thread.run_sync(kernel.initramfs, guest_dir)
        initrd = kernel.directory / file_name
        if not initrd.exists():
            async with _staging(cache) as staging:
                write_durably(staging / file_name, image)
                (staging / file_name).replace(initrd)
                sync_directory(kernel.directory)
    return KernelFiles(kernel.vmlinuz, kernel.vmlinux, initrd, kernel.version, kernel.digest)


async def _fetch(packages: Sequence[str], staging: Path, progress: Progress) -> Path:
    """Fetch and unpack packages; returns the directory with their files."""
    archives, tree = staging / "archives", staging / "tree"
    archives.mkdir()
    tree.mkdir()
    await aptfetch.download(packages, archives, progress)
    progress("unpacking the guest kernel", None)
    await aptfetch.unpack(_files(archives), tree)
    return tree


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def _take_package(kernels: Path, staging: Path, tree: Path) -> None:
    package = read_kernel_tree(tree)
    image = package.vmlinuz.read_bytes()
    stage_kernel(staging / "kernel", image, package.version, modules=package.modules, busybox=_busybox(tree))
    publish_kernel(kernels, staging, staging / "kernel", package.version)
    make_default(kernels, staging, package.version)


def _busybox(tree: Path) -> bytes:
    for path in (tree / "bin/busybox", tree / "usr/bin/busybox"):
        if path.is_file():
            return path.read_bytes()
    raise HostNotReady(f"the package {BUSYBOX_PACKAGE} has no bin/busybox")


def _read_kernel(path: Path) -> bytes:
    image = _read_given(path)
    if not (is_bzimage(image[:0x250]) or image.startswith(ELF_MAGIC)):
        raise BadInput(f"{path} is no Linux kernel: neither a bzImage nor an ELF file")
    return image


def _read_given(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error


@asynccontextmanager
async def _staging(cache: Path) -> AsyncIterator[Path]:
    """A directory beside the kernels, gone afterwards, under the cache's lock; clears what a crash has left."""
    kernels = cache / "kernels"
    try:
        kernels.mkdir(parents=True, exist_ok=True)
        async with file_lock(kernels / ".lock"):
            for leftover in kernels.glob(".staging-*"):
                shutil.rmtree(leftover)
            staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=kernels))
            try:
                yield staging
            finally:
                shutil.rmtree(staging)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"no space left for the guest kernel in {kernels}", path=str(kernels)) from error
        raise HostNotReady(f"cannot keep the guest kernel in {kernels}: {error}") from error
