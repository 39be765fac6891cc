"""Branch mode plugin: pause, write all of RAM, resume. The result stands alone, without a parent."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from forkd.specs.branch import BranchMode, CaptureSink, MemoryView, Pause, Step
from forkd.specs.engine import Machine
from forkd.specs.hookspecs import hookimpl


class FullMode:
    """The source stands still until the last byte is written."""

    name = "full"
    needs: frozenset[str] = frozenset()
    keeps_running = False

    async def capture(
        self,
        machine: Machine,
        sink: CaptureSink,
        step: Step,
        task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Pause, device state, all of RAM, resume."""
        began = time.monotonic()
        try:
            step("pause")
            await machine.pause()
            step("devices")
            devices = await machine.save_devices()
            step("memory")
            await sink.write_image(MemoryView(machine.pid, tuple(machine.ram())))
        finally:
            with trio.CancelScope(shield=True):
                await machine.resume()
        task_status.started(Pause((time.monotonic() - began) * 1000))
        step("resumed")
        await sink.write_devices(devices)


@hookimpl
def forkd_register_branch_modes(register: Callable[[BranchMode], None]) -> None:
    """Hand over the mode."""
    register(FullMode())
