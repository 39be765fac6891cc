"""Warm pools: machines that wait are claimed, replaced, and never left over."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from forkd.config import load_settings
from forkd.ops.branch import branch
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.pool import set_pool
from forkd.ops.remove import remove_snapshot
from forkd.pool import Pool
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.specs.errors import BadInput, SnapshotNotFound
from forkd.specs.requests import BranchRequest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
async def runtime(data_dir: Path) -> AsyncIterator[Runtime]:
    async with open_runtime(load_settings({}, data_dir=data_dir)) as made:
        yield made


async def children(runtime: Runtime, n: int = 1, tag: str = PARENT, **options: Any) -> list[Sandbox]:
    made = await fork(runtime, tag, n, ForkOptions(spawn="restore", **options))
    assert [child.error for child in made] == [None] * n
    return [child.sandbox for child in made if child.sandbox is not None]


async def by(runtime: Runtime, **options: Any) -> str:
    (child,) = await children(runtime, **options)
    assert (await child.link.eval("40 + 2", timeout=60)).result == "42"
    return child.info.spawned_by


async def full(pool: Pool) -> None:
    """Until its keeper has filled it again."""
    with trio.fail_after(60):
        while len(pool.waiting) < pool.size:
            await trio.sleep(0.02)


async def test_claimed_children_are_the_machines_that_waited_and_their_places_are_filled(runtime: Runtime) -> None:
    assert (await set_pool(runtime, PARENT, 2)).waiting == 2
    pool = runtime.pools.pools[PARENT]
    waited = {each.slot.id: each.machine.pid for each in pool.waiting}
    three = await children(runtime, 3)
    claimed = {each.id: each.info.pid for each in three if each.info.spawned_by == "pool"}
    assert claimed == waited
    assert sorted(each.info.spawned_by for each in three) == ["pool", "pool", "restore"]
    names = [(await each.link.eval("__import__('socket').gethostname()", timeout=60)).result for each in three]
    assert names == [repr(each.id) for each in three]
    await full(pool)
    assert not set(waited) & {each.slot.id for each in pool.waiting}
    assert (runtime.templates.counts.claims, runtime.templates.counts.restores) == (2, 1)
    for each in three:
        await end_sandbox(each)
        assert not each.slot.directory.exists()


async def test_a_claimed_child_has_its_limits_and_who_needs_a_process_of_its_own_gets_one(runtime: Runtime) -> None:
    await set_pool(runtime, PARENT, 1)
    (limited,) = await children(runtime, pids_limit=64)
    assert limited.info.spawned_by == "pool"
    assert limited.id in Path(f"/proc/{limited.info.pid}/cgroup").read_text()
    await full(runtime.pools.pools[PARENT])
    assert await by(runtime, memory_limit_mib=512) == "restore"
    assert await by(runtime, memory_backend="memfd") == "restore"
    assert await by(runtime, per_child_netns=True) == "restore"
    assert await by(runtime) == "pool"


async def test_a_machine_that_died_waiting_is_replaced_by_another(runtime: Runtime) -> None:
    await set_pool(runtime, PARENT, 1)
    os.kill(runtime.pools.pools[PARENT].waiting[0].machine.pid, 9)
    assert await by(runtime) == "restore"
    assert runtime.templates.counts.fallbacks == 1
    await full(runtime.pools.pools[PARENT])
    assert await by(runtime) == "pool"


async def test_a_pool_is_drained_when_memory_is_short_or_nobody_comes_and_filled_again(
    runtime: Runtime, machines: Callable[[], list[int]]
) -> None:
    await set_pool(runtime, PARENT, 2)
    pool = runtime.pools.pools[PARENT]
    runtime.pools.available = lambda: 0.05
    await runtime.pools.tend(runtime, pool)
    assert machines() == [] and "memory is short" in str(pool.problem)
    runtime.pools.available = lambda: 0.12
    await runtime.pools.tend(runtime, pool)
    assert machines() == []
    runtime.pools.available = lambda: 0.5
    await runtime.pools.tend(runtime, pool)
    assert len(machines()) == 2
    runtime.settings = dataclasses.replace(runtime.settings, pool_idle_secs=0.0)
    await runtime.pools.tend(runtime, pool)
    assert machines() == []
    runtime.settings = dataclasses.replace(runtime.settings, pool_idle_secs=3600.0)
    assert await by(runtime) == "restore"
    await full(pool)


async def test_a_pool_goes_with_its_snapshot_and_with_its_runtime(
    data_dir: Path, machines: Callable[[], list[int]]
) -> None:
    async with open_runtime(load_settings({}, data_dir=data_dir)) as runtime:
        await set_pool(runtime, PARENT, 1)
        (source,) = await children(runtime)
        assert source.info.spawned_by == "pool"
        await set_pool(runtime, PARENT, 0)
        await source.link.eval("secret = 'of the claimed'", timeout=60)
        await branch(runtime, source.id, BranchRequest(tag="pool-branch", mode="diff"))
        await end_sandbox(source)
        try:
            assert (await set_pool(runtime, "pool-branch", 2)).waiting == 2
            (child,) = await children(runtime, tag="pool-branch")
            assert child.info.spawned_by == "pool"
            assert (await child.link.eval("secret", timeout=60)).result == repr("of the claimed")
        finally:
            await remove_snapshot(runtime, "pool-branch")
        assert "pool-branch" not in runtime.pools.pools
        assert len(machines()) == 1
        await set_pool(runtime, PARENT, 3)
        assert (await set_pool(runtime, PARENT, 1)).waiting == 1
        assert len(machines()) == 2
        assert (await set_pool(runtime, PARENT, 0)).waiting == 0
        await set_pool(runtime, PARENT, 2)
    assert machines() == []


async def test_what_cannot_be_a_pool_is_refused(runtime: Runtime) -> None:
    with pytest.raises(SnapshotNotFound):
        await set_pool(runtime, "no-such-tag", 2)
    for size in (-1, 101):
        with pytest.raises(BadInput):
            await set_pool(runtime, PARENT, size)


def test_a_killed_daemon_leaves_no_machine_waiting_after_the_next_one_or_cleanup(
    daemon: Any, forkd: Any, machines: Callable[[], list[int]]
) -> None:
    def pool(size: int) -> Any:
        answer = httpx.put(f"{daemon.url}/v1/snapshots/{PARENT}/pool", json={"size": size}, timeout=120)
        return answer.json()

    assert pool(3) == {"tag": PARENT, "size": 3, "waiting": 3, "problem": None}
    figures = httpx.get(f"{daemon.url}/metrics").text
    assert f'forkd_pool_waiting{{tag="{PARENT}"}} 3.0' in figures
    rows = httpx.get(f"{daemon.url}/v1/doctor", timeout=60).json()
    assert [row["detail"] for row in rows if row["name"] == f"pool of {PARENT}"] == ["3 of 3 machines wait"]
    body = {"snapshot_tag": PARENT, "spawn": "restore"}
    (kept,) = httpx.post(f"{daemon.url}/v1/sandboxes", json=body, timeout=120).json()
    assert kept["spawned_by"] == "pool"
    daemon.kill()
    assert len(machines()) >= 3
    daemon.start()
    assert machines() == [kept["pid"]]
    answer = httpx.post(f"{daemon.url}/v1/sandboxes/{kept['id']}/eval", json={"code": "6 * 7"}, timeout=60)
    assert answer.json()["result"] == "42"
    pool(2)
    daemon.kill()
    assert forkd("cleanup", "--yes").returncode == 0
    assert machines() == []
    daemon.start()


def test_a_daemon_fills_the_pools_of_its_settings_and_drains_them_when_it_stops(
    data_dir: Path, start_daemon: Any, machines: Callable[[], list[int]]
) -> None:
    daemon = start_daemon(data_dir, "--pool", f"{PARENT}=2,absent=1")
    answer = httpx.put(f"{daemon.url}/v1/snapshots/{PARENT}/pool", json={"size": 2}, timeout=60)
    assert answer.json()["waiting"] == 2
    body = {"snapshot_tag": PARENT, "spawn": "restore"}
    (made,) = httpx.post(f"{daemon.url}/v1/sandboxes", json=body, timeout=120).json()
    assert made["spawned_by"] == "pool"
    daemon.stop()
    assert machines() == []
    assert f"2 machines wait for children of {PARENT}" in daemon.said()
    assert "no pool of absent" in daemon.said()
