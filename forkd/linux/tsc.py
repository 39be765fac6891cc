"""The rate of the CPU's time stamp counter, measured against the monotonic clock."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

# rdtsc; shl rdx, 32; or rax, rdx; ret
_RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")
_SPAN_SECONDS = 0.05
_TRIES = 32


def measure_tsc_khz() -> int:
    """Kilohertz of the TSC, good to about 0.01 % however busy the host is. Takes 50 ms; x86_64 only."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_RDTSC)
    # SAFETY: `page` outlives `rdtsc`; the code reads a counter, touches two scratch registers and returns.
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    # PYFUNCTYPE keeps the interpreter lock: a thread that waits for it would come between clock and counter.
    rdtsc = ctypes.PYFUNCTYPE(ctypes.c_uint64)(address)
    begin_ns, begin = read_together(time.monotonic_ns, rdtsc)
    time.sleep(_SPAN_SECONDS)
    end_ns, end = read_together(time.monotonic_ns, rdtsc)
    return (end - begin) * 1_000_000 // (end_ns - begin_ns)


def read_together(clock: Callable[[], int], counter: Callable[[], int]) -> tuple[int, int]:
    """Both at the same moment: of some tries the one in which nothing came between."""
    tries = [(clock(), counter(), clock()) for _ in range(_TRIES)]
    before, count, after = min(tries, key=lambda read: read[2] - read[0])
    return (before + after) // 2, count
