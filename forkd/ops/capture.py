"""Run a branch mode on a sandbox into a staging directory. The one place where captures happen."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import trio

from forkd.sandbox import Sandbox
from forkd.specs.branch import BranchMode, Pause, Step
from forkd.specs.engine import Machine
from forkd.specs.errors import CaptureFailed
from forkd.specs.models import FileRef, Hardware, MemoryRef, Snapshot
from forkd.store.capture import MeasuredDelta, StageSink
from forkd.store.snapshots import Stage, content_id


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture wrote, and what it cost the source."""

    vmstate: FileRef
    memory: MemoryRef
    pause_ms: float
    capture_ms: float
    measured: MeasuredDelta | None

    def seal(self, manifest: Snapshot) -> Snapshot:
        """The manifest with its costs and, last, its content id."""
        measured = msgspec.structs.replace(
            manifest, pause_ms=round(self.pause_ms, 3), capture_ms=round(self.capture_ms, 3)
        )
        return msgspec.structs.replace(measured, content=content_id(measured))


def no_step(name: str) -> None:
    """Nobody watches the steps."""


async def capture_into_stage(
    sandbox: Sandbox,
    mode: BranchMode,
    stage: Stage,
    hardware: Hardware,
    *,
    measure_delta: bool = False,
    last: bool = False,
    step: Step = no_step,
    task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED,
) -> Captured:
    """Capture ``sandbox`` with ``mode``; ``task_status.started`` passes on the moment the source runs again.

    After its ``last`` capture it does not: whoever suspends it ends it then, or lets it run on.
    """
    began = time.monotonic()
    sink = StageSink(stage.directory, hardware.mem_mib << 20, measure_delta=measure_delta)
    pause = _Relay(task_status)
    async with sandbox.capturing:
        if not last:
            sandbox.check_stays()
        machine = Halted(sandbox.machine) if last else sandbox.machine
        await mode.capture(machine, sink, step, task_status=pause)
    if sink.memory is None or pause.value is None:
        raise CaptureFailed(f"branch mode {mode.name!r} ended without a capture")
    vmstate = await trio.to_thread.run_sync(sink.vmstate_ref)
    return Captured(vmstate, sink.memory, pause.value.pause_ms, (time.monotonic() - began) * 1000, sink.measured)


class Halted:
    """A machine that stays paused when a branch mode lets it run on; everything else is as the machine does it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.pid = machine.pid
        self.agent = machine.agent
        self.pause = machine.pause
        self.save_devices = machine.save_devices
        self.ram = machine.ram
        self.wait = machine.wait
        self.kill = machine.kill

    async def resume(self) -> None:
        """Not yet."""
        await trio.lowlevel.checkpoint()


class _Relay(trio.TaskStatus[Pause]):
    """Remembers the measured pause and passes it on to whoever waits for the source to run again."""

    def __init__(self, outer: trio.TaskStatus[Pause]) -> None:
        self._outer = outer
        self.value: Pause | None = None

    def started(self, value: Pause | None = None) -> None:
        """The source runs again."""
        assert value is not None
        self.value = value
        self._outer.started(value)
