"""Reads kernel images, and takes the ELF ``vmlinux`` out of a bzImage: VMMs start it sooner, some start only it."""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable

import zstandard

ELF_MAGIC = b"\x7fELF"
MAX_VMLINUX = 1 << 30

_PT_NOTE = 4
_XEN_PHYS32_ENTRY = 18


def is_bzimage(head: bytes) -> bool:
    """Whether a file that starts with these bytes (at least 0x250) is a Linux bzImage."""
    return head[0x1FE:0x200] == b"\x55\xaa" and head[0x202:0x206] == b"HdrS"


def extract_vmlinux(bzimage: bytes) -> bytes:
    """The uncompressed kernel inside a bzImage (an ELF file is returned as it is).

    Takes seconds for an LZ4 payload (decoded in Python): call it from a thread. Raises ValueError, saying why.
    """
    if bzimage[:4] == ELF_MAGIC:
        return bzimage
    if not is_bzimage(bzimage[:0x250]):
        raise ValueError("not a bzImage: no HdrS magic")
    # The boot protocol (Documentation/arch/x86/boot.rst): setup_sects, version, payload_offset, payload_length.
    (setup_sectors,) = struct.unpack_from("<B", bzimage, 0x1F1)
    (version,) = struct.unpack_from("<H", bzimage, 0x206)
    if version < 0x0208:
        raise ValueError(f"boot protocol {version >> 8}.{version & 255:02d} does not say where the payload is")
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = ((setup_sectors or 4) + 1) * 512 + offset
    payload = bzimage[start : start + length]
    if len(payload) < length or length < 8:
        raise ValueError("the bzImage is truncated")
    # The kernel's build appends the uncompressed size to every payload; gzip has it as its own last field.
    (size,) = struct.unpack_from("<I", payload, length - 4)
    if size > MAX_VMLINUX:
        raise ValueError(f"the payload claims {size} bytes")
    vmlinux = _decompress(payload, size)
    if vmlinux[:4] != ELF_MAGIC:
        raise ValueError("the payload is not an ELF file")
    return vmlinux


def kernel_release(image: bytes) -> str | None:
    """What ``uname -r`` says in a guest of this bzImage or ELF kernel, or None where it does not tell."""
    if is_bzimage(image[:0x250]):
        (offset,) = struct.unpack_from("<H", image, 0x20E)
        found = re.match(rb"([\w.+~-]{1,64})[ \0]", image[0x200 + offset : 0x300 + offset]) if offset else None
    else:
        found = re.search(rb"Linux version ([\w.+~-]{1,64}) ", image)
    return found[1].decode("ascii") if found else None


def has_pvh_entry(vmlinux: bytes) -> bool:
    """Whether an ELF kernel has the Xen PVH entry point through which VMMs start it directly."""
    try:
        (table,) = struct.unpack_from("<Q", vmlinux, 0x20)
        size, count = struct.unpack_from("<HH", vmlinux, 0x36)
        for index in range(count):
            kind, _, offset, _, _, length = struct.unpack_from("<II4Q", vmlinux, table + index * size)
            if kind == _PT_NOTE and _has_note(vmlinux[offset : offset + length], b"Xen\0", _XEN_PHYS32_ENTRY):
                return True
    except struct.error:
        return False
    return False


def _has_note(notes: bytes, owner: bytes, wanted: int) -> bool:
    position = 0
    while position + 12 <= len(notes):
        name_size, data_size, kind = struct.unpack_from("<III", notes, position)
        name_at = position + 12
        if kind == wanted and notes[name_at : name_at + name_size] == owner:
            return True
        position = name_at + (name_size + 3) // 4 * 4 + (data_size + 3) // 4 * 4
    return False


def _decompress(payload: bytes, size: int) -> bytes:
    for magic, decoder in _DECODERS:
        if payload.startswith(magic):
            try:
                data = decoder(payload, size)
            except (OSError, EOFError, IndexError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
                raise ValueError(f"the payload is damaged: {error}") from error
            if len(data) != size:
                raise ValueError(f"the payload is damaged: {len(data)} bytes instead of {size}")
            return data
    raise ValueError(f"unknown payload compression (starts with {payload[:4].hex()})")


def _gunzip(payload: bytes, size: int) -> bytes:
    return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(payload, size)


def _unxz(payload: bytes, size: int) -> bytes:
    return lzma.LZMADecompressor().decompress(payload, size)


def _bunzip2(payload: bytes, size: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(payload, size)


def _unzstd(payload: bytes, size: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(payload[:-4]) as reader:
        return reader.read(size)


def _unlz4(payload: bytes, size: int) -> bytes:
    """The legacy LZ4 frame the kernel uses: magic, then blocks, each after its compressed length."""
    out = bytearray()
    position = 4
    while position + 4 <= len(payload) - 4 and len(out) < size:
        (length,) = struct.unpack_from("<I", payload, position)
        position += 4
        out += unlz4_block(payload[position : position + length], size - len(out))
        position += length
    return bytes(out)


def unlz4_block(block: bytes, limit: int) -> bytearray:
    """Decode one LZ4 block. Raises ValueError where it is damaged or holds more than ``limit`` bytes."""
    out = bytearray()
    position, end = 0, len(block)
    try:
        while position < end:
            token = block[position]
            position += 1
            literals = token >> 4
            if literals == 15:
                while (more := block[position]) == 255:
                    literals += 255
                    position += 1
                literals += more
                position += 1
            out += block[position : position + literals]
            position += literals
            if position >= end:
                break
            distance = block[position] | block[position + 1] << 8
            position += 2
            match = token & 15
            if match == 15:
                while (more := block[position]) == 255:
                    match += 255
                    position += 1
                match += more
                position += 1
            match += 4
            start = len(out) - distance
            if start < 0 or distance == 0:
                raise ValueError("damaged LZ4 block: a match before the start")
            if distance >= match:
                out += out[start : start + match]
            else:  # the match overlaps what it writes: the last `distance` bytes, repeated
                out += (out[start:] * (match // distance + 1))[:match]
            if len(out) > limit:
                raise ValueError("damaged LZ4 block: longer than its size field")
    except IndexError as error:
        raise ValueError("damaged LZ4 block: it ends early") from error
    if position != end:
        raise ValueError("damaged LZ4 block: it ends early")
    return out


_DECODERS: tuple[tuple[bytes, Callable[[bytes, int], bytes]], ...] = (
    (b"\x1f\x8b", _gunzip),
    (b"\xfd7zXZ\0", _unxz),
    (b"\x5d\0\0", _unxz),  # the older lzma format; the decompressor tells them apart
    (b"BZh", _bunzip2),
    (b"\x28\xb5\x2f\xfd", _unzstd),
    (b"\x02\x21\x4c\x18", _unlz4),
)
