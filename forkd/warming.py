"""Warm machines: restored, and asked so often that what their children do first is translated already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from forkd.canary import Canary
from forkd.guestlink import GuestLink, ResumeInfo
from forkd.linux.mapping import read_totals
from forkd.slots import new_sandbox_id
from forkd.specs.engine import Engine, Machine, MachineTemplate, RestoreSpec, Slot, TemplateEngine
from forkd.specs.errors import GuestTimeout

if TYPE_CHECKING:
    from forkd.runtime import Runtime

EVALS = (
    "1",
    "sum(n * n for n in range(9))",
    "print(f'{1.5:.3f}')",
    "numpy.ones(3).tolist() + numpy.zeros(3).tolist()",
)
"""What warm machines are asked: their clones then have the guest's code for the like translated already. Those that
are errors (another language, no numpy) warm what errors need."""
LIMITS = (None, 60, 60.5)
"""A machine goes through a clone's first moments with each of these time limits before it is frozen (none, whole and
broken: the guest takes another way for each). What clones need not translate they need not write to memory either."""
RIPENING = 10
RIPENING_PAUSE = 1.0
"""How many more times, and at what distance in seconds, until the guest's kernel has done all it does every few
seconds, which the clones then need not translate."""
READY_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a machine is made from: a snapshot, by content, over one memory image."""

    content: str
    agent_sync: str
    engine: Engine
    spec: RestoreSpec

    @property
    def key(self) -> tuple[str, str]:
        """What templates are told apart by."""
        return self.content, self.spec.memory.path


@dataclass(frozen=True, slots=True)
class Grown:
    """A frozen machine, what its clones must still have, and its memory."""

    template: MachineTemplate
    canary: Canary
    bytes: int


async def restore_warm(runtime: Runtime, recipe: Recipe, slot: Slot) -> tuple[Machine, GuestLink]:
    """A restored machine that has answered often enough for its guest's code to be translated; the caller's to end.

    Raises EngineError, GuestError; then, as on cancellation, no process is left.
    """
    machine = await recipe.engine.restore(recipe.spec, slot)
    try:
        link = await _new_session(runtime, recipe, slot, machine)
        with _in_time(slot):
            await link.ready()
            for count in range(runtime.settings.template_warmup):
                await link.eval(EVALS[count % len(EVALS)], timeout=READY_TIMEOUT)
        return machine, link
    except BaseException:
        await machine.kill()
        raise


async def grow_template(
    runtime: Runtime, recipe: Recipe, first: Callable[[Grown], None], ripe: Callable[[Grown], Awaitable[None]]
) -> None:
    """Restore a machine, warm it and freeze it for ``first``; let it ripen, and freeze it for ``ripe``.

    The machine itself is ended. Raises EngineError, GuestError.
    """
    engine = recipe.engine
    assert isinstance(engine, TemplateEngine)
    slot = runtime.slots.take(new_sandbox_id())
    machine: Machine | None = None
    try:
        machine, link = await restore_warm(runtime, recipe, slot)
        with _in_time(slot):
            canary = await Canary.take(machine, link)
        for limit in LIMITS:
            link = await _rehearse(runtime, recipe, slot, machine, link, canary, limit)
        # The link stays open until the machine is frozen: a guest whose host end is closed would poll.
        first(await _freeze(engine, machine, slot, canary, resume=True))
        for count in range(RIPENING):
            await trio.sleep(RIPENING_PAUSE)
            link = await _rehearse(runtime, recipe, slot, machine, link, canary, LIMITS[count % len(LIMITS)])
        await ripe(await _freeze(engine, machine, slot, canary, resume=False))
    finally:
        with trio.CancelScope(shield=True):
            if machine is not None:
                await machine.kill()
            await trio.to_thread.run_sync(runtime.slots.give_back, slot)


async def _new_session(runtime: Runtime, recipe: Recipe, slot: Slot, machine: Machine) -> GuestLink:
    sync = bytes.fromhex(recipe.agent_sync)
    return await GuestLink.open(machine.agent, sync, runtime.nursery, resume=ResumeInfo.fresh(slot.id))


async def _rehearse(
    runtime: Runtime, recipe: Recipe, slot: Slot, machine: Machine, link: GuestLink, canary: Canary, limit: float | None
) -> GuestLink:
    """Do what every clone will do first: a new session, the canary, some evals. Raises EngineError, GuestError."""
    with _in_time(slot):
        await link.let_go()
        link = await _new_session(runtime, recipe, slot, machine)
        async with canary.ask(link) as asked:
            await link.ready()
            await canary.check(machine, asked)
        for code in EVALS:
            await link.eval(code, timeout=limit)
    return link


@contextmanager
def _in_time(slot: Slot) -> Iterator[None]:
    with trio.move_on_after(READY_TIMEOUT) as scope:
        yield
    if scope.cancelled_caught:
        raise GuestTimeout(f"the guest of {slot.id} was not warm within {READY_TIMEOUT:g} s")


async def _freeze(engine: TemplateEngine, machine: Machine, slot: Slot, canary: Canary, *, resume: bool) -> Grown:
    template = await engine.freeze(machine, slot, resume=resume)
    try:
        return Grown(template, canary, await trio.to_thread.run_sync(_private_bytes, template.pid))
    except BaseException:
        await template.close()
        raise


def _private_bytes(pid: int) -> int:
    totals = read_totals(pid)
    return totals["Private_Dirty"] + totals["Private_Clean"]
