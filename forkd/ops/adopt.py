"""Take over what an earlier daemon left: adopt running sandboxes, end half-made ones, reclaim the rest."""

from __future__ import annotations

import logging

import trio

from forkd.inventory import Row
from forkd.linux.process import end_process
from forkd.ops.cleanup import cleanup
from forkd.ops.lifecycle import keep_time
from forkd.ops.workspaces import settle_workspaces
from forkd.runtime import Runtime
from forkd.sandbox import Plan, Running, run_sandbox
from forkd.slots import workers_in
from forkd.specs.engine import Machine, Slot
from forkd.specs.errors import ForkdError, MachineGone
from forkd.store.snapshots import Stored

PATIENCE = 10.0
log = logging.getLogger("forkd")


async def adopt_all(runtime: Runtime) -> None:
    """Adopt every sandbox written down whose VMM still runs; nothing else of an earlier daemon is left.

    Returns when all are adopted or gone, or after a while with the silent ones still in ``runtime.adopting``.
    """
    rows = {row.id: row for row in runtime.inventory.rows()}
    slots = {slot.id: slot for slot in runtime.slots.existing()}
    for slot in slots.values():
        if slot.id not in rows:
            await _end_half_made(runtime, slot)
    runtime.adopting.update(rows)
    done = trio.Event()
    for row in rows.values():
        runtime.nursery.start_soon(_adopt, runtime, row, slots.get(row.id), done)
    if not rows:
        done.set()
    with trio.move_on_after(PATIENCE):
        await done.wait()
    if rows:
        log.info("adopted %d of %d sandboxes of an earlier daemon", len(runtime.sandboxes), len(rows))
    await settle_workspaces(runtime)
    for leftover in await cleanup(runtime, remove=True, kept=False):
        if leftover.action == "DEL":
            log.info("removed %s: %s", leftover.path, leftover.reason)


async def _adopt(runtime: Runtime, row: Row, slot: Slot | None, done: trio.Event) -> None:
    try:
        if slot is None:
            await end_process(row.pid, row.starttime)
            raise ForkdError("its directory is gone")
        keep_time(runtime, await runtime.nursery.start(run_sandbox, runtime, _plan(runtime, row, slot)))
        log.info("adopted sandbox %s (VMM %d)", row.id, row.pid)
    except ForkdError as error:
        reason = f"it could not be taken over after a restart of the daemon: {error.message}"
        log.warning("sandbox %s has ended: %s", row.id, reason)
        runtime.endings[row.id] = reason
        runtime.inventory.remove(row.id)
        runtime.observe("end", id=row.id, reason=reason)
    finally:
        runtime.adopting.discard(row.id)
        if not runtime.adopting:
            done.set()


def _plan(runtime: Runtime, row: Row, slot: Slot) -> Plan:
    async def start(slot: Slot) -> Machine:
        try:
            machine = await runtime.engine(row.source.platform.engine).adopt(slot, row.pid, row.starttime)
            if row.info.status == "running":
                await machine.resume()  # a capture that died with the daemon may have left it standing
        except OSError as error:  # it may end at any moment, or let us open nothing
            raise MachineGone(f"VMM {row.pid} of {row.id} cannot be reached: {error}") from error
        return machine

    if runtime.on_up is None:
        row.info.guest_addr = ""  # a port of the daemon that was; a networked one is given its own address again
    source = Stored(runtime.snapshots.path(row.source.tag), row.source)
    return Plan(row.id, start, row.source.agent_sync, row.info, source, adopted=Running(slot, row.pid, row.starttime))


async def _end_half_made(runtime: Runtime, slot: Slot) -> None:
    """A machine nobody was told about."""
    pids = await trio.to_thread.run_sync(workers_in, slot.directory)
    for pid in pids:
        await end_process(pid)
    await trio.to_thread.run_sync(runtime.slots.give_back, slot)
    log.info("ended half-made sandbox %s (%d processes)", slot.id, len(pids))
