"""Templates kept warm: one frozen machine for each snapshot in use, from which children are cloned."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from forkd.linux.memory_free import available_share
from forkd.specs.engine import TEMPLATE
from forkd.specs.errors import EngineError, GuestError
from forkd.warming import Grown, Recipe, grow_template

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


@dataclass(slots=True)
class Kept:
    """A template in use."""

    key: tuple[str, str]
    grown: Grown
    used: float = field(default_factory=lambda: time.monotonic())
    failures: int = 0
    ripening: trio.CancelScope = field(default_factory=trio.CancelScope)
    _users: int = 0
    _unused: trio.Event = field(default_factory=trio.Event)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While children are cloned from it, ``retire`` waits."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()
                self._unused = trio.Event()

    async def retire(self) -> None:
        """End it as soon as nobody clones from it."""
        try:
            while self._users:
                await self._unused.wait()
        finally:
            await self.grown.template.close()


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
            await self.kept.popitem()[1].grown.template.close()

    async def _make(self, runtime: Runtime, recipe: Recipe) -> Kept | None:
        """Make the template, once however many ask at the same time; None if it cannot be."""
        async with self._making.setdefault(recipe.key, trio.Lock()):
            if recipe.key in self.kept:
                return self.kept[recipe.key]
            began = time.monotonic()
            try:
                kept: Kept = await runtime.nursery.start(self._grow, runtime, recipe)
            except (EngineError, GuestError) as error:
                self.counts.refusals += 1
                self.refused[recipe.key] = error.message
                log.warning("no template of %s: %s", recipe.content[:19], error.message)
                runtime.observe("template_refused", content=recipe.content, reason=error.message)
                return None
            self.counts.made += 1
            self.refused.pop(recipe.key, None)
            runtime.observe("template", content=recipe.content, ms=round((time.monotonic() - began) * 1000, 1))
        self._trim(runtime, spare=kept)
        if not self._tidying:
            self._tidying = True
            runtime.nursery.start_soon(self._tidy, runtime)
        return kept

    async def _grow(
        self, runtime: Runtime, recipe: Recipe, task_status: trio.TaskStatus[Kept] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep a template as soon as there is one, and, ten seconds later, the riper one in its place."""
        kept: Kept | None = None

        def first(grown: Grown) -> None:
            nonlocal kept
            kept = self.kept[recipe.key] = Kept(recipe.key, grown, ripening=ripening)
            task_status.started(kept)

        async def ripe(grown: Grown) -> None:
            if kept is None or self.kept.get(recipe.key) is not kept:
                await grown.template.close()
                return
            self.kept[recipe.key] = Kept(recipe.key, grown, kept.used)
            await kept.retire()

        ripening = trio.CancelScope()
        try:
            with ripening:
                await grow_template(runtime, recipe, first, ripe)
        except (EngineError, GuestError) as error:
            if kept is None:
                raise
            log.warning("the template of %s stays as it is: %s", recipe.content[:19], error)
        except Exception:
            if kept is None:
                raise
            log.exception("the template of %s stays as it is", recipe.content[:19])

    async def _make_beside(self, runtime: Runtime, recipe: Recipe) -> None:
        """Make it for those who ask next. Nobody waits for it: whatever goes wrong ends here and is not tried again."""
        try:
            await self._make(runtime, recipe)
        except Exception as error:
            self.refused[recipe.key] = f"it failed unexpectedly: {error}"
            log.exception("no template of %s", recipe.content[:19])

    def _drop(self, runtime: Runtime, kept: Kept) -> None:
        del self.kept[kept.key]
        kept.ripening.cancel()
        self._asked.pop(kept.key, None)
        self.counts.dropped += 1
        runtime.nursery.start_soon(kept.retire)

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
            total = sum(each.grown.bytes for each in self.kept.values())
            if len(self.kept) <= settings.template_count and total <= settings.template_mib << 20 and not short:
                return
            if kept is not spare:
                self._drop(runtime, kept)
