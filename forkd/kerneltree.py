"""Picks out of an unpacked kernel package what a guest needs: the kernel image and the modules of its devices."""

from __future__ import annotations

import gzip
import lzma
import zlib
from dataclasses import dataclass
from pathlib import Path

import zstandard

from forkd.initramfs import (
    OPTIONAL_MODULES,
    REQUIRED_MODULES,
    VSOCK_MODULES,
    Modules,
    load_order,
    module_depends,
    module_name,
)
from forkd.specs.errors import HostNotReady


@dataclass(frozen=True, slots=True)
class KernelTree:
    """A kernel as its package has it."""

    version: str
    vmlinuz: Path
    modules: Modules


def read_kernel_tree(tree: Path) -> KernelTree:
    """Find the kernel under ``tree`` and its modules. Blocks. Raises HostNotReady for a package of another shape."""
    kernels = sorted(tree.glob("boot/vmlinuz-*"))
    if len(kernels) != 1:
        raise HostNotReady(f"the kernel package has {len(kernels)} files boot/vmlinuz-*, not one")
    version = kernels[0].name.removeprefix("vmlinuz-")
    for directory in (tree / "lib/modules" / version, tree / "usr/lib/modules" / version):
        if directory.is_dir():
            return KernelTree(version, kernels[0], read_modules(directory))
    raise HostNotReady(f"the kernel package has no modules of {version}")


def read_modules(directory: Path) -> Modules:
    """The modules a guest loads, and their order, from a ``lib/modules/VERSION`` directory.

    The order comes from the modules themselves: ``modules.dep`` is made at installation, which never happens here.
    """
    files = {module_name(path.name): path for path in sorted(directory.glob("kernel/**/*.ko*"))}
    built_in = {module_name(Path(line).name) for line in (directory / "modules.builtin").read_text().splitlines()}
    for name in REQUIRED_MODULES:
        if name not in files and name not in built_in:
            raise HostNotReady(f"the kernel {directory.name} has no {name}, without which no guest boots")

    contents: dict[str, bytes] = {}
    depends: dict[str, tuple[str, ...]] = {}
    pending = [*REQUIRED_MODULES, *OPTIONAL_MODULES, *VSOCK_MODULES]
    while pending:
        name = pending.pop()
        if name in contents or name not in files:
            continue
        try:
            contents[name] = _read_module(files[name])
            depends[name] = module_depends(contents[name])
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise HostNotReady(f"the kernel module {files[name].name} is damaged: {error}") from error
        pending += depends[name]

    order = load_order((*REQUIRED_MODULES, *OPTIONAL_MODULES), depends)
    vsock_order = tuple(name for name in load_order(VSOCK_MODULES, depends) if name not in order)
    return Modules(contents, order, vsock_order)


def _read_module(path: Path) -> bytes:
    """A module's bytes, decompressed: busybox's insmod takes only plain ones."""
    data = path.read_bytes()
    match path.suffix:
        case ".ko":
            return data
        case ".xz":
            return lzma.decompress(data)
        case ".gz":
            return gzip.decompress(data)
        case ".zst":
            return zstandard.ZstdDecompressor().decompressobj().decompress(data)
        case other:
            raise ValueError(f"unknown compression {other}")
