"""Branch mode: like diff, and it says in the log how much it captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import trio

from forkd.specs.branch import BranchMode, CaptureSink, MemoryView, Pause, Step
from forkd.specs.engine import Machine
from forkd.specs.hookspecs import hookimpl

forkd_contract = 1
log = logging.getLogger(__name__)


class SkeletonBranchMode:
    """Used as ``forkd snapshot --mode skeleton_branch_mode``, and by ``"mode"`` in the REST API."""

    name = "skeleton_branch_mode"
    needs: frozenset[str] = frozenset()
    keeps_running = False

    async def capture(
        self,
        machine: Machine,
        sink: CaptureSink,
        step: Step,
        task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Pause, device state, changed pages, resume. Whatever happens, the guest runs again."""
        began = time.monotonic()
        try:
            step("pause")
            await machine.pause()
            step("devices")
            devices = await machine.save_devices()
            step("memory")
            regions = tuple(machine.ram())
            await sink.write_delta(MemoryView(machine.pid, regions))
        finally:
            with trio.CancelScope(shield=True):
                await machine.resume()
        pause = Pause((time.monotonic() - began) * 1000)
        log.info("%d MiB of RAM looked through in %.0f ms", sum(one.length for one in regions) >> 20, pause.pause_ms)
        task_status.started(pause)
        await sink.write_devices(devices)


@hookimpl
def forkd_register_branch_modes(register: Callable[[BranchMode], None]) -> None:
    """Called once at start."""
    register(SkeletonBranchMode())
