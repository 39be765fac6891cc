"""A machine without a VMM: a small process whose memory changes all the time in an order that can be checked."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
from pathlib import Path

import trio
import trio.testing

from forkd import frozen
from forkd.linux.mapping import find_ram
from forkd.linux.process import ProcessHandle
from forkd.specs.engine import RamRegion
from forkd.specs.errors import EngineError, MachineGone

PAGE = 4096
_STAMP = struct.Struct("<Q")


class StampingMachine:
    """Fulfils ``Machine``: RAM is a private mapping of ``image``, of which the first ``stamped`` bytes keep changing.

    An increasing counter is written to the start of one page after the other, so a memory taken at one instant has at
    most one place where the counter drops, and it drops by one.
    """

    def __init__(self, image: Path, stamped: int) -> None:
        self._image = image
        command = frozen.module_command("forkd.testing.stamper", str(image), str(stamped))
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=frozen.module_environment())
        assert child.stdout is not None
        with child.stdout as said:
            said.readline()
        self._process = ProcessHandle.of_child(child)
        self._agent, self._guest = trio.testing.memory_stream_pair()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def agent(self) -> trio.abc.Stream:
        """A channel on which nobody answers."""
        return self._agent

    async def pause(self) -> None:
        """SIGSTOP, and wait until it stands."""
        self._process.send_signal(signal.SIGSTOP)
        while self._state() not in "Tt":
            await trio.lowlevel.checkpoint()

    async def resume(self) -> None:
        """SIGCONT."""
        self._state()
        self._process.send_signal(signal.SIGCONT)

    async def save_devices(self) -> bytes:
        """There are none; the first stamp stands for them."""
        if self._state() not in "Tt":
            raise EngineError("device state can be saved of a paused machine only")
        return _STAMP.pack(self.stamp())

    def ram(self) -> list[RamRegion]:
        """The one mapping."""
        try:
            return [RamRegion(*region) for region in find_ram(self.pid, self._image)]
        except OSError as error:
            raise MachineGone(f"process {self.pid} is gone: {error}") from error

    async def wait(self) -> str:
        """How it ended."""
        return f"process {self.pid} ended with status {await self._process.wait()}"

    async def kill(self) -> None:
        """SIGKILL, for certain."""
        with trio.CancelScope(shield=True):
            self._process.kill()
            await self._process.wait()

    def stamp(self) -> int:
        """The counter in the first page, as it is now."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(self.ram()[0].address)
            return int(_STAMP.unpack(memory.read(_STAMP.size))[0])

    def _state(self) -> str:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError) as error:
            raise MachineGone(f"process {self.pid} is gone") from error
        if state in "ZX":
            raise MachineGone(f"process {self.pid} has ended")
        return state


def stamps(image: Path, stamped: int) -> list[int]:
    """The counters in a memory image, page by page."""
    with open(image, "rb") as source:
        return [int(_STAMP.unpack(os.pread(source.fileno(), 8, at))[0]) for at in range(0, stamped, PAGE)]


def assert_one_instant(values: list[int]) -> None:
    """Fail unless the counters can have stood side by side: one drop at most, and by one."""
    drops = [(index, a, b) for index, (a, b) in enumerate(itertools.pairwise(values)) if a != b]
    assert len(drops) <= 1, f"several cuts: {drops[:5]}"
    assert all(a - b == 1 for _, a, b in drops), f"the cut is not between two rounds: {drops}"
