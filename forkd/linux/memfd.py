"""Memory images held in sealed memfds: filled once, then mapped privately by any number of processes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forkd.linux import sparse
from forkd.linux.sparse import BUFFER, StrPath

HUGE_PAGE = 2 << 20
_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

Fill = Callable[[mmap.mmap], None]


class HugePagesUnavailable(OSError):
    """There are not enough huge pages, or none of the size needed; ordinary pages will do."""


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """The host's pool of 2 MiB pages, in pages. ``reserved`` ones are among the ``free`` ones but spoken for."""

    total: int
    free: int
    reserved: int

    @property
    def available(self) -> int:
        """Pages a new mapping can have."""
        return self.free - self.reserved


def huge_page_pool() -> HugePagePool:
    """The pool as it is now; all zero where the kernel has no such pages."""

    def number(name: str) -> int:
        try:
            return int((_POOL / name).read_text())
        except FileNotFoundError:
            return 0

    return HugePagePool(number("nr_hugepages"), number("free_hugepages"), number("resv_hugepages"))


def create_sealed(name: str, size: int, fill: Fill | StrPath | None, *, hugepages: bool = False) -> int:
    """A memfd of ``size`` bytes that nobody can change any more, not even we; the caller closes it.

    ``fill`` is a file to copy (holes stay holes), or a function that is given the memory to write to. Others map it
    privately through ``/proc/PID/fd/N``. Every huge page is put in place at once: were one missing, each process that
    maps the memfd would have its own copy of that page from the first read on. (A private mapping reserves as many huge
    pages again for itself.) Raises HugePagesUnavailable if the pool is too small or ``size`` is not whole huge pages,
    OSError if memory or the file is short.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    fd = _create_huge(name, size, flags) if hugepages else os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, size)
        if size:
            _fill(fd, size, fill, hugepages)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_huge(name: str, size: int, flags: int) -> int:
    if size % HUGE_PAGE:
        raise HugePagesUnavailable(errno.EINVAL, f"{size} bytes are not whole huge pages of {HUGE_PAGE} bytes")
    try:
        return os.memfd_create(name, flags | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        raise HugePagesUnavailable(error.errno, "the kernel has no 2 MiB huge pages") from error


def _fill(fd: int, size: int, fill: Fill | StrPath | None, hugepages: bool) -> None:
    if not hugepages and not callable(fill):
        if fill is not None:
            with _opened(fill, size) as source_fd:
                sparse.copy_sparse(source_fd, fd)
        return
    # Sealing against writing needs every writable shared mapping gone, so the memory is unmapped before.
    with _map(fd, size, hugepages) as memory:
        if hugepages:
            for offset in range(0, size, HUGE_PAGE):
                memory[offset] = 0
        if callable(fill):
            fill(memory)
        elif fill is not None:
            with _opened(fill, size) as source_fd, memoryview(memory) as view:
                _read(source_fd, view)  # huge pages cannot be written to by a system call


@contextmanager
def _opened(path: StrPath, size: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd).st_size
        if found != size:
            raise OSError(errno.EINVAL, f"{os.fspath(path)} has {found} bytes, not {size}")
        yield fd
    finally:
        os.close(fd)


def _read(source_fd: int, view: memoryview) -> None:
    for offset, length in sparse.data_extents(source_fd):
        for start in range(offset, offset + length, BUFFER):
            stop = min(start + BUFFER, offset + length)
            if sparse.read_into(source_fd, view[start:stop], start) < stop - start:
                raise OSError(errno.EIO, "the file ended early")


def _map(fd: int, size: int, hugepages: bool) -> mmap.mmap:
    try:
        # A shared mapping of huge pages reserves them all: what is mapped can be touched without a SIGBUS.
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    except OSError as error:
        if not hugepages or error.errno != errno.ENOMEM:
            raise
        pool = huge_page_pool()
        raise HugePagesUnavailable(
            errno.ENOMEM, f"{size // HUGE_PAGE} huge pages are needed, {pool.available} of {pool.total} are free"
        ) from error
