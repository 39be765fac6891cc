"""Files of the store into blobs and back: read and written sparsely, digested on the way."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from forkd.hub import sparsestream
from forkd.hub.blobs import BlobReader, BlobWriter
from forkd.linux import sparse
from forkd.linux.sparse import BUFFER, PAGE
from forkd.specs.errors import PackError, SnapshotBroken
from forkd.specs.packs import Blob
from forkd.store.digests import Alongside, Sparse256

_DELTA_HEADER = 4096
Advance = Callable[[int], None]


def no_advance(count: int) -> None:
    """Nobody counts."""


def compress(
    kind: str, path: Path, digest: str, size: int, out: IO[bytes], threads: int, advance: Advance = no_advance
) -> Blob:
    """Compress a file into ``out``; ``advance`` is told what was read. Raises SnapshotBroken if it is another file."""
    is_sparse = digest.startswith("sparse256:")
    writer = BlobWriter(out, threads)
    with open(path, "rb", buffering=0) as source:
        if os.fstat(source.fileno()).st_size != size:
            raise SnapshotBroken(f"{path} has not the {size} bytes that are recorded")
        made = (
            _compress_sparse(source, size, writer, advance)
            if is_sparse
            else _compress_plain(source, digest, writer, advance)
        )
    sha256 = writer.finish()
    if made != digest:
        raise SnapshotBroken(f"{path} was altered: its digest is {made}, {digest} is recorded")
    return Blob(
        kind=kind,
        digest=digest,
        size=size,
        sha256=sha256,
        stored=writer.stored,
        stream=writer.stream,
        sparse=is_sparse,
    )


def _compress_sparse(source: IO[bytes], size: int, writer: BlobWriter, advance: Advance) -> str:
    digest = Sparse256()
    with Alongside() as hashing:

        def pieces() -> Iterator[tuple[int, memoryview]]:
            for first_page, content in _blocks(source.fileno(), size):
                found = list(sparse.split_zero(first_page, content))
                hashing.start(digest.feed, found)
                advance(len(content))
                for page, view, zero in found:
                    if not zero:
                        offset = page * PAGE
                        yield offset, view[: size - offset]

        writer.write_all(sparsestream.encode(size, pieces()))
    return digest.finish(size)


def _blocks(fd: int, size: int) -> Iterator[tuple[int, memoryview]]:
    """``(first_page, content)`` of each block of BUFFER bytes that is no hole; the last page is made whole."""
    buffers = [memoryview(bytearray(BUFFER)), memoryview(bytearray(BUFFER))]
    done = 0
    for offset, length in sparse.data_extents(fd):
        start = max(done, offset // BUFFER * BUFFER)
        while start < offset + length:
            count = min(BUFFER, size - start)
            buffer = buffers[0]
            buffers.reverse()
            if sparse.read_into(fd, buffer[:count], start) < count:
                raise OSError(errno.EIO, "the file ended early")
            padding = -count % PAGE
            buffer[count : count + padding] = bytes(padding)
            yield start // PAGE, buffer[: count + padding]
            start += BUFFER
        done = start


def _compress_plain(source: IO[bytes], digest: str, writer: BlobWriter, advance: Advance) -> str:
    made = _plain_digest(digest)
    while content := source.read(BUFFER):
        made.update(content)
        writer.write(content)
        advance(len(content))
    return made.finish()


def expand(blob: Blob, source: IO[bytes], target: Path, advance: Advance = no_advance) -> None:
    """Write the file that ``blob`` holds to the new file ``target``. Raises PackError unless both are right."""
    reader = BlobReader(source, blob, advance)
    with open(target, "xb", buffering=0) as out:
        made = _expand_sparse(reader, blob, out) if blob.sparse else _expand_plain(reader, blob, out)
    reader.finish()
    if made != blob.digest:
        raise PackError(f"{blob.kind} was altered: its digest is {made[:24]}…, {blob.digest[:24]}… is promised")


def _expand_sparse(reader: BlobReader, blob: Blob, out: IO[bytes]) -> str:
    os.ftruncate(out.fileno(), blob.size)
    digest = Sparse256()
    with Alongside() as hashing:
        for offset, content in sparsestream.decode(reader.read, blob.size):
            padded = memoryview(content + bytes(-len(content) % PAGE))
            pieces = list(sparse.split_zero(offset // PAGE, padded))
            hashing.start(digest.feed, pieces)
            for page, view, zero in pieces:
                if not zero:
                    sparse.write_all(out.fileno(), [view[: blob.size - page * PAGE]], page * PAGE)
    return digest.finish(blob.size)


def _expand_plain(reader: BlobReader, blob: Blob, out: IO[bytes]) -> str:
    made = _plain_digest(blob.digest)
    position = 0
    while content := reader.read(BUFFER):
        made.update(content)
        position += sparse.write_all(out.fileno(), [memoryview(content)], position)
    return made.finish()


def _plain_digest(digest: str) -> _Plain:
    return _Plain("delta256", _DELTA_HEADER) if digest.startswith("delta256:") else _Plain("sha256", 0)


class _Plain:
    """``sha256`` of bytes as they come, or ``delta256``, which takes the first page last."""

    def __init__(self, kind: str, late: int) -> None:
        self._kind = kind
        self._late = late
        self._head = bytearray()
        self._sha = hashlib.sha256()

    def update(self, content: bytes) -> None:
        missing = self._late - len(self._head)
        self._head += content[:missing]
        self._sha.update(memoryview(content)[missing:] if missing > 0 else content)

    def finish(self) -> str:
        self._sha.update(self._head)
        return f"{self._kind}:{self._sha.hexdigest()}"


def total(blobs: Iterable[Blob]) -> int:
    """Bytes of blobs together."""
    return sum(blob.stored for blob in blobs)
