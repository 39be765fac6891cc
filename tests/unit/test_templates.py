"""Which children are cloned and which restored, and how long templates are kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from forkd import templates
from forkd.canary import Canary
from forkd.config import Settings
from forkd.runtime import Runtime
from forkd.specs.engine import TEMPLATE, Engine, MemoryImage, RestoreSpec
from forkd.specs.errors import EngineError, TemplateRefused
from forkd.specs.models import Hardware, Platform
from forkd.templates import Kept, Templates
from forkd.warming import Grown, Recipe

PLATFORM = Platform(engine="fake", engine_version="1", accelerator="tcg", machine="m", cpu="c", arch="a")


class FakeTemplate:
    pid = 0

    def __init__(self) -> None:
        self.closed = trio.Event()

    async def close(self) -> None:
        self.closed.set()


class FakeEngine:
    def __init__(self, *capabilities: str) -> None:
        self._capabilities = frozenset(capabilities)

    async def describe(self) -> Any:
        return SimpleNamespace(capabilities=self._capabilities)


class Scene:
    """A runtime whose templates cost nothing, and who was asked to make them."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.templates = Templates()
        self.settings = Settings(Path("/nowhere"))
        self.nursery = nursery
        self.made: list[str] = []
        self.fail: Exception | None = None
        self.size = 1 << 20
        self.ripen: dict[str, Callable[[], Awaitable[None]]] = {}

    def observe(self, kind: str, **details: Any) -> None:
        pass

    async def grow(
        self, runtime: Runtime, recipe: Recipe, first: Callable[[Grown], None], ripe: Callable[[Grown], Awaitable[None]]
    ) -> None:
        await trio.lowlevel.checkpoint()
        if self.fail is not None:
            raise self.fail
        self.made.append(recipe.content)
        first(self.grown())
        self.ripen[recipe.content] = lambda: ripe(self.grown())

    def grown(self) -> Grown:
        return Grown(cast(Any, FakeTemplate()), Canary(0, b"", "", b""), self.size)

    async def pick(self, content: str = "a", n: int = 1, spawn: str = "auto", engine: Any = None) -> Kept | None:
        spec = RestoreSpec(Path("v"), MemoryImage("m", 1), None, Hardware(vcpus=1, mem_mib=64), PLATFORM)
        recipe = Recipe(content, "", cast(Engine, engine or FakeEngine(TEMPLATE)), spec)
        kept, self.why = await self.templates.pick(cast(Runtime, self), recipe, n, spawn)
        return kept

    async def settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        made = Scene(nursery)
        monkeypatch.setattr(templates, "grow_template", made.grow)
        monkeypatch.setattr(templates, "available_share", lambda: 0.5)
        yield made
        nursery.cancel_scope.cancel()


async def test_one_child_is_restored_and_the_second_request_makes_a_template_for_the_third(scene: Scene) -> None:
    assert await scene.pick() is None
    await scene.settle()
    assert scene.made == []
    assert await scene.pick() is None
    await scene.settle()
    assert scene.made == ["a"]
    assert await scene.pick() is not None


async def test_a_template_nobody_waits_for_takes_nobody_down_when_it_fails_in_a_way_nobody_thought_of(
    scene: Scene,
) -> None:
    scene.fail = ValueError("odd")
    for _ in range(2):
        assert await scene.pick() is None
    await scene.settle()
    assert await scene.pick() is None
    assert "odd" in str(scene.why)


async def test_many_children_are_worth_a_template_at_once_and_all_requests_share_it(scene: Scene) -> None:
    kept: list[Kept | None] = []

    async def ask() -> None:
        kept.append(await scene.pick(n=10))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert scene.made == ["a"]
    assert len({id(each) for each in kept}) == 1 and kept[0] is not None


async def test_restore_and_template_are_obeyed(scene: Scene) -> None:
    assert await scene.pick(n=100, spawn="restore") is None
    assert await scene.pick(n=1, spawn="template") is not None
    assert await scene.pick(n=1, spawn="restore") is None


async def test_an_engine_without_templates_is_no_trouble_and_says_so_if_one_was_asked_for(scene: Scene) -> None:
    assert await scene.pick(n=100, engine=FakeEngine()) is None
    assert scene.why is None
    assert await scene.pick(spawn="template", engine=FakeEngine()) is None
    assert "cannot clone" in str(scene.why)


async def test_a_refusal_is_remembered_told_and_tried_again_only_when_asked_for(scene: Scene) -> None:
    scene.fail = TemplateRefused("descriptor 7 is odd")
    assert await scene.pick(n=10) is None
    assert scene.why == "descriptor 7 is odd"
    scene.fail = None
    assert await scene.pick(n=10) is None
    assert scene.why == "descriptor 7 is odd"
    assert (scene.made, scene.templates.counts.refusals) == ([], 1)
    assert await scene.pick(spawn="template") is not None
    assert await scene.pick(n=10) is not None


async def test_a_template_of_which_three_clones_fail_is_given_up(scene: Scene) -> None:
    kept = await scene.pick(n=10)
    assert kept is not None
    for turn in range(3):
        assert scene.templates.kept != {}, turn
        scene.templates.failed(cast(Runtime, scene), kept, EngineError("no"))
    await scene.settle()
    assert cast(Any, kept.grown.template).closed.is_set()
    assert await scene.pick(n=10) is None
    assert "3 clones failed" in str(scene.why)
    assert scene.templates.counts.fallbacks == 3


async def test_the_least_used_go_when_there_are_too_many_or_they_are_too_large(scene: Scene) -> None:
    scene.settings = replace(scene.settings, template_count=2, template_mib=100)
    first, second = await scene.pick("a", 10), await scene.pick("b", 10)
    assert first is not None and second is not None
    await scene.pick("a", 10)
    await scene.pick("c", 10)
    assert [key[0] for key in scene.templates.kept] == ["a", "c"]
    await scene.settle()
    assert cast(Any, second.grown.template).closed.is_set() and not cast(Any, first.grown.template).closed.is_set()
    scene.size = 90 << 20
    await scene.pick("d", 10)
    scene.size = 20 << 20
    await scene.pick("e", 10)
    assert [key[0] for key in scene.templates.kept] == ["e"]


async def test_unused_ones_go_in_time_and_all_go_when_memory_is_short(
    scene: Scene, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(templates.time, "monotonic", lambda: now[0])
    await scene.pick("a", 10)
    now[0] = 500.0
    await scene.pick("b", 10)
    now[0] = 700.0
    await trio.sleep(templates.TIDY_SECONDS * 1.5)
    assert [key[0] for key in scene.templates.kept] == ["b"]
    monkeypatch.setattr(templates, "available_share", lambda: 0.05)
    await trio.sleep(templates.TIDY_SECONDS)
    assert scene.templates.kept == {}
    assert scene.templates.counts.dropped == 2


async def test_a_removed_snapshot_takes_its_template_along_and_closing_ends_all(scene: Scene) -> None:
    first, second = await scene.pick("a", 10), await scene.pick("b", 10)
    assert first is not None and second is not None
    scene.templates.forget(cast(Runtime, scene), "a")
    await scene.settle()
    assert cast(Any, first.grown.template).closed.is_set() and not cast(Any, second.grown.template).closed.is_set()
    await scene.templates.close()
    assert cast(Any, second.grown.template).closed.is_set()


async def test_a_riper_one_takes_its_place_and_the_first_goes_when_nobody_clones_from_it(scene: Scene) -> None:
    first = await scene.pick(n=10)
    assert first is not None
    async with trio.open_nursery() as nursery:
        with first.in_use():
            nursery.start_soon(scene.ripen["a"])
            await scene.settle()
            second = await scene.pick(n=10)
            assert second is not None and second is not first
            with first.in_use():
                pass
            await scene.settle()
            assert not cast(Any, first.grown.template).closed.is_set()
    assert cast(Any, first.grown.template).closed.is_set() and not cast(Any, second.grown.template).closed.is_set()
    assert (scene.made, scene.templates.counts.made) == (["a"], 1)


async def test_a_riper_one_of_a_template_that_was_dropped_is_dropped_as_well(scene: Scene) -> None:
    await scene.pick(n=10)
    scene.templates.forget(cast(Runtime, scene), "a")
    await scene.ripen["a"]()
    assert scene.templates.kept == {}


async def test_one_that_is_dropped_ripens_no_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = trio.Event()

    async def grow(runtime: Any, recipe: Any, first: Callable[[Grown], None], ripe: Any) -> None:
        first(scene.grown())
        try:
            await trio.sleep_forever()
        finally:
            stopped.set()

    monkeypatch.setattr(templates, "grow_template", grow)
    await scene.pick(n=10)
    assert not stopped.is_set()
    scene.templates.forget(cast(Runtime, scene), "a")
    await scene.settle()
    assert stopped.is_set()


async def test_a_template_that_cannot_ripen_stays_as_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for content, error in (("a", TemplateRefused("the guest fell asleep")), ("b", ValueError("odd"))):

        async def grow(
            runtime: Any, recipe: Any, first: Callable[[Grown], None], ripe: Any, error: Any = error
        ) -> None:
            first(scene.grown())
            await trio.lowlevel.checkpoint()
            raise error

        monkeypatch.setattr(templates, "grow_template", grow)
        kept = await scene.pick(content, n=10)
        await scene.settle()
        assert await scene.pick(content) is kept and kept is not None
    assert "the guest fell asleep" in caplog.text and "odd" in caplog.text
