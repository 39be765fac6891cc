"""Sparse files: extents, reflinks and holes; and pages copied out of a process without storing its zeros."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle

PAGE = 4096
BUFFER = 1 << 20
"""Bytes moved at a time: large enough that calls cost nothing, small enough to stay in the processor's cache."""

StrPath = str | os.PathLike[str]
Run = tuple[int, int]
Piece = tuple[int, memoryview, bool]
"""``(first_page, content, is_zero)``: content is all zero pages, or has none."""

_ZEROS = bytes(1 << 16)
_ZERO_PAGE = bytes(PAGE)
_SAME = re.compile(rb"\x00+|\x01+")
_FICLONE = 0x40049409
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_MAX_VECTORS = 1024
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EXDEV, errno.EINVAL)


# -- files -----------------------------------------------------------------------------------------------------------


def data_extents(fd: int) -> Iterator[tuple[int, int]]:
    """``(offset, length)`` of each part of the file that is not a hole, ascending."""
    end = os.fstat(fd).st_size
    position = 0
    while position < end:
        try:
            first = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        position = os.lseek(fd, first, os.SEEK_HOLE)
        yield first, position - first


def clone_file(source: StrPath, target: StrPath) -> bool:
    """Copy ``source`` to the new file ``target``: sharing blocks if the file system can (then True), else sparsely.

    Raises OSError, FileExistsError among others; then no target is left that was not there before.
    """
    source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target_fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _reflink(source_fd, target_fd):
                return True
            copy_sparse(source_fd, target_fd)
            return False
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def _reflink(source_fd: int, target_fd: int) -> bool:
    try:
        # SAFETY: the argument is a descriptor, not a pointer; both are open for the whole call.
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True


def copy_sparse(source_fd: int, target_fd: int) -> None:
    """Give the empty file ``target_fd`` the size and content of ``source_fd``; holes stay holes."""
    os.ftruncate(target_fd, os.fstat(source_fd).st_size)
    for offset, length in data_extents(source_fd):
        copy_range(source_fd, offset, target_fd, offset, length)


def copy_range(source_fd: int, source_offset: int, target_fd: int, target_offset: int, length: int) -> None:
    """Copy bytes inside the kernel, sharing blocks where the file system can; may move the target's file position.

    Raises OSError, EIO if the source ends before ``length`` bytes.
    """
    while length:
        try:
            copied = os.copy_file_range(source_fd, target_fd, length, source_offset, target_offset)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            # From one file system to another.
            os.lseek(target_fd, target_offset, os.SEEK_SET)
            copied = os.sendfile(target_fd, source_fd, source_offset, length)
        if not copied:
            raise OSError(errno.EIO, "the file ended early")
        source_offset += copied
        target_offset += copied
        length -= copied


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Make a range of the file read as zeros and give its blocks back, if the file system can; its size stays."""
    # SAFETY: numbers only; the descriptor is open for the whole call.
    if _libc().fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0:
        return
    number = ctypes.get_errno()
    if number not in _CANNOT:
        raise OSError(number, os.strerror(number))
    end = min(offset + length, os.fstat(fd).st_size)
    while offset < end:
        offset += write_all(fd, [memoryview(_ZEROS)[: end - offset]], offset)


def write_all(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Write the views one after another at ``offset``, all of them; returns how many bytes that was."""
    total = 0
    for first in range(0, len(views), _MAX_VECTORS):
        batch = list(views[first : first + _MAX_VECTORS])
        while batch:
            written = os.pwritev(fd, batch, offset + total)
            total += written
            while batch and written >= len(batch[0]):
                written -= len(batch.pop(0))
            if written:
                batch[0] = batch[0][written:]
    return total


def read_into(fd: int, target: memoryview, offset: int) -> int:
    """Fill ``target`` from ``offset`` on; returns how many bytes there were: fewer than asked only at the end."""
    total = 0
    while total < len(target) and (count := os.preadv(fd, [target[total:]], offset + total)):
        total += count
    return total


def physical_bytes(path: StrPath) -> int:
    """The space a file takes on its device."""
    return os.stat(path).st_blocks * 512


def disk_free(path: StrPath) -> int:
    """Bytes an ordinary user can still write to the file system that ``path`` is on."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


# -- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs of pages read from a process, back to back in ``content``; ``zeros`` has a 1 for each page that is zero."""

    content: memoryview
    runs: list[Run]
    zeros: bytes

    def pieces(self, first_page: int = 0) -> list[Piece]:
        """The runs, split where zero pages begin or end, and moved by ``first_page``."""
        found: list[Piece] = []
        position = 0
        for page, count in self.runs:
            end = position + count
            if self.zeros.find(1, position, end) < 0:
                found.append((first_page + page, self.content[position * PAGE : end * PAGE], False))
            else:
                found += _split(first_page + page, self.content, self.zeros, position, end)
            position = end
        return found

    def data(self) -> list[memoryview]:
        """All that is not zero, in as few views as possible."""
        pieces = _split(0, self.content, self.zeros, 0, len(self.zeros))
        return [view for _, view, zero in pieces if not zero]


def is_zero(content: memoryview | bytes | bytearray) -> bool:
    """Whether every byte is zero."""
    view = memoryview(content)
    # Comparing bytes objects is one memcmp; comparing memoryviews goes byte by byte, so a copy is the quick way.
    return all(
        view[start : start + len(_ZEROS)].tobytes() == _ZEROS[: len(view) - start]
        for start in range(0, len(view), len(_ZEROS))
    )


def split_zero(first_page: int, content: memoryview) -> Iterator[Piece]:
    """Split whole pages into the longest pieces that are all zero pages or have none."""
    return _split(first_page, content, _zero_flags(content), 0, len(content) // PAGE)


def _zero_flags(content: memoryview) -> bytes:
    return bytes([content[start : start + PAGE].tobytes() == _ZERO_PAGE for start in range(0, len(content), PAGE)])


def _split(first_page: int, content: memoryview, zeros: bytes, begin: int, end: int) -> Iterator[Piece]:
    for same in _SAME.finditer(zeros, begin, end):
        start, stop = same.span()
        yield first_page + start - begin, content[start * PAGE : stop * PAGE], zeros[start] == 1


def read_runs(memory_fd: int, address: int, runs: Iterable[Run], buffers: Sequence[bytearray]) -> Iterator[Batch]:
    """Read runs of pages from an open ``/proc/PID/mem``, as many at a time as fit into a buffer.

    ``address`` is where page 0 is. The buffers, of whole pages, are used in turn: with two of them a batch stays as it
    is while the next one is read. Raises OSError: ESRCH if the process is gone, EIO if a page cannot be read.
    """
    views = cycle([memoryview(buffer) for buffer in buffers])
    view = next(views)
    capacity = len(view) // PAGE
    held: list[Run] = []
    filled = 0
    for first, count in runs:
        while count:
            pages = min(count, capacity - filled)
            target = view[filled * PAGE : (filled + pages) * PAGE]
            if read_into(memory_fd, target, address + first * PAGE) < len(target):
                raise ProcessLookupError(errno.ESRCH, "the process has no memory any more")
            held.append((first, pages))
            first, count, filled = first + pages, count - pages, filled + pages
            if filled == capacity:
                yield Batch(view, held, _zero_flags(view))
                view, held, filled = next(views), [], 0
                capacity = len(view) // PAGE
    if held:
        yield Batch(view[: filled * PAGE], held, _zero_flags(view[: filled * PAGE]))


def write_pages(pieces: Iterable[Piece], out_fd: int) -> int:
    """Write what is not zero at its own place in an image; returns how many pages that was."""
    written = 0
    neighbours: list[memoryview] = []
    first = following = 0
    for page, content, zero in pieces:
        if zero:
            continue
        if page != following and neighbours:
            written += write_all(out_fd, neighbours, first * PAGE)
            neighbours = []
        if not neighbours:
            first = page
        neighbours.append(content)
        following = page + len(content) // PAGE
    if neighbours:
        written += write_all(out_fd, neighbours, first * PAGE)
    return written // PAGE


def write_pages_from_process(
    memory_fd: int, address: int, runs: Iterable[Run], out_fd: int, first_page: int = 0
) -> int:
    """Copy runs of pages from an open ``/proc/PID/mem`` to their places in a new, sparse image; zero pages stay holes.

    ``address`` is where page ``first_page`` of the image is in the process; runs count from there. Returns how many
    pages were written. Raises OSError as ``read_runs`` does, and what writing raises.
    """
    written = 0
    for batch in read_runs(memory_fd, address, runs, [bytearray(BUFFER)]):
        written += write_pages(batch.pieces(first_page), out_fd)
    return written


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
