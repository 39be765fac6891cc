"""Templates kept warm: one frozen machine for each snapshot in use, from which children are cloned."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from forkd.canary import Canary
from forkd.guestlink import GuestLink, ResumeInfo
from forkd.linux.mapping import read_totals
from forkd.linux.memory_free import available_share
from forkd.slots import new_sandbox_id
from forkd.specs.engine import TEMPLATE, Engine, Machine, MachineTemplate, RestoreSpec, Slot, TemplateEngine
from forkd.specs.errors import EngineError, GuestError, GuestTimeout

if TYPE_CHECKING:
    from forkd.runtime import Runtime

SPAWN = ("auto", "template", "restore")
AUTO_CHILDREN = 4
"""From so many children in one request on, ``auto`` makes a template first: it costs as much as restoring three."""
AUTO_REQUESTS = 2
"""With so many requests for the same snapshot, ``auto`` makes a template beside them, for the next one."""
MAX_FAILURES = 3
TIDY_SECONDS = 15.0
PRESSURE = 0.10
WARM_UP = (
    "1",
    "sum(n * n for n in range(9))",
    "print(f'{1.5:.3f}')",
    "numpy.ones(3).tolist() + numpy.zeros(3).tolist()",
)
"""Evals a template is warmed with: its clones then have the guest's code for the like translated already. Those that
are errors (another language, no numpy) warm what errors need."""
READY_TIMEOUT = 60.0
log = logging.getLogger("forkd")


@dataclass(slots=True)
class SpawnCounts:
    """How children came to be, since this process began."""

    clones: int = 0
    restores: int = 0
    claims: int = 0
    """Restored children whose machine was waiting for them, warm."""
    refusals: int = 0
    """Templates that could not be made."""
    fallbacks: int = 0
    """Children made in another way, because their clone, or the machine that waited for them, failed."""
    made: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a template is made from: a snapshot, by content, over one memory image."""

    content: str
    agent_sync: str
    engine: Engine
    spec: RestoreSpec

    @property
    def key(self) -> tuple[str, str]:
        """What templates are told apart by."""
        return self.content, self.spec.memory.path


@dataclass(slots=True)
class Kept:
    """A template in use."""

    key: tuple[str, str]
    template: MachineTemplate
    canary: Canary
    bytes: int
    used: float = field(default_factory=lambda: time.monotonic())
    failures: int = 0


@dataclass(slots=True)
class Templates:
    """Bounded in number and memory; the one not used for longest goes first."""

    counts: SpawnCounts = field(default_factory=SpawnCounts)
    kept: dict[tuple[str, str], Kept] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    _asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    _making: dict[tuple[str, str], trio.Lock] = field(default_factory=dict)
    _tidying: bool = False

    async def pick(self, runtime: Runtime, recipe: Recipe, n: int, spawn: str) -> tuple[Kept | None, str | None]:
        """What to clone ``n`` children from; None means to restore them, and why, where that is worth telling."""
        if spawn == "restore":
            return None, None
        if TEMPLATE not in (await recipe.engine.describe()).capabilities:
            return None, "this engine cannot clone machines here" if spawn == "template" else None
        if kept := self.kept.get(recipe.key):
            kept.used = time.monotonic()
            return kept, None
        if spawn == "auto":
            if why := self.refused.get(recipe.key):
                return None, why
            self._asked[recipe.key] += 1
            if n < AUTO_CHILDREN:
                if self._asked[recipe.key] >= AUTO_REQUESTS:
                    runtime.nursery.start_soon(self._make_beside, runtime, recipe)
                return None, None
        kept = await self._make(runtime, recipe)
        return kept, None if kept else self.refused.get(recipe.key)

    def failed(self, runtime: Runtime, kept: Kept, error: Exception) -> None:
        """A clone did not come up: it is restored instead, and a template of which several fail is given up."""
        kept.failures += 1
        self.clone_failed(runtime, error)
        if kept.failures >= MAX_FAILURES and self.kept.get(kept.key) is kept:
            self.refused[kept.key] = f"{kept.failures} clones failed, the last one: {error}"
            self._drop(runtime, kept)

    def clone_failed(self, runtime: Runtime, error: Exception) -> None:
        """Count and tell a clone that is replaced."""
        self.counts.fallbacks += 1
        log.warning("a clone failed and is replaced: %s", error)
        runtime.observe("clone_failed", error=str(error))

    def forget(self, runtime: Runtime, content: str) -> None:
        """Drop the templates of a removed snapshot."""
        for kept in [kept for kept in self.kept.values() if kept.key[0] == content]:
            self._drop(runtime, kept)
        for key in [key for key in self.refused if key[0] == content]:
            del self.refused[key]

    async def close(self) -> None:
        """End all of them."""
        while self.kept:
            await self.kept.popitem()[1].template.close()

    async def _make(self, runtime: Runtime, recipe: Recipe) -> Kept | None:
        """Make the template, once however many ask at the same time; None if it cannot be."""
        async with self._making.setdefault(recipe.key, trio.Lock()):
            if recipe.key in self.kept:
                return self.kept[recipe.key]
            began = time.monotonic()
            try:
                kept = await make_template(runtime, recipe)
            except (EngineError, GuestError) as error:
                self.counts.refusals += 1
                self.refused[recipe.key] = error.message
                log.warning("no template of %s: %s", recipe.content[:19], error.message)
                runtime.observe("template_refused", content=recipe.content, reason=error.message)
                return None
            self.counts.made += 1
            self.refused.pop(recipe.key, None)
            self.kept[recipe.key] = kept
            runtime.observe("template", content=recipe.content, ms=round((time.monotonic() - began) * 1000, 1))
        self._trim(runtime, spare=kept)
        if not self._tidying:
            self._tidying = True
            runtime.nursery.start_soon(self._tidy, runtime)
        return kept

    async def _make_beside(self, runtime: Runtime, recipe: Recipe) -> None:
        """Make it for those who ask next. Nobody waits for it: whatever goes wrong ends here and is not tried again."""
        try:
            await self._make(runtime, recipe)
        except Exception as error:
            self.refused[recipe.key] = f"it failed unexpectedly: {error}"
            log.exception("no template of %s", recipe.content[:19])

    def _drop(self, runtime: Runtime, kept: Kept) -> None:
        del self.kept[kept.key]
        self._asked.pop(kept.key, None)
        self.counts.dropped += 1
        runtime.nursery.start_soon(kept.template.close)

    async def _tidy(self, runtime: Runtime) -> None:
        """Drop what nobody used for a while, and everything when memory is short."""
        while self.kept:
            await trio.sleep(TIDY_SECONDS)
            now = time.monotonic()
            for kept in list(self.kept.values()):
                if now - kept.used > runtime.settings.template_idle_secs:
                    self._drop(runtime, kept)
            self._trim(runtime, spare=None)
        self._tidying = False

    def _trim(self, runtime: Runtime, spare: Kept | None) -> None:
        settings = runtime.settings
        short = available_share() < PRESSURE
        for kept in sorted(self.kept.values(), key=lambda kept: kept.used):
            total = sum(each.bytes for each in self.kept.values())
            if len(self.kept) <= settings.template_count and total <= settings.template_mib << 20 and not short:
                return
            if kept is not spare:
                self._drop(runtime, kept)


async def restore_warm(runtime: Runtime, recipe: Recipe, slot: Slot) -> tuple[Machine, GuestLink]:
    """A restored machine that has answered often enough for its guest's code to be translated; the caller's to end.

    Raises EngineError, GuestError; then, as on cancellation, no process is left.
    """
    machine = await recipe.engine.restore(recipe.spec, slot)
    try:
        sync = bytes.fromhex(recipe.agent_sync)
        link = await GuestLink.open(machine.agent, sync, runtime.nursery, resume=ResumeInfo.fresh(slot.id))
        with trio.move_on_after(READY_TIMEOUT):
            await link.ready()
            for count in range(runtime.settings.template_warmup):
                await link.eval(WARM_UP[count % len(WARM_UP)], timeout=READY_TIMEOUT)
            return machine, link
        raise GuestTimeout(f"the guest of {slot.id} was not warm within {READY_TIMEOUT:g} s")
    except BaseException:
        await machine.kill()
        raise


async def make_template(runtime: Runtime, recipe: Recipe) -> Kept:
    """Restore a machine, warm it, stop it, freeze it; the machine itself is ended. Raises EngineError, GuestError."""
    engine = recipe.engine
    assert isinstance(engine, TemplateEngine)
    slot = runtime.slots.take(new_sandbox_id())
    machine: Machine | None = None
    template: MachineTemplate | None = None
    try:
        machine, link = await restore_warm(runtime, recipe, slot)
        canary = None
        with trio.move_on_after(READY_TIMEOUT):
            canary = await Canary.take(machine, link)
        if canary is None:
            raise GuestTimeout(f"the guest of a template did not answer within {READY_TIMEOUT:g} s")
        # The link stays open until the machine is frozen: a guest whose host end is closed would poll.
        template = await engine.freeze(machine, slot, resume=False)
        await machine.kill()
        bytes_ = await trio.to_thread.run_sync(_private_bytes, template.pid)
    except BaseException:
        if template is not None:
            await template.close()
        raise
    finally:
        with trio.CancelScope(shield=True):
            if machine is not None:
                await machine.kill()
            await trio.to_thread.run_sync(runtime.slots.give_back, slot)
    return Kept(recipe.key, template, canary, bytes_)


def _private_bytes(pid: int) -> int:
    totals = read_totals(pid)
    return totals["Private_Dirty"] + totals["Private_Clean"]
