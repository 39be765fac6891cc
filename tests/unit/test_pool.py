"""Warm pools without machines: what their keeper survives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from forkd import pool as pools
from forkd.pool import Pools
from forkd.runtime import Runtime
from forkd.warming import Recipe


async def test_a_keeper_goes_on_when_tending_fails_in_a_way_nobody_thought_of(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    asked = 0

    async def recipe() -> Recipe:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise ValueError("odd")
        return cast(Recipe, object())

    async def start(runtime: Runtime, tag: str, recipe: Recipe) -> Any:
        return SimpleNamespace(recipe=recipe)

    async def end(*gone: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(pools, "_start", start)
    monkeypatch.setattr(pools, "end_waiting", end)
    kept = Pools(available=lambda: 0.5)
    async with trio.open_nursery() as nursery:
        limits = {"start_limit": trio.Semaphore(1), "slots": None, "settings": SimpleNamespace(pool_idle_secs=1e9)}
        runtime = cast(Runtime, SimpleNamespace(nursery=nursery, **limits))
        await kept.resize(runtime, "a", 1, recipe)
        await trio.sleep(pools.TEND_SECONDS * 1.5)
        assert "odd" in str(kept.pools["a"].problem)
        await trio.sleep(pools.TEND_SECONDS)
        assert (kept.pools["a"].problem, asked) == (None, 3)
        nursery.cancel_scope.cancel()
