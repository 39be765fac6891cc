"""Branch mode ``lean``: captures as live does, and leaves out pages that were written but hold what they held before.

Reference counts that went up and down again, stacks, flags set and cleared: much of what a guest "changed" since it was
forked is, byte for byte, its parent's. The pause is that of live; the comparison happens after it, on the ghost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import trio

from forkd.linux.ghost import Ghost, unforked_ranges
from forkd.linux.mapping import read_maps
from forkd.linux.pagemap import PAGE, changed_pages
from forkd.linux.ptrace import TraceError
from forkd.specs.branch import BranchMode, CaptureSink, MemoryView, Pause, Step
from forkd.specs.engine import GHOST, Machine, RamRegion
from forkd.specs.errors import CaptureFailed
from forkd.specs.hookspecs import hookimpl

__version__ = "0.1.0"
forkd_contract = 1
CHUNK_PAGES = 256


class LeanMode:
    """As long a pause as live, and the smallest delta there can be."""

    name = "lean"
    needs = frozenset({GHOST})
    keeps_running = True

    async def capture(
        self,
        machine: Machine,
        sink: CaptureSink,
        step: Step,
        task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Pause, device state, ghost, resume; then the pages that really differ, from the ghost."""
        regions = tuple(machine.ram())
        unforked = await trio.to_thread.run_sync(unforked_ranges, machine.pid)
        ghost: Ghost | None = None
        began = time.monotonic()
        try:
            try:
                step("pause")
                await machine.pause()
                step("devices")
                devices = await machine.save_devices()
                step("ghost")
                ghost = await trio.to_thread.run_sync(lambda: Ghost.of(machine.pid, unforked))
            finally:
                with trio.CancelScope(shield=True):
                    await machine.resume()
            task_status.started(Pause((time.monotonic() - began) * 1000))
            await sink.write_devices(devices)
            step("compare")
            differing = await trio.to_thread.run_sync(really_changed, ghost.pid, regions)
            step("memory")
            await sink.write_delta(MemoryView(ghost.pid, differing))
        except (TraceError, OSError) as error:
            raise CaptureFailed(f"VMM {machine.pid} cannot be captured: {error}", hint="use mode diff") from error
        finally:
            if ghost is not None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(ghost.close)


def really_changed(pid: int, regions: tuple[RamRegion, ...]) -> tuple[RamRegion, ...]:
    """The parts of ``regions`` whose pages differ from the file they are a private mapping of."""
    found: list[RamRegion] = []
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for region in regions:
            image = _image_below(pid, region)
            try:
                for first, count in _differing(pid, memory, image, region):
                    at = first * PAGE
                    found.append(RamRegion(region.address + at, count * PAGE, region.offset + at))
            finally:
                os.close(image)
    finally:
        os.close(memory)
    return tuple(found)


def _image_below(pid: int, region: RamRegion) -> int:
    """The file a region maps, opened through /proc, so that a deleted file or a memfd will do as well."""
    for mapping in read_maps(pid):
        if mapping.start <= region.address < mapping.end:
            return os.open(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}", os.O_RDONLY | os.O_CLOEXEC)
    raise CaptureFailed(f"process {pid} has no mapping at {region.address:#x}")


def _differing(pid: int, memory: int, image: int, region: RamRegion) -> Iterator[tuple[int, int]]:
    """Runs of pages ``(first, count)`` that are not what the image has there."""
    for first, count in changed_pages(pid, region.address, region.length):
        for begin in range(first, first + count, CHUNK_PAGES):
            pages = min(CHUNK_PAGES, first + count - begin)
            now = os.pread(memory, pages * PAGE, region.address + begin * PAGE)
            before = os.pread(image, pages * PAGE, region.offset + begin * PAGE).ljust(pages * PAGE, b"\0")
            yield from _runs(begin, pages, now, before)


def _runs(begin: int, pages: int, now: bytes, before: bytes) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for index in range(pages):
        at = index * PAGE
        if now[at : at + PAGE] != before[at : at + PAGE]:
            start = index if start is None else start
        elif start is not None:
            yield begin + start, index - start
            start = None
    if start is not None:
        yield begin + start, pages - start


@hookimpl
def forkd_register_branch_modes(register: Callable[[BranchMode], None]) -> None:
    """Hand over the mode."""
    register(LeanMode())
