"""Guest kernels on disk: one directory each, put there by a rename, with an initramfs per state of the guest files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forkd.initramfs import Modules, build_initramfs
from forkd.specs.errors import HostNotReady
from forkd.vmlinux import extract_vmlinux, has_pvh_entry

GUEST_FILES = ("init", "agent.py")
"""Of the guest directory: what becomes ``/usr/lib/forkd/`` in every guest."""
DEFAULT = "default"
"""The link that names the kernel used where none is asked for."""

_FORMAT = 1
_RECORD = "kernel.json"


@dataclass(frozen=True, slots=True)
class CachedKernel:
    """One kernel's directory: ``vmlinuz``, perhaps ``vmlinux``, and ``initrd.img`` or the parts of ours."""

    directory: Path
    version: str
    digest: str
    order: tuple[str, ...]
    vsock_order: tuple[str, ...]

    @property
    def vmlinuz(self) -> Path:
        return self.directory / "vmlinuz"

    @property
    def vmlinux(self) -> Path | None:
        """The kernel as an ELF file that VMMs start directly, where it is one."""
        path = self.directory / "vmlinux"
        return path if path.exists() else None

    @property
    def given_initrd(self) -> Path | None:
        """The initramfs the user gave with the kernel, to be used as it is."""
        path = self.directory / "initrd.img"
        return path if path.exists() else None

    def initramfs(self, guest_dir: Path) -> tuple[str, bytes]:
        """File name and contents of our initramfs with the guest files as they are now. Blocks for some 20 ms."""
        names = (*self.order, *self.vsock_order)
        contents = {name: (self.directory / "modules" / f"{name}.ko").read_bytes() for name in names}
        image = build_initramfs(
            _guest_file(guest_dir, "initramfs-init"),
            (self.directory / "busybox").read_bytes(),
            Modules(contents, self.order, self.vsock_order),
            {name: _guest_file(guest_dir, name) for name in GUEST_FILES},
        )
        return f"initrd-{hashlib.sha256(image).hexdigest()[:12]}.img", image


def read_cached(directory: Path) -> CachedKernel | None:
    """The kernel in ``directory``, or None where there is none, or one that is not whole."""
    directory = directory.resolve()
    try:
        record = json.loads((directory / _RECORD).read_bytes())
        if record["format"] != _FORMAT:
            return None
        for name, size in record["files"].items():
            if (directory / name).stat().st_size != size:
                return None
        return CachedKernel(
            directory, record["version"], record["digest"], tuple(record["modules"]), tuple(record["vsock_modules"])
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def stage_kernel(
    directory: Path,
    image: bytes,
    version: str,
    *,
    modules: Modules | None = None,
    busybox: bytes | None = None,
    initrd: bytes | None = None,
) -> None:
    """Write a kernel's files into the new directory ``directory``, its record last. Blocks for seconds."""
    files: dict[str, bytes] = {"vmlinuz": image}
    try:
        vmlinux = extract_vmlinux(image)
    except ValueError:
        vmlinux = b""  # packed in a way we do not know: it boots as the bzImage it is
    if has_pvh_entry(vmlinux):
        files["vmlinux"] = vmlinux
    if busybox is not None:
        files["busybox"] = busybox
    if initrd is not None:
        files["initrd.img"] = initrd
    modules = modules or Modules({}, (), ())
    files |= {f"modules/{name}.ko": data for name, data in modules.contents.items()}
    record: Mapping[str, object] = {
        "format": _FORMAT,
        "version": version,
        "digest": "sha256:" + hashlib.sha256(image).hexdigest(),
        "modules": modules.order,
        "vsock_modules": modules.vsock_order,
        "files": {name: len(data) for name, data in files.items()},
    }
    (directory / "modules").mkdir(parents=True)
    for name, data in files.items():
        write_durably(directory / name, data)
    write_durably(directory / _RECORD, json.dumps(record, indent=1).encode())
    for path in (directory / "modules", directory):
        sync_directory(path)


def publish_kernel(kernels: Path, staging: Path, staged: Path, name: str) -> None:
    """Give the staged kernel its place. The caller holds the lock, so what stands there is not whole and may go."""
    target = kernels / name
    if target.exists():
        target.rename(staging / "broken")
    staged.rename(target)
    sync_directory(kernels)


def make_default(kernels: Path, staging: Path, name: str) -> None:
    """Make ``name`` the kernel used where none is asked for."""
    link = staging / DEFAULT
    link.symlink_to(name)
    link.replace(kernels / DEFAULT)
    sync_directory(kernels)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the directory's names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _guest_file(guest_dir: Path, name: str) -> bytes:
    try:
        return (guest_dir / name).read_bytes()
    except OSError as error:
        raise HostNotReady(
            f"forkd's own file {guest_dir / name} cannot be read: {error.strerror}", hint="install forkd again"
        ) from error
