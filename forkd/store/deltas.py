"""Deltas: the pages one snapshot changed against its parent, written, read, and laid over an image.

The format is specs/formats/delta.md. What is read may come from anywhere, so every number in it is checked before use.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from forkd.linux import sparse
from forkd.linux.sparse import BUFFER, PAGE, Run
from forkd.specs.errors import SnapshotBroken
from forkd.store.digests import Alongside

MAGIC = b"FORKDLT1"
VERSION = 1
DATA, ZERO = 0, 1
MAX_PAGES = 1 << 32
"""Of RAM: 16 TiB."""
MAX_RUNS = 1 << 24
"""So that an index, which is read whole, cannot exhaust memory."""

_HEADER = struct.Struct("<8sII5Q32s")
_SEAL = 32  # the header's last bytes: the SHA-256 of those before
_RUN = struct.Struct("<QII")
_MAX_COUNT = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class DeltaInfo:
    """A finished delta: ``digest`` is ``delta256:…``, ``size`` the file's length."""

    digest: str
    size: int
    data_pages: int
    zero_pages: int


class DeltaWriter:
    """Writes a delta to the new, empty file ``fd``, which stays the caller's to sync and close.

    Pages are added in ascending order; one added twice or too late is a ValueError. Until ``finish`` has returned the
    file has no header, so nobody takes it for a delta.
    """

    def __init__(self, fd: int, ram_pages: int) -> None:
        if not 0 < ram_pages <= MAX_PAGES:
            raise ValueError(f"{ram_pages} pages of RAM")
        self._fd = fd
        self._ram_pages = ram_pages
        self._sha = hashlib.sha256()
        self._runs: list[tuple[int, int, int]] = []
        self._next = 0  # the first page that may still be added
        self._pages = [0, 0]  # by kind

    def add_data(self, first_page: int, content: bytes | bytearray | memoryview) -> None:
        """Add whole pages as they are. The buffer may be reused when this returns."""
        view = memoryview(content).cast("B")
        if len(view) % PAGE:
            raise ValueError(f"{len(view)} bytes are not whole pages")
        position = self._end()
        self._add_run(first_page, len(view) // PAGE, DATA)
        sparse.write_all(self._fd, [view], position)
        self._sha.update(view)

    def add_zero(self, first_page: int, count: int) -> None:
        """Add pages that have become zero."""
        self._add_run(first_page, count, ZERO)

    def add_from_process(self, memory_fd: int, address: int, first_page: int, runs: Iterable[Run]) -> None:
        """Add runs of pages from an open ``/proc/PID/mem``, telling zero pages from data.

        ``address`` is where ``first_page`` is in the process; runs count from there. Raises OSError: ESRCH if the
        process is gone, EIO if a page cannot be read, and what writing raises.
        """
        with Alongside() as hashing:
            for batch in sparse.read_runs(memory_fd, address, runs, (bytearray(BUFFER), bytearray(BUFFER))):
                data, position = batch.data(), self._end()
                hashing.start(self._hash, data)
                for page, view, zero in batch.pieces(first_page):
                    self._add_run(page, len(view) // PAGE, ZERO if zero else DATA)
                sparse.write_all(self._fd, data, position)

    def finish(self) -> DeltaInfo:
        """Write the index and then the header. Raises OSError if writing fails."""
        if len(self._runs) > MAX_RUNS:
            raise OSError(errno.EFBIG, f"{len(self._runs)} runs of changed pages")
        index = b"".join(_RUN.pack(*run) for run in self._runs)
        data_pages, zero_pages = self._pages
        position = self._end()
        header = pack_header(self._ram_pages, data_pages, zero_pages, position, index)
        sparse.write_all(self._fd, [memoryview(index)], position)
        sparse.write_all(self._fd, [memoryview(header)], 0)
        self._sha.update(index)
        self._sha.update(header)
        return DeltaInfo(f"delta256:{self._sha.hexdigest()}", position + len(index), data_pages, zero_pages)

    def _hash(self, views: list[memoryview]) -> None:
        for view in views:
            self._sha.update(view)

    def _end(self) -> int:
        return PAGE + self._pages[DATA] * PAGE

    def _add_run(self, first: int, count: int, kind: int) -> None:
        if not count:
            return
        if first < self._next or count < 0 or first + count > self._ram_pages:
            raise ValueError(
                f"pages {first} to {first + count - 1} do not lie in {self._next} to {self._ram_pages - 1}"
            )
        if self._runs and self._runs[-1][2] == kind and first == self._next and self._runs[-1][1] + count <= _MAX_COUNT:
            self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + count, kind)
        else:
            self._runs.append((first, count, kind))
        self._next = first + count
        self._pages[kind] += count


class Delta:
    """A delta open for reading, its header and index checked. Use it in a ``with`` statement."""

    def __init__(self, path: Path) -> None:
        """Raises SnapshotBroken, saying what is wrong."""
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SnapshotBroken(f"{path} cannot be read: {error.strerror}") from error
        try:
            self._read()
        except OSError as error:
            os.close(self.fd)
            raise SnapshotBroken(f"{path} cannot be read: {error.strerror}") from error
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> Delta:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def _read(self) -> None:
        status = os.fstat(self.fd)
        self._check(stat.S_ISREG(status.st_mode), "is not a regular file")
        header = os.pread(self.fd, PAGE, 0)
        self._check(len(header) == PAGE, "is too short for a header")
        magic, version, page_size, ram, data, zero, index_offset, index_length, digest = _HEADER.unpack_from(header)
        self._check(magic == MAGIC, "is not a delta, or was never finished")
        self._check(version == VERSION, f"has format {version}; this forkd reads {VERSION}")
        self._check(header == _sealed(header[: _HEADER.size]), "has an altered header")
        self._check(page_size == PAGE, f"has pages of {page_size} bytes")
        self._check(0 < ram <= MAX_PAGES and data + zero <= ram, "counts more pages than RAM has")
        self._check(index_offset == PAGE + data * PAGE, "has its index in the wrong place")
        count, rest = divmod(index_length, _RUN.size)
        self._check(rest == 0 and count <= min(data + zero, MAX_RUNS), "has an index of a wrong length")
        self._check(
            status.st_size == index_offset + index_length, f"has {status.st_size} bytes, not as many as it says"
        )
        index = bytearray(index_length)
        self._check(sparse.read_into(self.fd, memoryview(index), index_offset) == index_length, "ended early")
        self._check(hashlib.sha256(index).digest() == digest, "has an altered index")
        self.ram_pages: int = ram
        self.data_pages: int = data
        self.zero_pages: int = zero
        self._index = index
        self._check_runs()

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """``(first_page, count, kind)`` of each run, ascending; the data of DATA runs is back to back in the file."""
        return _RUN.iter_unpack(self._index)

    def _check_runs(self) -> None:
        following, pages = 0, [0, 0]
        for first, count, kind in self.runs():
            self._check(first >= following and count > 0, "has runs that are empty, overlap or are out of order")
            self._check(kind in (DATA, ZERO), f"has a run of unknown kind {kind}")
            following = first + count
            pages[kind] += count
        self._check(following <= self.ram_pages, "has a run past the end of RAM")
        self._check(pages == [self.data_pages, self.zero_pages], "has an index that does not fit its counts")

    def _check(self, good: bool, what: str) -> None:
        if not good:
            raise SnapshotBroken(f"the delta {self.path} {what}")


def apply(delta: Delta, image_fd: int) -> None:
    """Lay a delta over an image. Raises SnapshotBroken if they do not fit; OSError leaves the image half done."""
    size = os.fstat(image_fd).st_size
    if size != delta.ram_pages * PAGE:
        raise SnapshotBroken(
            f"the delta {delta.path} is for {delta.ram_pages * PAGE} bytes of RAM, the image has {size}"
        )
    position = PAGE
    for first, count, kind in delta.runs():
        if kind == ZERO:
            sparse.punch_hole(image_fd, first * PAGE, count * PAGE)
        else:
            sparse.copy_range(delta.fd, position, image_fd, first * PAGE, count * PAGE)
            position += count * PAGE


def materialise(base: Path, deltas: Sequence[Path], out: Path) -> None:
    """Make the new file ``out``: the image ``base`` with the deltas laid over it in order, synced to its device.

    Blocks are shared with the base where the file system can. Raises SnapshotBroken if a file is missing or damaged,
    OSError if writing fails, FileExistsError among others; either way no half-made ``out`` is left.
    """
    with ExitStack() as stack:
        layers = [stack.enter_context(Delta(path)) for path in deltas]
        try:
            os.close(os.open(base, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise SnapshotBroken(f"the image {base} cannot be read: {error.strerror}") from error
        sparse.clone_file(base, out)
        try:
            with open(out, "r+b", buffering=0) as image:
                for layer in layers:
                    apply(layer, image.fileno())
                os.fsync(image.fileno())
        except BaseException:
            out.unlink()
            raise


def pack_header(ram_pages: int, data_pages: int, zero_pages: int, index_offset: int, index: bytes) -> bytes:
    """A delta's first page."""
    digest = hashlib.sha256(index).digest()
    return _sealed(
        _HEADER.pack(MAGIC, VERSION, PAGE, ram_pages, data_pages, zero_pages, index_offset, len(index), digest)
    )


def _sealed(header: bytes) -> bytes:
    body = header.ljust(PAGE - _SEAL, b"\0")
    return body + hashlib.sha256(body).digest()
