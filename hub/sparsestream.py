"""Sparse streams (formats/pack.md): a file without its zero pages, readable from front to back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

from forkd.specs.errors import PackError

MAGIC = b"FORKDSP1"
PAGE = 4096
CUT = 1 << 20
"""Records end at multiples of this, so a reader never holds more."""
_SIZE = struct.Struct("<Q")
_RECORD = struct.Struct("<QI")

Buffer = bytes | bytearray | memoryview


def encode(size: int, pieces: Iterable[tuple[int, Buffer]]) -> Iterator[Buffer]:
    """The stream of a file of ``size`` bytes, from ``(offset, content)`` in ascending order, none longer than CUT."""
    yield MAGIC + _SIZE.pack(size)
    for offset, content in pieces:
        yield _RECORD.pack(offset, len(content))
        yield content
    yield _RECORD.pack(size, 0)


def decode(read: Callable[[int], bytes], size: int) -> Iterator[tuple[int, bytes]]:
    """``(offset, content)`` of each record of the stream that ``read`` gives, for a file that must have ``size`` bytes.

    Raises PackError at the first byte that breaks the format.
    """
    head = _exactly(read, len(MAGIC) + _SIZE.size)
    if head != MAGIC + _SIZE.pack(size):
        raise PackError("a sparse stream begins wrongly, or is of a file of another size")
    position = 0
    while True:
        offset, length = _RECORD.unpack(_exactly(read, _RECORD.size))
        if length == 0 and offset == size:
            return
        end = offset + length
        if not 0 < length <= CUT or offset < position or end > size:
            raise PackError("a sparse stream has a record that is empty, too long, out of order or past the end")
        if offset % PAGE or (length % PAGE and end != size):
            raise PackError("a sparse stream has a record that is not of whole pages")
        yield offset, _exactly(read, length)
        position = end


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    found = read(count)
    if len(found) == count:
        return found
    parts = [found]
    while found and count > (have := sum(map(len, parts))):
        found = read(count - have)
        parts.append(found)
    whole = b"".join(parts)
    if len(whole) < count:
        raise PackError("a blob ends early")
    return whole
