"""Memory backend plugin: the image held in a sealed memfd, filled once and mapped privately by every child."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import trio

from forkd.linux.memfd import HugePagesUnavailable, create_sealed
from forkd.specs.engine import MemoryImage
from forkd.specs.errors import NoSpace
from forkd.specs.hookspecs import Check, hookimpl
from forkd.specs.host import Host
from forkd.specs.memory import MemoryBackend, MemoryLease

KEPT = 4


@dataclass(frozen=True, slots=True)
class _Key:
    """The image file as it was, so that a changed file is never taken for the old one."""

    inode: int
    mtime_ns: int
    size: int
    hugepages: bool


class MemfdBackend:
    """Keeps the last few images; older ones go as soon as nobody holds their lease.

    A machine that mapped one keeps it alive by itself.
    """

    name = "memfd"

    def __init__(self) -> None:
        self._held: dict[_Key, MemoryLease] = {}
        self._lock: trio.Lock | None = None

    async def lease(self, image: Path, size: int, *, hugepages: bool) -> MemoryLease:
        """A descriptor of ours that VMMs open through /proc."""
        if self._lock is None:
            self._lock = trio.Lock()
        status = image.stat()
        key = _Key(status.st_ino, status.st_mtime_ns, size, hugepages)
        async with self._lock:
            if key not in self._held:
                self._held[key] = await trio.to_thread.run_sync(self._fill, image, size, hugepages)
            lease = self._held[key] = self._held.pop(key)  # the one used last goes last
            while len(self._held) > KEPT:
                del self._held[next(iter(self._held))]
            return lease

    def _fill(self, image: Path, size: int, hugepages: bool) -> MemoryLease:
        warnings: tuple[str, ...] = ()
        try:
            descriptor = create_sealed("forkd-image", size, image, hugepages=hugepages)
        except HugePagesUnavailable as error:
            hugepages = False
            warnings = (f"no huge pages: {error}; using 4 KiB pages",)
            descriptor = create_sealed("forkd-image", size, image)
        except OSError as error:
            raise NoSpace(f"{size >> 20} MiB of memory for the image are not to be had: {error.strerror}") from error
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        lease = MemoryLease(MemoryImage(path, size, hugepages), warnings)
        weakref.finalize(lease, os.close, descriptor)
        return lease

    def close(self) -> None:
        """Close every descriptor whose lease nobody holds."""
        self._held.clear()


@hookimpl
def forkd_register_memory_backends(register: Callable[[MemoryBackend], None]) -> None:
    """Hand over the backend."""
    register(MemfdBackend())


@hookimpl
def forkd_doctor_checks(host: Host) -> Iterable[Check]:
    """Are there memfds and huge pages?"""
    why = host.why_not("memfd")
    if why is None:
        yield Check("memfd_create", "PASS", "works")
    else:
        yield Check("memfd_create", "WARN", f"{why}; --live-fork needs it", "use a newer kernel")
    numbers = dict(re.findall(r"^HugePages_(\w+):\s*(\d+)", host.read("/proc/meminfo") or "", re.MULTILINE))
    total, free = int(numbers.get("Total", 0)), int(numbers.get("Free", 0))
    if free:
        yield Check("hugepages", "PASS", f"{free} of {total} pages of 2 MiB are free")
    else:
        detail = f"all {total} are in use" if total else "none are reserved"
        yield Check("hugepages", "WARN", f"{detail}; only --hugepages needs them", "sysctl -w vm.nr_hugepages=512")
