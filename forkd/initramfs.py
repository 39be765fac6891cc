"""Writes the guest's initramfs: a deterministic cpio archive of busybox, kernel modules and the guest files."""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

REQUIRED_MODULES = ("virtio_mmio", "virtio_blk", "virtio_console", "ext4", "overlay")
"""What every guest needs, in load order; what they depend on comes before them, what is built in is left out."""

OPTIONAL_MODULES = ("virtio_net",)
"""Loaded when the kernel has them."""

VSOCK_MODULES = ("vmw_vsock_virtio_transport",)
"""Carried when the kernel has them, loaded only with ``forkd.vsock`` on the command line: loading costs boot time."""

APPLETS = ("sh", "cp", "insmod", "mkdir", "mount", "reboot", "switch_root", "umount")

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of the archive; ``mode`` carries the file type, ``data`` a file's bytes or a symlink's target."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules a kernel gives a guest: contents by name, and the orders to load them in."""

    contents: Mapping[str, bytes]
    order: tuple[str, ...]
    vsock_order: tuple[str, ...]


def directory(path: str) -> Entry:
    return Entry(path, stat.S_IFDIR | 0o755)


def regular(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data)


def symlink(path: str, target: str) -> Entry:
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def write_cpio(entries: Iterable[Entry]) -> bytes:
    """The entries, in their order, as a ``newc`` archive. The same entries give the same bytes: no times, no owners."""
    out = bytearray()
    for inode, entry in enumerate((*entries, Entry(_TRAILER, 0)), start=1):
        name = entry.path.encode() + b"\0"
        links = 2 if stat.S_ISDIR(entry.mode) else 1
        fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
        out += _MAGIC + b"".join(b"%08X" % value for value in fields)
        for part in (name, entry.data):
            out += part
            out += bytes(-len(out) % 4)
    out += bytes(-len(out) % 512)
    return bytes(out)


def build_initramfs(init: bytes, busybox: bytes, modules: Modules, guest_files: Mapping[str, bytes]) -> bytes:
    """The whole initramfs. ``guest_files`` (name to contents) become ``/usr/lib/forkd/`` of every guest."""
    entries = [directory(name) for name in ("bin", "dev", "forkd", "lower", "modules", "newroot", "proc", "rw")]
    entries.append(Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)))
    entries.append(regular("init", init, 0o755))
    entries.append(regular("bin/busybox", busybox, 0o755))
    entries += [symlink(f"bin/{name}", "busybox") for name in APPLETS]
    entries += [regular(f"modules/{name}.ko", data) for name, data in sorted(modules.contents.items())]
    entries.append(regular("modules.list", _lines(modules.order)))
    entries.append(regular("modules-vsock.list", _lines(modules.vsock_order)))
    entries += [regular(f"forkd/{name}", data, 0o755) for name, data in sorted(guest_files.items())]
    return write_cpio(entries)


def load_order(wanted: Sequence[str], depends: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """``wanted`` with everything they depend on before them, each once. Names outside ``depends`` are built in."""
    order: list[str] = []
    visiting: set[str] = set()

    def visit(name: str) -> None:
        if name in order or name not in depends:
            return
        if name in visiting:
            raise ValueError(f"kernel module {name} depends on itself")
        visiting.add(name)
        for needed in depends[name]:
            visit(needed)
        order.append(name)

    for name in wanted:
        visit(name)
    return tuple(order)


def module_depends(module: bytes) -> tuple[str, ...]:
    """The modules a ``.ko`` file says it needs. Raises ValueError for bytes that are no 64-bit kernel module."""
    for line in _elf_section(module, b".modinfo").split(b"\0"):
        key, _, value = line.partition(b"=")
        if key == b"depends":
            return tuple(module_name(name) for name in value.decode("ascii").split(",") if name)
    return ()


def module_name(file_name: str) -> str:
    """``virtio-rng.ko.xz`` to ``virtio_rng``: the kernel's own spelling."""
    return file_name.split(".ko", 1)[0].replace("-", "_")


def _lines(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _elf_section(elf: bytes, wanted: bytes) -> bytes:
    try:
        if elf[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
        headers = [struct.unpack_from("<II2Q2Q", elf, table + index * size) for index in range(count)]
        names_offset = headers[names_index][4]
        for name, _type, _flags, _address, offset, length in headers:
            start = names_offset + name
            if elf[start : elf.index(b"\0", start)] == wanted:
                return elf[offset : offset + length]
    except (struct.error, IndexError) as error:
        raise ValueError("truncated ELF file") from error
    raise ValueError(f"no {wanted.decode()} section")
