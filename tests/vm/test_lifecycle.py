"""How long sandboxes live, when they doze, what they are called, and forks of them in one call."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from forkd.linux import process
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.specs.errors import NoSpace
from tests.conftest import Daemon

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
async def child(controller: AsyncController) -> AsyncIterator[str]:
    with trio.fail_after(120):
        yield (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]


async def refused(call: Any, status: int, code: str) -> ControllerError:
    with pytest.raises(ControllerError) as caught:
        await call
    assert (caught.value.status, caught.value.code) == (status, code), caught.value
    return caught.value


async def test_names_labels_and_environment(controller: AsyncController) -> None:
    fields = {"labels": {"team": "red"}, "metadata": {"note": "x"}, "env": {"WHO": "me"}, "name": "alpha"}
    made = (await controller.spawn_sandboxes(PARENT, 1, **fields))[0]
    await controller.spawn_sandboxes(PARENT, 1, labels={"team": "blue"})
    assert (made["name"], made["labels"], made["metadata"]) == ("alpha", {"team": "red"}, {"note": "x"})
    assert (await controller.exec_command("alpha", ["sh", "-c", "echo $WHO"]))["stdout"] == "me\n"
    assert (await controller.eval_code("alpha", "import os; os.environ['WHO']"))["result"] == "'me'"
    assert [row["id"] for row in await controller.list_sandboxes(labels=["team=red"])] == [made["id"]]
    assert len(await controller.list_sandboxes(labels=["team"])) == 2
    assert await controller.list_sandboxes(labels=["team=red"], status="paused") == []
    await refused(controller.spawn_sandboxes(PARENT, 1, name="alpha"), 409, "name_taken")
    await refused(controller.spawn_sandboxes(PARENT, 2, name="beta"), 400, "bad_input")
    await refused(controller.spawn_sandboxes(PARENT, 1, name="no/name"), 400, "bad_tag")
    await refused(controller.spawn_sandboxes(PARENT, 1, env={"A B": ""}), 400, "bad_input")
    await refused(controller.spawn_sandboxes(PARENT, 1, timeout_secs=-1), 400, "bad_input")
    assert len(await controller.list_sandboxes()) == 2


async def test_a_paused_sandbox_stands_still_and_wakes_with_the_right_time(
    controller: AsyncController, child: str
) -> None:
    await controller.eval_code(child, "x = 5")
    assert (await controller.pause_sandbox(child))["status"] == "paused"
    await refused(controller.eval_code(child, "1"), 409, "sandbox_paused")
    before = (await controller.sandbox_stats(child))["cpu_seconds"]
    await trio.sleep(1)
    assert (await controller.sandbox_stats(child))["cpu_seconds"] - before <= 0.02
    assert (await controller.resume_sandbox(child))["status"] == "running"
    answer = await controller.eval_code(child, "import time; (x, time.time())")
    x, clock = eval(answer["result"])
    assert x == 5
    assert abs(clock - time.time()) < 0.5


async def test_an_idle_sandbox_dozes_and_the_next_request_wakes_it(controller: AsyncController, child: str) -> None:
    await controller.eval_code(child, "x = 7")
    await controller.update_sandbox(child, idle_pause_secs=0.3)
    while (await controller.get_sandbox(child))["status"] != "paused":
        await trio.sleep(0.05)
    before = (await controller.sandbox_stats(child))["cpu_seconds"]
    await trio.sleep(1)
    assert (await controller.sandbox_stats(child))["cpu_seconds"] - before <= 0.02
    assert (await controller.eval_code(child, "x"))["result"] == "7"
    while (await controller.get_sandbox(child))["status"] != "paused":
        await trio.sleep(0.05)
    await controller.update_sandbox(child, idle_pause_secs=0)


async def test_a_time_limit_can_be_renewed_and_says_so_when_it_is_over(controller: AsyncController) -> None:
    made = (await controller.spawn_sandboxes(PARENT, 1, timeout_secs=1000))[0]
    assert abs(made["expires_at_unix"] - time.time() - 1000) < 60
    soon = await controller.update_sandbox(made["id"], timeout_secs=0.5)
    with trio.fail_after(30):
        while await controller.list_sandboxes():
            await trio.sleep(0.02)
    assert time.time() >= soon["expires_at_unix"]
    error = await refused(controller.get_sandbox(made["id"]), 404, "sandbox_not_found")
    assert "time limit" in str(error)


def until_gone(client: httpx.Client, limits: dict[str, float]) -> dict[str, float]:
    """How late each sandbox was gone after its limit, in seconds: from the list, and its VMM from the host."""
    late: dict[str, float] = {}
    machines = {row["id"]: (row["pid"], process.start_time(row["pid"])) for row in client.get("/v1/sandboxes").json()}
    while len(late) < len(limits):
        alive = {row["id"] for row in client.get("/v1/sandboxes").json()}
        alive |= {each for each, machine in machines.items() if each not in late and process.alive(*machine)}
        now = time.time()
        late |= {each: now - limit for each, limit in limits.items() if each not in alive and each not in late}
    return late


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_time_limits_hold_also_across_a_restart_of_the_daemon(data_dir: Path, tmp_path: Path, count: int) -> None:
    from tests.conftest import run_forkd

    daemon = Daemon(data_dir, tmp_path / "daemon.log")
    try:
        with httpx.Client(base_url=daemon.url, timeout=120) as client:
            rows = client.post("/v1/sandboxes", json={"snapshot_tag": PARENT, "n": count}).json()
            limits = {}
            for number, row in enumerate(rows):
                seconds = (8 if count < 10 else 20) + 0.25 * (number % 20)  # a busy host restarts slowly
                answer = client.patch(f"/v1/sandboxes/{row['id']}", json={"timeout_secs": seconds})
                limits[row["id"]] = answer.json()["expires_at_unix"]
        daemon.kill()
        daemon.start()
        with httpx.Client(base_url=daemon.url, timeout=120) as client:
            assert len(client.get("/v1/sandboxes").json()) == count
            late = until_gone(client, limits)
        print("late by", sorted(round(value, 3) for value in late.values()))
        assert min(late.values()) >= 0
        assert count > 5 or max(late.values()) <= 1
    finally:
        daemon.stop()
        run_forkd(data_dir, "cleanup", "--yes")


async def test_ten_children_of_a_running_sandbox_in_one_call_each_its_own(
    controller: AsyncController, child: str
) -> None:
    await controller.eval_code(child, "inherited = list(range(5))")
    per_child = [{"env": {"NUMBER": str(number)}, "labels": {"n": str(number)}} for number in range(10)]
    common = {"labels": {"all": "yes"}, "env": {"ALL": "1"}}
    fields = {"per_child": per_child, "all_children": common, "idempotency_key": "once"}
    made = await controller.fork(child, 10, **fields)
    assert await controller.fork(child, 10, **fields) == made
    await refused(controller.fork(child, 9, idempotency_key="once"), 409, "conflict")
    for number, row in enumerate(made):
        assert row["labels"] == {"n": str(number)}
        assert row["forked_from"] == child
        answer = await controller.eval_code(
            row["id"], "import os; (inherited, os.environ['NUMBER'], os.environ['ALL'])"
        )
        assert answer["result"] == f"([0, 1, 2, 3, 4], '{number}', '1')"
    assert len(await controller.list_sandboxes()) == 11


@pytest.mark.parametrize("on_partial", ["keep", "rollback"])
async def test_one_child_that_fails_is_one_row_or_ends_them_all(
    controller: AsyncController, child: str, on_partial: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forkd.ops import fork_running as module

    honest, calls = module.run_sandbox, 0

    async def poisoned(*args: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise NoSpace("poisoned")
        await honest(*args, **named)

    monkeypatch.setattr(module, "run_sandbox", poisoned)
    if on_partial == "keep":
        error = await refused(controller.fork(child, 10, on_partial="keep"), 207, None)  # type: ignore[arg-type]
        assert len(error.body["sandboxes"]) == 9
        assert [row["error"] for row in error.body["failed"]] == ["poisoned"]
        assert len(await controller.list_sandboxes()) == 10
    else:
        error = await refused(controller.fork(child, 10), 507, "no_space")
        assert len(error.body["details"]["failed"]) == 1
        assert [row["id"] for row in await controller.list_sandboxes()] == [child]


async def test_forks_of_snapshots_deadlines_and_refusals(controller: AsyncController, child: str) -> None:
    made = await controller.fork(PARENT, 2, per_child=[{"name": "first"}])
    assert (made[0]["name"], made[1]["name"]) == ("first", None)
    await refused(controller.fork("nothing-of-that-name"), 404, "sandbox_not_found")
    await refused(controller.fork(PARENT, 0), 400, "bad_input")
    await refused(controller.fork(PARENT, 1, per_child=[{}, {}]), 400, "bad_input")
    await refused(controller.fork(PARENT, 1, per_child=[{"name": "first"}]), 409, "name_taken")
    await refused(controller.fork(PARENT, 1, mode="live"), 400, "bad_input")
    await refused(controller.fork(child, 3, deadline_secs=0.001), 504, "guest_timeout")
    with trio.fail_after(60):
        while len(await controller.list_sandboxes()) != 3:
            await trio.sleep(0.05)


async def test_a_sandbox_goes_back_and_a_child_takes_over(
    controller: AsyncController, child: str, fresh_tag: Any
) -> None:
    await controller.update_sandbox(child, name="main", env={"KEPT": "yes"})
    await controller.eval_code(child, "x = 1")
    tag = fresh_tag("back")
    await controller.branch_sandbox(child, tag, mode="live")
    await controller.eval_code(child, "x = 2")
    back = await controller.rollback(child, tag)
    assert (back["id"], back["name"]) == (child, "main")
    assert (await controller.eval_code("main", "import os; (x, os.environ['KEPT'])"))["result"] == "(1, 'yes')"
    await refused(controller.rollback(child, "nothing"), 404, "snapshot_not_found")
    other = (await controller.fork("main", 1))[0]["id"]
    await controller.eval_code(other, "x = 3")
    taken = await controller.promote(other)
    assert (taken["id"], taken["name"]) == (child, "main")
    assert (await controller.eval_code("main", "x"))["result"] == "3"
    assert [row["id"] for row in await controller.list_sandboxes()] == [child]
    await refused(controller.promote(child), 409, "conflict")
