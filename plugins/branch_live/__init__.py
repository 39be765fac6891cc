"""Branch mode plugin: pause, save device state, freeze RAM in a ghost, resume; then write the changes from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import trio

from forkd.linux.ghost import Ghost
from forkd.linux.ptrace import TraceError
from forkd.specs.branch import BranchMode, CaptureSink, MemoryView, Pause, Step
from forkd.specs.engine import GHOST, Machine
from forkd.specs.errors import CaptureFailed
from forkd.specs.hookspecs import hookimpl

T = TypeVar("T")


class LiveMode:
    """The source stands still for a few milliseconds, however much it changed and however slow the disk is."""

    name = "live"
    needs = frozenset({GHOST})
    keeps_running = True

    async def capture(
        self,
        machine: Machine,
        sink: CaptureSink,
        step: Step,
        task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Pause, device state, ghost, resume; then the changed pages, from the ghost."""
        regions = tuple(machine.ram())
        # Before the pause: reading a VMM's mappings and code takes longer than all the rest.
        ghost = await _traced(lambda: Ghost.prepare(machine.pid))
        try:
            began = time.monotonic()
            try:
                step("pause")
                await machine.pause()
                step("devices")
                devices = await machine.save_devices()
                step("ghost")
                await _traced(ghost.appear)
            finally:
                with trio.CancelScope(shield=True):
                    await machine.resume()
            task_status.started(Pause((time.monotonic() - began) * 1000))
            step("memory")
            await sink.write_devices(devices)
            await sink.write_delta(MemoryView(ghost.pid, regions))
            step("written")
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(ghost.close)


async def _traced(work: Callable[[], T]) -> T:
    # A thread of its own: for those all share it may have to wait, and the source stands still.
    try:
        return await trio.to_thread.run_sync(work, limiter=trio.CapacityLimiter(1))
    except TraceError as error:
        raise CaptureFailed(
            f"the VMM cannot be frozen: {error}", hint="use mode diff, which needs no tracing; forkd doctor says more"
        ) from error


@hookimpl
def forkd_register_branch_modes(register: Callable[[BranchMode], None]) -> None:
    """Hand over the mode."""
    register(LiveMode())
