"""The bytes of a pack between its blobs: tar headers and padding in zstd frames that store them as they are."""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Callable

from forkd.specs.errors import PackError

BLOCK = 512
TRAILER_SIZE = 2 * BLOCK
_MAGIC = b"\x28\xb5\x2f\xfd\xa0"  # the last byte: one segment, its length in 32 bits, no checksum, no dictionary
_RAW_BLOCK = 1 << 17
HEAD = len(_MAGIC) + 4
"""How many bytes of a frame say how long it is."""


def frame(content: bytes) -> bytes:
    """``content`` as one zstd frame of raw blocks."""
    parts = [_MAGIC, struct.pack("<I", len(content))]
    for start in range(0, len(content), _RAW_BLOCK) or (0,):
        piece = content[start : start + _RAW_BLOCK]
        last = start + _RAW_BLOCK >= len(content)
        parts += [struct.pack("<I", len(piece) << 3 | last)[:3], piece]
    return b"".join(parts)


def read_frame(read: Callable[[int], bytes], limit: int) -> bytes:
    """The content of the glue frame at hand, of at most ``limit`` bytes. Raises PackError for anything else."""
    head = read(HEAD)
    body = read(frame_size(head, limit) - HEAD)
    content = b"".join(body[start + 3 : start + 3 + _RAW_BLOCK] for start in range(0, len(body), _RAW_BLOCK + 3))
    if head + body != frame(content):
        raise PackError("the pack's beginning is cut short or malformed")
    return content


def frame_size(head: bytes, limit: int) -> int:
    """How many bytes the glue frame that begins with ``head`` has. Raises PackError if it is none or over ``limit``."""
    if len(head) < HEAD or not head.startswith(_MAGIC):
        raise PackError("this is not a pack", hint="packs are made by forkd pack")
    size = int.from_bytes(head[len(_MAGIC) : HEAD], "little")
    if size > limit:
        raise PackError(f"the pack's manifest has {size} bytes; {limit} are allowed")
    return HEAD + size + 3 * max(1, -(-size // _RAW_BLOCK))


def header(name: str, size: int) -> bytes:
    """The tar header of a regular file."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    """The zeros that fill a member of ``size`` bytes up."""
    return bytes(-size % BLOCK)


def trailer() -> bytes:
    """The end of the archive."""
    return frame(bytes(TRAILER_SIZE))
