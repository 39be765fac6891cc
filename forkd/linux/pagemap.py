"""Which pages of a process's private mapping differ from the file below it, asked of the kernel."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterator
from operator import gt

from forkd.linux.mapping import address_of

PAGE = 4096
Run = tuple[int, int]
"""``(first_page, count)`` in pages of 4096 bytes, counted from the start of the range asked for."""

_SCALE = mmap.PAGESIZE // PAGE  # hosts with larger pages still answer in units of 4096

# PAGEMAP_SCAN (Linux 6.7): page categories and the argument's size.
_FILE, _PRESENT, _SWAPPED, _ZERO = 1 << 2, 1 << 3, 1 << 4, 1 << 5
_SCAN = 0xC0606610
_SCAN_ARG = struct.Struct("=12Q")
_WALK_END = struct.Struct("=32xQ")
_MAX_REGIONS = 16384
_NO_SCAN = (errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

# /proc/PID/pagemap: the flags are in the top byte of each little-endian 64-bit entry.
_ENTRY = 8
_CHUNK = 1 << 20
_TOP_PRESENT, _TOP_SWAPPED, _TOP_FILE = 0x80, 0x40, 0x20
_FRAME = (1 << 55) - 1
_SOFT_DIRTY, _WRITE_PROTECTED, _ENTRY_PRESENT = 1 << 55, 1 << 57, 1 << 63
_IS_CHANGED = bytes(bool(top & (_TOP_PRESENT | _TOP_SWAPPED)) and not top & _TOP_FILE for top in range(256))
_TOP_EXCLUSIVE = 0x01  # mapped here and nowhere else
_IS_OWN = bytes(
    bool(top & _TOP_SWAPPED or (top & _TOP_PRESENT and top & _TOP_EXCLUSIVE)) and not top & _TOP_FILE
    for top in range(256)
)
_IS_POPULATED = bytes(bool(top & (_TOP_PRESENT | _TOP_SWAPPED)) for top in range(256))
_ONES = re.compile(rb"\x01+")


def changed_pages(pid: int, start: int, length: int) -> list[Run]:
    """The pages in ``[start, start + length)`` that the process has changed in a private mapping of a file or memfd.

    These are the present or swapped pages that no longer belong to the file. One that the process set to zero counts,
    even if the kernel has merged it into the shared zero page. On a mapping of huge pages whole huge pages are
    reported. Raises OSError: FileNotFoundError or ProcessLookupError if the process is gone.
    """
    return _ask(pid, start, length, changed=True)


def own_bytes(pid: int, start: int, length: int) -> int:
    """How much of the range is memory of this process alone: changed, and not shared with what it was forked from."""
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = _read_entries(fd, start, length)
        return sum(chunk[_ENTRY - 1 :: _ENTRY].translate(_IS_OWN).count(1) for chunk in chunks) * mmap.PAGESIZE
    finally:
        os.close(fd)


def populated_pages(pid: int, start: int, length: int) -> list[Run]:
    """The pages of an anonymous mapping that have content of their own: present or swapped, and not the zero page.

    Other pages read as zero. (Pages of the huge zero page may be reported; their content is zero all the same.)
    """
    return _ask(pid, start, length, changed=False)


def _ask(pid: int, start: int, length: int, *, changed: bool) -> list[Run]:
    if start % mmap.PAGESIZE or length % mmap.PAGESIZE:
        raise ValueError(f"{start:#x}+{length:#x} is not page aligned")
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return by_scan(fd, start, length, changed=changed)
        except OSError as error:
            if error.errno not in _NO_SCAN:
                raise
            return by_entries(fd, start, length, changed=changed)
    finally:
        os.close(fd)


def by_scan(fd: int, start: int, length: int, *, changed: bool) -> list[Run]:
    """The answer by the PAGEMAP_SCAN ioctl on an open pagemap. Raises OSError (ENOTTY, EINVAL …) without it."""
    regions = array("Q", bytes(24 * _MAX_REGIONS))
    address = regions.buffer_info()[0]
    unwanted = _FILE if changed else _ZERO
    runs: list[Run] = []
    last = 0  # end of the last run: the kernel may hand over one run in pieces
    position, end = start, start + length
    while position < end:
        # size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, any-of, returned
        argument = bytearray(
            _SCAN_ARG.pack(
                *(_SCAN_ARG.size, 0, position, end, 0, address, _MAX_REGIONS, 0),
                *(unwanted, unwanted, _PRESENT | _SWAPPED, 0),
            )
        )
        # SAFETY: the kernel writes at most _MAX_REGIONS regions of 24 bytes to `regions`, which is that large and lives
        # and keeps its place until this function returns; `argument` is copied in and out by fcntl.
        found = fcntl.ioctl(fd, _SCAN, argument, True)
        for first, stop in zip(regions[0 : 3 * found : 3], regions[1 : 3 * found : 3], strict=True):
            if first == last:
                runs[-1] = (runs[-1][0], runs[-1][1] + (stop - first) // PAGE)
            else:
                runs.append(((first - start) // PAGE, (stop - first) // PAGE))
            last = stop
        # The kernel fills the answer in steps of 512 regions and may leave walk_end at the start of the last step
        # (seen on 6.18), so what it has reported counts as walked.
        walked = max(_WALK_END.unpack_from(argument)[0], last)
        if walked <= position:
            raise OSError(errno.EIO, "PAGEMAP_SCAN does not advance")
        position = walked
    return runs


def by_entries(fd: int, start: int, length: int, *, changed: bool) -> list[Run]:
    """The same answer from the entries of an open pagemap, for kernels without PAGEMAP_SCAN."""
    zero_entries = frozenset[int]() if changed else _zero_entries()
    flags = bytearray()
    for entries in _read_entries(fd, start, length):
        wanted = entries[_ENTRY - 1 :: _ENTRY].translate(_IS_CHANGED if changed else _IS_POPULATED)
        if zero_entries:
            wanted = bytes(map(gt, wanted, map(zero_entries.__contains__, array("Q", entries))))
        flags += wanted
    return [(found.start() * _SCALE, (found.end() - found.start()) * _SCALE) for found in _ONES.finditer(flags)]


def _read_entries(fd: int, start: int, length: int) -> Iterator[bytes]:
    position = start // mmap.PAGESIZE * _ENTRY
    end = position + length // mmap.PAGESIZE * _ENTRY
    while position < end:
        entries = os.pread(fd, min(_CHUNK, end - position), position)
        if not entries:
            raise ProcessLookupError(errno.ESRCH, "the process has no memory any more")
        yield entries
        position += len(entries)


def _zero_entries() -> frozenset[int]:
    """Every pagemap entry that can stand for the shared zero page; empty if we may not see page frames.

    The page is found by reading an untouched page of our own.
    """
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            own[0]  # reading maps the zero page
            (entry,) = struct.unpack("=Q", os.pread(fd, _ENTRY, address_of(own) // mmap.PAGESIZE * _ENTRY))
        finally:
            os.close(fd)
    frame = entry & _FRAME
    if not frame:
        return frozenset()
    return frozenset(
        _ENTRY_PRESENT | frame | dirty | protected for dirty in (0, _SOFT_DIRTY) for protected in (0, _WRITE_PROTECTED)
    )
