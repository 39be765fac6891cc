"""Branch mode plugin: pause, write the pages that changed since the source was forked, resume."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from forkd.specs.branch import BranchMode, CaptureSink, MemoryView, Pause, Step
from forkd.specs.engine import Machine
from forkd.specs.hookspecs import hookimpl


class DiffMode:
    """The source stands still while its changes are written; what it did not change costs nothing."""

    name = "diff"
    needs: frozenset[str] = frozenset()
    keeps_running = False

    async def capture(
        self,
        machine: Machine,
        sink: CaptureSink,
        step: Step,
        task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Pause, device state, changed pages, resume."""
        began = time.monotonic()
        try:
            step("pause")
            await machine.pause()
            step("devices")
            devices = await machine.save_devices()
            step("memory")
            await sink.write_delta(MemoryView(machine.pid, tuple(machine.ram())))
        finally:
            with trio.CancelScope(shield=True):
                await machine.resume()
        task_status.started(Pause((time.monotonic() - began) * 1000))
        step("resumed")
        await sink.write_devices(devices)


@hookimpl
def forkd_register_branch_modes(register: Callable[[BranchMode], None]) -> None:
    """Hand over the mode."""
    register(DiffMode())
