"""The rate of the CPU's time stamp counter, measured against the monotonic clock."""

from __future__ import annotations

import ctypes
import mmap
import time

# rdtsc; shl rdx, 32; or rax, rdx; ret
_RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")
_SPAN_NS = 50_000_000


def measure_tsc_khz() -> int:
    """Kilohertz of the TSC, good to about 0.01 %. Takes 50 ms; x86_64 only."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_RDTSC)
    # SAFETY: `page` outlives `rdtsc`; the code reads a counter, touches two scratch registers and returns.
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
    begin_ns, begin = time.monotonic_ns(), rdtsc()
    while (end_ns := time.monotonic_ns()) - begin_ns < _SPAN_NS:
        pass
    end = rdtsc()
    return int((end - begin) * 1_000_000 // (end_ns - begin_ns))
