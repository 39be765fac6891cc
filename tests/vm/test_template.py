"""Children cloned from a template: kept through a daemon's restart, limited, checked, replaced when they fail."""

from __future__ import annotations

import ast
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd import warming
from forkd.canary import Canary
from forkd.config import load_settings
from forkd.ops.branch import branch
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.remove import remove_snapshot
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox
from forkd.sdk.async_controller import AsyncController
from forkd.specs.engine import Machine, Slot
from forkd.specs.errors import CloneBroken, LimitRefused
from forkd.specs.requests import BranchRequest
from forkd.warming import LIMITS
from tests.vm.test_fork_running import hand_descriptor

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
async def runtime(data_dir: Path) -> AsyncIterator[Runtime]:
    async with open_runtime(load_settings({}, data_dir=data_dir)) as made:
        yield made


async def children(runtime: Runtime, n: int, tag: str = PARENT, **options: Any) -> list[Sandbox]:
    made = await fork(runtime, tag, n, ForkOptions(spawn="template", **options))
    assert [child.error for child in made] == [None] * n
    return [child.sandbox for child in made if child.sandbox is not None]


async def ask(sandbox: Sandbox, code: str) -> Any:
    answer = await sandbox.link.eval(code, timeout=60)
    assert answer.error is None, answer
    return None if answer.result is None else ast.literal_eval(answer.result)


async def test_one_child_is_restored_and_many_are_cloned(controller: AsyncController) -> None:
    assert (await controller.spawn_sandboxes(PARENT, 1))[0]["spawned_by"] == "restore"
    assert {child["spawned_by"] for child in await controller.spawn_sandboxes(PARENT, 5)} == {"template"}
    assert (await controller.spawn_sandboxes(PARENT, 1))[0]["spawned_by"] == "template"
    assert (await controller.spawn_sandboxes(PARENT, 1, spawn="restore"))[0]["spawned_by"] == "restore"


async def test_a_clone_that_fails_its_canary_is_replaced_by_a_restored_child(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, machines: Callable[[], list[int]]
) -> None:
    check, seen = Canary.check, []

    async def fail_once(self: Canary, machine: Machine, asked: Any) -> None:
        await check(self, machine, asked)
        seen.append(machine.pid)
        if len(seen) == len(LIMITS) + 1:
            raise CloneBroken("from the test")

    monkeypatch.setattr(Canary, "check", fail_once)
    monkeypatch.setattr(warming, "RIPENING", 0)
    made = await children(runtime, 3)
    assert sorted(each.info.spawned_by for each in made) == ["restore", "template", "template"]
    assert seen[len(LIMITS)] not in machines()
    assert {await ask(each, "numpy.zeros(3).tolist()[0]") for each in made} == {0.0}
    assert (runtime.templates.counts.clones, runtime.templates.counts.fallbacks) == (2, 1)


async def test_a_template_ripens_while_it_is_used_and_nobody_notices(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, machines: Callable[[], list[int]]
) -> None:
    monkeypatch.setattr(warming, "RIPENING_PAUSE", 0.1)
    made = await children(runtime, 2)
    (young,) = runtime.templates.kept.values()
    young_pid = young.grown.template.pid
    with trio.fail_after(60):
        while next(iter(runtime.templates.kept.values())) is young:
            made += await children(runtime, 1)
    (ripe,) = runtime.templates.kept.values()
    with trio.fail_after(60):
        while os.path.exists(f"/proc/{young_pid}"):
            await trio.sleep(0.02)
    made += await children(runtime, 2)
    assert ripe.grown.template.pid != young_pid
    assert {await ask(each, "numpy.zeros(3).tolist()[0]") for each in made} == {0.0}
    assert runtime.templates.counts.fallbacks == 0
    assert set(machines()) == {each.machine.pid for each in made}


async def test_a_machine_with_something_unknown_open_makes_no_template_and_the_children_say_why(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = runtime.engine()
    freeze = engine.freeze

    async def with_a_timer(machine: Machine, slot: Slot, *, resume: bool) -> Any:
        await hand_descriptor(machine, "timerfd")
        return await freeze(machine, slot, resume=resume)

    monkeypatch.setattr(engine, "freeze", with_a_timer)
    made = await children(runtime, 2)
    for each in made:
        assert each.info.spawned_by == "restore"
        assert "timerfd" in each.info.warnings[0]
    assert [await ask(each, "1 + 1") for each in made] == [2, 2]
    assert runtime.templates.counts.refusals == 1


async def test_a_branch_of_a_clone_is_complete_although_the_template_had_changed_pages_itself(
    runtime: Runtime,
) -> None:
    child = (await children(runtime, 1))[0]
    code = "import hashlib, os; blob = os.urandom(3 << 20); hashlib.sha256(blob).hexdigest()"
    digest = await ask(child, code)
    tag = f"t-{child.id}"
    try:
        info = await branch(runtime, child.id, BranchRequest(tag=tag, mode="live"))
        assert info.parent_tag == PARENT
        for spawn in ("restore", "template"):
            again = (await fork(runtime, tag, 1, ForkOptions(spawn=spawn)))[0].sandbox
            assert again is not None and again.info.spawned_by == spawn
            assert await ask(again, "hashlib.sha256(blob).hexdigest()") == digest
            assert await ask(again, "numpy.arange(4).sum().item()") == 6
    finally:
        content = runtime.snapshots.load(tag).manifest.content
        await remove_snapshot(runtime, tag)
    assert not [key for key in runtime.templates.kept if key[0] == content]


async def test_a_clone_is_under_its_limits_before_it_runs(runtime: Runtime) -> None:
    try:
        limited = (await children(runtime, 1, memory_limit_mib=400))[0]
    except AssertionError as error:
        if "LimitRefused" in str(error):
            pytest.skip(f"this host has no memory limits ({LimitRefused.code})")
        raise
    groups = Path(f"/proc/{limited.info.pid}/cgroup").read_text()
    assert limited.id in groups
    assert limited.info.spawned_by == "template"


def test_clones_outlive_a_killed_daemon_and_the_next_one_makes_its_own_template(
    daemon: Any, data_dir: Path, forkd: Any
) -> None:
    import httpx

    def call(method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, daemon.url + path, json=body, timeout=120)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    made = call("POST", "/v1/sandboxes", {"snapshot_tag": PARENT, "n": 4, "spawn": "template"})
    for number, child in enumerate(made):
        call("POST", f"/v1/sandboxes/{child['id']}/eval", {"code": f"mine = {number}"})
    daemon.kill()
    daemon.start()
    for number, child in enumerate(made):
        answer = call("POST", f"/v1/sandboxes/{child['id']}/eval", {"code": "mine"})
        assert answer["result"] == str(number)
    again = call("POST", "/v1/sandboxes", {"snapshot_tag": PARENT, "n": 4})
    assert {child["spawned_by"] for child in again} == {"template"}
    forked = call("POST", f"/v1/sandboxes/{made[1]['id']}/fork", {"n": 2})
    for child in forked:
        assert call("POST", f"/v1/sandboxes/{child['id']}/eval", {"code": "mine + 10"})["result"] == "11"
    for child in [*made, *again, *forked]:
        call("DELETE", f"/v1/sandboxes/{child['id']}")
