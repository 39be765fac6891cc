"""The sink of a capture: device state and memory written into a staging directory, digested on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from forkd.linux import pagemap
from forkd.specs.branch import MemoryView
from forkd.specs.errors import CaptureFailed
from forkd.specs.models import FileRef, MemoryRef
from forkd.store import deltas, digests, files
from forkd.store.snapshots import DELTA, IMAGE, VMSTATE

PAGE = 4096


@dataclass(frozen=True, slots=True)
class MeasuredDelta:
    """What a delta would have cost, found out by writing one and throwing it away."""

    milliseconds: float
    size: int


class StageSink:
    """Writes into ``directory``; afterwards ``memory`` and ``vmstate_ref`` say what was written.

    With ``measure_delta`` an image is preceded by a delta that is measured and removed.
    """

    def __init__(self, directory: Path, ram_bytes: int, *, measure_delta: bool = False) -> None:
        self._directory = directory
        self._ram_bytes = ram_bytes
        self._measure_delta = measure_delta
        self.measured: MeasuredDelta | None = None
        self.memory: MemoryRef | None = None

    @property
    def vmstate(self) -> Path:
        """The device state file."""
        return self._directory / VMSTATE

    async def write_devices(self, state: bytes) -> None:
        """Device state, as it is."""

        def work() -> None:
            with files.disk_full_as_no_space(self._directory), open(self.vmstate, "xb") as out:
                out.write(state)

        await trio.to_thread.run_sync(work)

    def vmstate_ref(self) -> FileRef:
        """Size and digest of the device state as written."""
        return FileRef(digest=digests.sha256_file(self.vmstate), size=self.vmstate.stat().st_size)

    async def write_image(self, memory: MemoryView) -> None:
        """All of RAM, zero pages as holes."""
        await self._write(self._image, memory)

    async def write_delta(self, memory: MemoryView) -> None:
        """The changed pages only."""
        await self._write(self._delta, memory)

    async def _write(self, write: Callable[[int, MemoryView], MemoryRef], memory: MemoryView) -> None:
        def work() -> MemoryRef:
            with files.disk_full_as_no_space(self._directory):
                try:
                    source = os.open(f"/proc/{memory.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CaptureFailed(f"RAM of process {memory.pid} cannot be read: {error.strerror}") from error
                try:
                    return write(source, memory)
                finally:
                    os.close(source)

        # Not abandoned on cancellation: the process it reads from must outlive the reading.
        self.memory = await trio.to_thread.run_sync(work)

    def _measure(self, source: int, memory: MemoryView) -> None:
        began = time.monotonic()
        size = self._delta(source, memory).size
        (self._directory / DELTA).unlink()
        self.measured = MeasuredDelta((time.monotonic() - began) * 1000, size)

    def _image(self, source: int, memory: MemoryView) -> MemoryRef:
        if self._measure_delta:
            self._measure(source, memory)
        path = self._directory / IMAGE
        with open(path, "xb") as out:
            os.ftruncate(out.fileno(), self._ram_bytes)
            regions = [(region.address, region.length, region.offset) for region in memory.regions]
            digest, _ = digests.capture_image(source, regions, out.fileno())
        return MemoryRef(kind="image", digest=digest, size=self._ram_bytes)

    def _delta(self, source: int, memory: MemoryView) -> MemoryRef:
        path = self._directory / DELTA
        with open(path, "xb") as out:
            writer = deltas.DeltaWriter(out.fileno(), self._ram_bytes // PAGE)
            for region in memory.regions:
                runs = pagemap.changed_pages(memory.pid, region.address, region.length)
                writer.add_from_process(source, region.address, region.offset // PAGE, runs)
            info = writer.finish()
        pages = info.data_pages + info.zero_pages
        return MemoryRef(kind="delta", digest=info.digest, size=info.size, changed_pages=pages)
