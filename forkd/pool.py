"""Warm pools: machines restored ahead for a snapshot's next children, warm and paused until somebody asks for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from forkd.linux.memory_free import available_share
from forkd.slots import SlotOwner, new_sandbox_id
from forkd.specs.engine import Machine, Slot
from forkd.specs.errors import ForkdError
from forkd.specs.models import PoolInfo
from forkd.templates import PRESSURE
from forkd.warming import Recipe, restore_warm

if TYPE_CHECKING:
    from forkd.runtime import Runtime

MAX_POOL = 100
RELIEF = 0.15
"""A pool drained below ``PRESSURE`` is filled again from this share of free memory on, so that it does not flutter."""
TEND_SECONDS = 15.0
REFILL_SECONDS = 0.5
"""How long after a claim its place is filled: whoever claimed has the processors to himself until then."""
log = logging.getLogger("forkd")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A paused machine in a slot, whose name will be the sandbox's id; who else it is, it is told when claimed."""

    recipe: Recipe
    slot: Slot
    machine: Machine

    async def claim(self, slot: Slot) -> Machine:
        """The machine, under the limits of whoever claims it, running, with nothing yet said in its new session."""
        slot.admit(self.machine.pid)
        await self.machine.resume()
        return self.machine


@dataclass(slots=True)
class Pool:
    """The machines of one snapshot; ``recipe`` says what they are to be started from now."""

    tag: str
    recipe: Callable[[], Awaitable[Recipe]]
    size: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    problem: str | None = None
    """Why fewer wait than shall, if that is not about to change."""
    used: float = field(default_factory=time.monotonic)
    claimed: trio.Event = field(default_factory=trio.Event)
    lock: trio.Lock = field(default_factory=trio.Lock)

    def info(self) -> PoolInfo:
        """The pool as the REST API shows it."""
        return PoolInfo(tag=self.tag, size=self.size, waiting=len(self.waiting), problem=self.problem)


@dataclass(slots=True)
class Pools:
    """One for each tag somebody wanted one for.

    They are drained when memory is short, when nobody asked for the snapshot for long, when it is removed and when the
    runtime is left. A daemon that is killed leaves its waiting machines in slots nobody wrote down: the next one, or
    ``forkd cleanup``, ends them.
    """

    pools: dict[str, Pool] = field(default_factory=dict)
    available: Callable[[], float] = available_share

    def take(self, tag: str, recipe: Recipe) -> Waiting | None:
        """A machine that waits for exactly this; the caller must claim or end it."""
        if (pool := self.pools.get(tag)) is None:
            return None
        pool.used = time.monotonic()
        pool.claimed.set()
        for found in pool.waiting:
            if found.recipe == recipe:
                pool.waiting.remove(found)
                return found
        return None

    async def resize(
        self, runtime: Runtime, tag: str, size: int, recipe: Callable[[], Awaitable[Recipe]] | None = None
    ) -> PoolInfo:
        """Let ``size`` machines wait; returns when they do, or when none is left for 0."""
        if recipe is not None and tag not in self.pools:
            self.pools[tag] = Pool(tag, recipe)
            runtime.nursery.start_soon(self._keep, runtime, self.pools[tag])
        if (pool := self.pools.get(tag)) is None:
            return PoolInfo(tag=tag, size=0, waiting=0)
        pool.size = size
        pool.used = time.monotonic()
        await self.tend(runtime, pool)
        if not pool.size and self.pools.get(tag) is pool:
            del self.pools[tag]
            pool.claimed.set()
        return pool.info()

    async def tend(self, runtime: Runtime, pool: Pool) -> None:
        """Fill the pool or drain it, as things are now. What hinders it is noted."""
        async with pool.lock:
            share, pool.problem = self.available(), None
            if share < PRESSURE:
                pool.problem = "memory is short: no machine waits until there is more"
                await _drain(runtime, pool, 0)
            elif time.monotonic() - pool.used > runtime.settings.pool_idle_secs:
                pool.problem = "nobody asked for it for long: it is filled again when somebody does"
                await _drain(runtime, pool, 0)
            else:
                await _drain(runtime, pool, pool.size)
                if pool.size and (share >= RELIEF or pool.waiting):
                    await _fill(runtime, pool)

    async def close(self, slots: SlotOwner) -> None:
        """End all that wait."""
        for pool in self.pools.values():
            while pool.waiting:
                await end_waiting(slots, pool.waiting.pop())

    async def _keep(self, runtime: Runtime, pool: Pool) -> None:
        while True:
            with trio.move_on_after(TEND_SECONDS):
                await pool.claimed.wait()
                await trio.sleep(REFILL_SECONDS)
            if self.pools.get(pool.tag) is not pool:
                return
            pool.claimed = trio.Event()
            try:
                await self.tend(runtime, pool)
            except Exception as error:  # nobody waits for it: the next round tries again
                pool.problem = f"it failed unexpectedly: {error}"
                log.exception("the pool of %s cannot be tended", pool.tag)


async def end_waiting(slots: SlotOwner, waiting: Waiting) -> None:
    """End a machine nobody claimed, and give its slot back."""
    with trio.CancelScope(shield=True):
        await waiting.machine.kill()
        await slots.release(waiting.slot)


async def _drain(runtime: Runtime, pool: Pool, size: int) -> None:
    while len(pool.waiting) > size:
        await end_waiting(runtime.slots, pool.waiting.pop())


async def _fill(runtime: Runtime, pool: Pool) -> None:
    """One after the other, so that it is felt little; the size may change meanwhile."""
    try:
        recipe = await pool.recipe()
        for stale in [each for each in pool.waiting if each.recipe != recipe]:
            pool.waiting.remove(stale)
            await end_waiting(runtime.slots, stale)
        while len(pool.waiting) < pool.size:
            async with runtime.start_limit:
                pool.waiting.append(await _start(runtime, pool.tag, recipe))
    except ForkdError as error:
        pool.problem = error.message
        log.warning("the pool of %s is not full: %s", pool.tag, error.message)


async def _start(runtime: Runtime, tag: str, recipe: Recipe) -> Waiting:
    slot = runtime.slots.take(new_sandbox_id(), tag)
    machine: Machine | None = None
    try:
        machine, link = await restore_warm(runtime, recipe, slot)
        waiting = Waiting(recipe, slot, machine)
        await link.let_go()
        await machine.pause()
        return waiting
    except BaseException:
        with trio.CancelScope(shield=True):
            if machine is not None:
                await machine.kill()
            await runtime.slots.release(slot)
        raise
