"""Our SDK, sync and async, against a daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forkd import AsyncController, AsyncSandbox, Controller, ControllerError, Sandbox

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


def test_a_sandbox_is_a_context_manager(daemon: Any) -> None:
    with Controller(daemon.url) as controller:
        with Sandbox(PARENT, controller=controller) as sandbox:
            ran = sandbox.commands.run("echo $NAME; exit 4", env={"NAME": "forkd"})
            assert (ran.stdout, ran.exit_code, ran.error) == ("forkd\n", 4, None)
            assert sandbox.commands.run(["printf", "%s", "a b"]).stdout == "a b"
            late = sandbox.commands.run("sleep 60", timeout=1)
            assert (late.exit_code, late.error) == (124, "timed out after 1 s")
            assert sandbox.eval("1 + 1") == "2"
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                sandbox.eval("1/0")
            assert sandbox.ping()["pong"] is True
            same = Sandbox(target=sandbox.guest_addr, spawn=False, controller=controller)
            assert same.id == sandbox.id
        assert controller.list_sandboxes() == []
        sandbox.kill()
        with pytest.raises(ControllerError) as caught:
            controller.get_sandbox(sandbox.id)
        assert (caught.value.status, caught.value.code) == (404, "sandbox_not_found")


def test_a_sandbox_forks_into_sandboxes_and_goes_back_and_forth(daemon: Any) -> None:
    with Controller(daemon.url) as controller, Sandbox(PARENT, controller=controller) as sandbox:
        sandbox.eval("exec('x = 41')")
        before = sandbox.branch()["tag"]
        first, second = sandbox.fork(2)
        assert [each.eval("x + 1") for each in (first, second)] == ["42", "42"]
        with first:
            assert first.commands.run("touch /root/mine").exit_code == 0
            assert first.diff(sandbox)["added"] == first.diff(sandbox.id)["added"] == ["/root/mine"]
        assert first.id not in [row["id"] for row in controller.list_sandboxes()]
        second.eval("exec('x = 7')")
        former = sandbox.id
        second.promote()
        assert (second.id, sandbox.eval("x")) == (former, "7")
        sandbox.rollback(before)
        assert (sandbox.id, sandbox.eval("x")) == (former, "41")
        rows = sandbox.fanout("echo $FORKD_INDEX", 2, best="value", keep=1)
        assert [row["result"]["stdout"].strip() for row in rows] == ["1", "0"]
        Sandbox(target=rows[0]["id"], spawn=False, controller=controller).kill()
        controller.delete_snapshot(before, force=True)


async def test_the_async_twin_does_the_same(daemon: Any) -> None:
    async with AsyncController(daemon.url) as controller:
        async with AsyncSandbox(PARENT, controller=controller) as sandbox:
            assert (await sandbox.commands.run("echo hi")).stdout == "hi\n"
            assert await sandbox.eval("2 + 2") == "4"
        made = await AsyncSandbox.create(PARENT, controller=controller)
        assert [row["id"] for row in await controller.list_sandboxes()] == [made.id]
        await made.kill()


def test_one_failing_child_ends_the_others_unless_partial_is_asked_for(
    daemon: Any, machines: Callable[[], list[int]]
) -> None:
    with Controller(daemon.url) as controller:
        with pytest.raises(ControllerError) as caught:
            controller.spawn_sandboxes(PARENT, 2, memory_limit_mib=1)
        assert caught.value.body["details"]["failed"][0]["index"] == 0
        assert controller.list_sandboxes() == []
    assert machines() == []


def test_nobody_there_is_said_in_a_sentence() -> None:
    with (
        Controller("http://127.0.0.1:1") as controller,
        pytest.raises(ControllerError, match="cannot be reached") as caught,
    ):
        controller.list_sandboxes()
    assert caught.value.status == 503
