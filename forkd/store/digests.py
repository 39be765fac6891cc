"""Content digests of the store's files; specs/formats/delta.md defines them."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from forkd.linux import sparse
from forkd.linux.sparse import BUFFER, PAGE, Piece
from forkd.specs.errors import SnapshotBroken

T = TypeVar("T")
_U64 = struct.Struct(">Q")
_HEADER = 4096  # of a delta: hashed last, because it is written last


def sha256_file(path: Path) -> str:
    """``sha256:…`` of all bytes of a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as source:
        _hash_range(source.fileno(), 0, os.fstat(source.fileno()).st_size, digest)
    return f"sha256:{digest.hexdigest()}"


def delta256_file(path: Path) -> str:
    """``delta256:…`` of a delta: its bytes in the order they are written, that is, with the header at the end."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as source:
        size = os.fstat(source.fileno()).st_size
        _hash_range(source.fileno(), _HEADER, size, digest)
        _hash_range(source.fileno(), 0, min(_HEADER, size), digest)
    return f"delta256:{digest.hexdigest()}"


def sparse256_file(path: Path) -> str:
    """``sparse256:…`` of an image, whatever its holes; only parts that are no holes are read."""
    digest = Sparse256()
    buffer = memoryview(bytearray(BUFFER))
    with open(path, "rb", buffering=0) as source:
        fd = source.fileno()
        size = os.fstat(fd).st_size
        position = 0
        for offset, length in sparse.data_extents(fd):
            # Extents need not begin or end with a page; a page shared by two is read once, whole.
            position = max(position, offset // PAGE * PAGE)
            end = min(-(-(offset + length) // PAGE) * PAGE, size)
            while position < end:
                count = min(BUFFER, end - position)
                _read(fd, buffer[:count], position)
                padding = -count % PAGE  # makes the file's last page whole
                buffer[count : count + padding] = bytes(padding)
                digest.feed(sparse.split_zero(position // PAGE, buffer[: count + padding]))
                position += count
    return digest.finish(size)


def verify_file(path: Path, digest: str) -> None:
    """Raise SnapshotBroken, naming the file, unless it has this digest (of any kind of ours)."""
    kinds: dict[str, Callable[[Path], str]] = {
        "sha256": sha256_file,
        "sparse256": sparse256_file,
        "delta256": delta256_file,
    }
    kind = digest.partition(":")[0]
    if kind not in kinds:
        raise SnapshotBroken(f"{path} has a digest of an unknown kind: {kind[:20]!r}", hint="use a newer forkd")
    try:
        found = kinds[kind](path)
    except OSError as error:
        raise SnapshotBroken(f"{path} cannot be read: {error.strerror}") from error
    if found != digest:
        raise SnapshotBroken(f"{path} was altered: its digest is {found}, {digest} is recorded")


class Sparse256:
    """The digest of an image made while it is written: ``feed`` pieces in ascending order, then ``finish``."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._begin = self._end = 0  # the run of non-zero pages at hand, in pages

    def feed(self, pieces: Iterable[Piece]) -> None:
        """Take in whole pages. Zero pages may be left out. Raises ValueError if pages come twice or not in order."""
        for page, content, zero in pieces:
            if page < self._end:
                raise ValueError(f"page {page} comes after page {self._end - 1}")
            if zero:
                continue
            if page != self._end or self._begin == self._end:
                self._finish_run()
                self._begin = self._end = page
                self._sha.update(_U64.pack(page * PAGE))
            self._sha.update(content)
            self._end += len(content) // PAGE

    def finish(self, size: int) -> str:
        """The digest of an image of ``size`` bytes; called once, at the end."""
        self._finish_run()
        self._sha.update(_U64.pack(size))
        return f"sparse256:{self._sha.hexdigest()}"

    def _finish_run(self) -> None:
        if self._end > self._begin:
            self._sha.update(_U64.pack((self._end - self._begin) * PAGE))


def capture_image(memory_fd: int, regions: Sequence[tuple[int, int, int]], out_fd: int) -> tuple[str, int]:
    """Write all of RAM from an open ``/proc/PID/mem`` to a new image; returns its digest and how many pages have data.

    ``regions`` are ``(address, length, offset)``, ascending by offset. Zero pages become holes; the image is as long as
    RAM. Raises OSError: ESRCH if the process is gone, and what writing raises.
    """
    digest = Sparse256()
    pages = size = 0
    buffers = (bytearray(BUFFER), bytearray(BUFFER))
    with Alongside() as hashing:
        for address, length, offset in regions:
            for batch in sparse.read_runs(memory_fd, address, [(0, length // PAGE)], buffers):
                pieces = batch.pieces(offset // PAGE)
                hashing.start(digest.feed, pieces)
                pages += sparse.write_pages(pieces, out_fd)
            size = max(size, offset + length)
    os.ftruncate(out_fd, size)
    return digest.finish(size), pages


class Alongside:
    """One thread that makes one call at a time while we do something else: hashing beside reading and writing.

    ``start`` first waits for the call before it, so with two buffers in turn no buffer is reused too early.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "forkd-hash")
        self._call: Future[None] | None = None

    def start(self, call: Callable[[T], None], argument: T) -> None:
        """Begin ``call(argument)``. Raises what the call before it raised."""
        self.wait()
        self._call = self._pool.submit(call, argument)

    def wait(self) -> None:
        """Wait for the last call. Raises what it raised."""
        call, self._call = self._call, None
        if call is not None:
            call.result()

    def __enter__(self) -> Alongside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if error is None:
            self.wait()


def _hash_range(fd: int, position: int, end: int, digest: hashlib._Hash) -> None:
    buffer = memoryview(bytearray(BUFFER))
    while position < end:
        content = buffer[: min(BUFFER, end - position)]
        _read(fd, content, position)
        digest.update(content)
        position += len(content)


def _read(fd: int, target: memoryview, position: int) -> None:
    if sparse.read_into(fd, target, position) < len(target):
        raise OSError(errno.EIO, "the file ended early")
