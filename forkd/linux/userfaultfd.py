"""Write protection by userfaultfd, and a bench of what a snapshot made with it costs on this kernel and disk."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from forkd.linux.mapping import address_of
from forkd.linux.sparse import BUFFER, PAGE, StrPath, write_all

FEATURE_WP = 1 << 0
FEATURE_WP_SHMEM = 1 << 12
"""Write protection also on memfds, shared memory and huge pages (Linux 5.19)."""

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_NEW, _API, _REGISTER, _WRITEPROTECT, _WAKE = 0xAA00, 0xC018AA3F, 0xC020AA00, 0xC018AA06, 0x8010AA02
_API_VERSION, _MODE_WP, _PROTECT = 0xAA, 1 << 1, 1 << 0
_MESSAGE = struct.Struct("=B7xQQ8x")
_PAGEFAULT, _FAULT_WP = 0x12, 1 << 1


class UserFaultFd:
    """A userfaultfd that reports writes to protected pages of our own memory. Closing it lets every writer go on."""

    def __init__(self) -> None:
        """Raises OSError: EPERM or EACCES without the right to it, ENOSYS or EINVAL where the kernel lacks it."""
        self._fd = _open()
        try:
            self._call(_API, struct.pack("=3Q", _API_VERSION, FEATURE_WP | FEATURE_WP_SHMEM, 0))
        except BaseException:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """The descriptor; readable when a writer waits."""
        return self._fd

    def register(self, start: int, length: int) -> None:
        """Watch a range of our memory."""
        self._call(_REGISTER, struct.pack("=4Q", start, length, _MODE_WP, 0))

    def protect(self, start: int, length: int) -> None:
        """From now on a write to the range waits."""
        self._call(_WRITEPROTECT, struct.pack("=3Q", start, length, _PROTECT))

    def release(self, start: int, length: int) -> None:
        """Allow writes to the range again and let those go on that wait."""
        self._call(_WRITEPROTECT, struct.pack("=3Q", start, length, 0))

    def wake(self, start: int, length: int) -> None:
        """Let writers that wait in the range try again."""
        self._call(_WAKE, struct.pack("=2Q", start, length))

    def read_faults(self) -> list[int]:
        """The addresses that writers wait for; empty if there is none just now."""
        try:
            messages = os.read(self._fd, 64 * _MESSAGE.size)
        except BlockingIOError:
            return []
        faults = _MESSAGE.iter_unpack(messages)
        return [address for event, flags, address in faults if event == _PAGEFAULT and flags & _FAULT_WP]

    def close(self) -> None:
        """Give it up: all protection goes."""
        os.close(self._fd)

    def __enter__(self) -> UserFaultFd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, request: int, argument: bytes) -> None:
        # SAFETY: the argument is of the size the request encodes, and is copied in and out by fcntl; the ranges in it
        # are of mappings that outlive the descriptor's use of them.
        fcntl.ioctl(self._fd, request, bytearray(argument), True)


def _open() -> int:
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        number = _SYSCALL.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"userfaultfd is not known on {platform.machine()}") from None
        libc = ctypes.CDLL(None, use_errno=True)
        # SAFETY: numbers only; the descriptor returned is ours.
        fd: int = libc.syscall(ctypes.c_long(number), ctypes.c_long(flags))
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())) from None
        return fd
    try:
        # SAFETY: the argument is a number of flags; the result is a new descriptor, ours.
        return fcntl.ioctl(device, _NEW, flags)
    finally:
        os.close(device)


class WpSnapshot:
    """Saves a region as it was when ``arm`` returned, while it is being written to.

    A page is claimed and its content taken under one lock while it is still protected, by the bulk copy or by the fault
    handler, whoever is first. The lock is never held while writing to the file, so a writer waits for one page or one
    buffer to be copied in memory, not for the disk.
    """

    def __init__(self, uffd: UserFaultFd, region: mmap.mmap, out_fd: int) -> None:
        self._uffd = uffd
        self._region = region
        self._start = address_of(region)
        self._out_fd = out_fd
        self._taken = bytearray(len(region) // PAGE)
        self._lock = threading.Lock()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handler = threading.Thread(target=self._handle, name="forkd-wp")
        self._failure: BaseException | None = None
        self.by_fault = self.by_bulk = 0

    def arm(self) -> float:
        """Freeze: from here on the first write to each page waits until its content is taken.

        Returns the seconds it took: that long a machine would have to stand still.
        """
        self._uffd.register(self._start, len(self._region))
        self._handler.start()
        began = time.perf_counter()
        self._uffd.protect(self._start, len(self._region))
        return time.perf_counter() - began

    def copy_clean(self) -> None:
        """Save every page that no writer was after first."""
        for offset in range(0, len(self._region), BUFFER):
            first, count = offset // PAGE, min(BUFFER, len(self._region) - offset) // PAGE
            with self._lock:
                content = memoryview(self._region[offset : offset + count * PAGE])
                taken = bytes(self._taken[first : first + count])
                self._taken[first : first + count] = b"\1" * count
            self.by_bulk += count - taken.count(1)
            # Pages that were taken before have newer content here; only what lies between them is written.
            position = 0
            for clean in taken.split(b"\1"):
                view = content[position * PAGE : (position + len(clean)) * PAGE]
                write_all(self._out_fd, [view] if view else [], offset + position * PAGE)
                position += len(clean) + 1

    def finish(self) -> None:
        """Let all writers go, end the handler and sync the file. Raises what went wrong in the handler."""
        if self._handler.ident is not None:
            self._uffd.release(self._start, len(self._region))
            os.eventfd_write(self._stop, 1)
            self._handler.join()
        os.close(self._stop)
        if self._failure is not None:
            raise self._failure
        os.fdatasync(self._out_fd)

    def _handle(self) -> None:
        poller = select.poll()
        poller.register(self._uffd, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            for address in self._uffd.read_faults() if self._uffd.fileno() in ready else []:
                self._take((address - self._start) // PAGE)
            if self._stop in ready:
                return

    def _take(self, page: int) -> None:
        offset = page * PAGE
        try:
            with self._lock:
                content = None if self._taken[page] else self._region[offset : offset + PAGE]
                self._taken[page] = 1
            if content is not None:
                self.by_fault += 1
                write_all(self._out_fd, [memoryview(content)], offset)
        except OSError as error:
            self._failure = error  # told by finish; the writer must go on whatever happens here
        finally:
            self._uffd.release(self._start + offset, PAGE)


@dataclass(frozen=True, slots=True)
class WpBenchResult:
    """What ``wp_bench`` measured. ``consistent`` says that the snapshot holds nothing written after arming."""

    region_mib: int
    pages: int
    populate_ms: float
    arm_ms: float
    bulk_ms: float
    finalize_ms: float
    pages_captured_by_fault: int
    pages_captured_by_bulk: int
    total_ms: float
    consistent: bool


def wp_bench(region_mib: int, snapshot_path: StrPath, *, keep: bool = False) -> WpBenchResult:
    """Snapshot a memfd of ``region_mib`` MiB, all 0x42, while a writer dirties every 16th page of it.

    The file ``snapshot_path`` is replaced, and removed again unless ``keep``. Blocks as long as it takes: call it in a
    thread. Raises ValueError for a bad size, OSError where userfaultfd or the file cannot be used.
    """
    if region_mib < 1:
        raise ValueError("a region of at least 1 MiB is needed")
    size = region_mib << 20
    began = time.perf_counter()
    out_fd = os.open(snapshot_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(out_fd, size)
        with _filled(size) as region:
            populated = time.perf_counter()
            with UserFaultFd() as uffd:
                snapshot = WpSnapshot(uffd, region, out_fd)
                writer = _Writer(region)
                try:
                    arm_seconds = snapshot.arm()
                    armed = time.perf_counter()
                    writer.start()
                    snapshot.copy_clean()
                    copied = time.perf_counter()
                finally:
                    snapshot.finish()
                    finished = time.perf_counter()
                    writer.join()
        consistent = _holds_only_pattern(out_fd, size)
    finally:
        os.close(out_fd)
        if not keep:
            os.unlink(snapshot_path)
    return WpBenchResult(
        region_mib=region_mib,
        pages=size // PAGE,
        populate_ms=(populated - began) * 1e3,
        arm_ms=arm_seconds * 1e3,
        bulk_ms=(copied - armed) * 1e3,
        finalize_ms=(finished - copied) * 1e3,
        pages_captured_by_fault=snapshot.by_fault,
        pages_captured_by_bulk=snapshot.by_bulk,
        total_ms=(finished - began) * 1e3,
        consistent=consistent,
    )


_PATTERN = b"\x42" * BUFFER
_DIRT = 0x99
_DIRTY_EVERY = 16


class _Writer:
    """Writes to every 16th page from the end backwards, so that it meets the bulk copy half way."""

    def __init__(self, region: mmap.mmap) -> None:
        self._region = region
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._write, name="forkd-wp-writer")

    def start(self) -> None:
        """Begin; returns when the first write went through, so at least one page is captured by a fault."""
        self._thread.start()
        self._first.wait()

    def join(self) -> None:
        """Wait for the last write."""
        if self._thread.ident is not None:
            self._thread.join()

    def _write(self) -> None:
        start = address_of(self._region)
        memset = ctypes.CDLL(None).memset
        memset.argtypes, memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
        for page in range(len(self._region) // PAGE - 1, -1, -_DIRTY_EVERY):
            # SAFETY: the page is inside the region, which stays mapped until this thread is joined. It must be a
            # foreign call: a write that waits and holds the interpreter's lock would keep the handler from running.
            memset(start + page * PAGE, _DIRT, PAGE)
            self._first.set()


def _filled(size: int) -> mmap.mmap:
    fd = os.memfd_create("forkd-wp-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        region = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)
    for offset in range(0, size, BUFFER):
        region[offset : offset + BUFFER] = _PATTERN
    return region


def _holds_only_pattern(fd: int, size: int) -> bool:
    return os.fstat(fd).st_size == size and all(
        os.pread(fd, BUFFER, offset) == _PATTERN for offset in range(0, size, BUFFER)
    )
