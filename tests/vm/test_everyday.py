"""Verbs of every day at the command line: pause, label, renew, go back, take over, look at logs, compare, copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from tests.conftest import Forkd

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
OF_EACH_FORK = {"/etc/hostname", "/etc/machine-id"}


def ok(done: Any) -> str:
    assert done.returncode == 0, done.stderr + done.stdout
    return str(done.stdout)


def test_a_sandbox_is_paused_labelled_renewed_put_back_and_taken_over(daemon: Any, forkd: Forkd) -> None:
    child = json.loads(ok(forkd("spawn", "--tag", PARENT, "--json")))[0]["id"]
    assert ok(forkd("pause", child)) == f"✓ {child} paused\n"
    refused = forkd("eval", "--sandbox", child, "1")
    assert refused.returncode != 0
    assert f"forkd resume {child}" in refused.stderr
    assert ok(forkd("resume", child)) == f"✓ {child} running\n"

    assert ok(forkd("label", child, "team=red", "try=1", "--name", "main")) == "team=red\ntry=1\n"
    assert ok(forkd("label", "main", "try-")) == "team=red\n"
    assert forkd("label", "main", "nonsense").returncode == 2
    assert ok(forkd("renew", "main", "--timeout", "900", "--idle-pause", "600")) == (
        f"✓ {child} ends in 900 s, dozes after 600 s without use\n"
    )
    assert ok(forkd("renew", "main", "--timeout", "0", "--idle-pause", "0")) == f"✓ {child} no time limit\n"

    tag = "t-everyday"
    ok(forkd("eval", "--sandbox", "main", "x = 1"))
    ok(forkd("snapshot", "--from-sandbox", child, "--tag", tag, "--live"))
    ok(forkd("eval", "--sandbox", "main", "x = 2"))
    assert ok(forkd("rollback", "main", tag)) == f"✓ {child} is back at {tag}\n"
    assert ok(forkd("eval", "--sandbox", "main", "x")).strip() == "1"
    refused = forkd("promote", child)
    assert refused.returncode != 0
    assert "was not forked from a sandbox" in refused.stderr
    made = httpx.post(f"{daemon.url}/v1/fork", json={"source": "main"}, timeout=120).json()[0]["id"]
    ok(forkd("eval", "--sandbox", made, "x = 3"))
    assert ok(forkd("promote", made)) == f"✓ {made} is now {child}\n"
    assert ok(forkd("eval", "--sandbox", "main", "x")).strip() == "3"
    assert [row["id"] for row in json.loads(ok(forkd("ls", "--json")))] == [child]
    ok(forkd("rmi", "--force", tag))


async def test_the_console_and_the_messages_of_the_vmm_can_be_read_and_followed(controller: AsyncController) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    await controller.exec_command(child, ["sh", "-c", "echo one > /dev/console"])
    first = await controller.sandbox_logs(child)
    assert "one\r\n" in first["text"]
    assert first["end"] - first["begin"] == len(first["text"])
    assert await controller.sandbox_logs(child) == first
    await controller.pause_sandbox(child)
    assert await controller.sandbox_logs(child) == first
    assert (await controller.sandbox_logs(child, "vmm"))["source"] == "vmm"
    await controller.resume_sandbox(child)
    heard = bytearray()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(controller.follow_logs, child, heard.extend)
            await controller.exec_command(child, ["sh", "-c", "echo two > /dev/console"])
            while b"two\r\n" not in heard:
                await trio.sleep(0.02)
            await controller.kill_sandbox(child)
    assert heard.count(b"one\r\n") == 1
    with pytest.raises(ControllerError) as refused:
        await controller.sandbox_logs(child)
    assert refused.value.status == 404


async def test_a_log_that_is_not_there_is_refused(controller: AsyncController) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    with pytest.raises(ControllerError) as refused:
        await controller.sandbox_logs(child, "secret")
    assert (refused.value.status, refused.value.code) == (400, "bad_input")


async def test_a_sandbox_differs_from_its_snapshot_and_its_sibling_in_what_was_done(
    controller: AsyncController,
) -> None:
    with trio.fail_after(300):
        one = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
        two = (await controller.fork(one, 1))[0]["id"]
        await controller.exec_command(
            one, ["sh", "-c", "mkdir /root/new; echo x > /root/new/file; echo y >> /etc/passwd"]
        )
        await controller.exec_command(one, ["rm", "/etc/hostname", "/etc/debian_version"])
        await controller.exec_command(two, ["touch", "/root/theirs"])
        code = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 4321)); s.listen()"
        await controller.eval_code(one, code)
        sleeper = await controller.start_process(one, ["sleep", "1000"])
        found = await controller.diff_sandbox(one, two)
        assert (found["id"], found["against"]) == (one, two)
        assert found["added"] == ["/root/new"]
        assert set(found["changed"]) - OF_EACH_FORK == {"/etc/passwd"}
        assert set(found["removed"]) - OF_EACH_FORK == {"/etc/debian_version", "/root/theirs"}
        assert {"pid": sleeper["pid"], "args": ["sleep", "1000"]} in found["processes_started"]
        assert (found["ports_opened"], found["ports_closed"]) == ([4321], [])
        assert (found["unread"], found["truncated"]) == ([], False)
        assert found["changed_memory_bytes"] > 0
        own = await controller.diff_sandbox(one)
        assert own["against"] == PARENT
        assert "/root/new" in own["added"]
        assert "/root/theirs" not in own["removed"]
        assert own["against_changed_memory_bytes"] is None
        assert {row["id"] for row in await controller.list_sandboxes()} == {one, two}
        with pytest.raises(ControllerError) as refused:
            await controller.diff_sandbox(one, "nothing")
        assert refused.value.status == 404


async def test_a_snapshot_differs_from_another_one_and_from_what_it_builds_on(controller: AsyncController) -> None:
    with trio.fail_after(300):
        child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
        await controller.exec_command(child, ["touch", "/root/early"])
        first = (await controller.branch_sandbox(child, mode="diff"))["tag"]
        await controller.exec_command(child, ["touch", "/root/late"])
        second = (await controller.branch_sandbox(child, mode="diff"))["tag"]
        try:
            found = await controller.diff_sandbox(second, first)
            assert (found["id"], found["against"], found["added"]) == (second, first, ["/root/late"])
            assert found["changed_memory_bytes"] > 0 and found["against_changed_memory_bytes"] > 0
            own = await controller.diff_sandbox(first)
            assert (own["against"], own["against_changed_memory_bytes"]) == (PARENT, 0)
            assert "/root/early" in own["added"]
            assert "/root/late" in (await controller.diff_sandbox(child, first))["added"]
            with pytest.raises(ControllerError, match="builds on no other"):
                await controller.diff_sandbox(PARENT)
            assert [row["id"] for row in await controller.list_sandboxes()] == [child]
        finally:
            await controller.delete_snapshot(second, force=True)
            await controller.delete_snapshot(first, force=True)


async def test_a_fan_out_keeps_the_best_and_ends_the_rest(controller: AsyncController) -> None:
    with trio.fail_after(120):
        command = ["sh", "-c", "[ $FORKD_INDEX != 2 ] || exit 3; echo noise; echo $((FORKD_INDEX * 10))"]
        rows = await controller.fanout(PARENT, 3, command, keep=2, best="value if exit_code == 0 else -1")
        told = [(row["index"], row["score"], row["kept"]) for row in rows]
        assert told == [(1, 10, True), (0, 0, True), (2, -1, False)]
        assert rows[2]["result"]["exit_code"] == 3
        assert {row["id"] for row in await controller.list_sandboxes()} == {rows[0]["id"], rows[1]["id"]}
        for fields in ({"best": "__import__('os')"}, {"best": "2 ** 9"}, {"keep": 4}):
            with pytest.raises(ControllerError) as refused:
                await controller.fanout(PARENT, 3, ["true"], **fields)
            assert (refused.value.status, refused.value.code) == (400, "bad_input")
        assert len(await controller.list_sandboxes()) == 2


async def test_what_happens_to_a_sandbox_is_told_and_can_be_asked_for_later(controller: AsyncController) -> None:
    heard: list[dict[str, Any]] = []
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(controller.follow_events, heard.append)
            while not heard:
                await trio.sleep(0.02)
            one, two = [row["id"] for row in await controller.spawn_sandboxes(PARENT, 2)]
            await controller.pause_sandbox(one)
            await controller.kill_sandbox(one)
            while not any(event["event"] == "end" for event in heard):
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        assert heard[0]["event"] == "following"
        assert [event["event"] for event in heard if event.get("id") == one] == ["spawn", "paused", "end"]
        assert "spawn" in [event["event"] for event in heard if event.get("id") == two]
        first = next(event["seq"] for event in heard if event.get("id") == one)
        later: list[dict[str, Any]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(controller.follow_events, later.append, first, one)
            while len(later) < 3:
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        assert [event["event"] for event in later] == ["following", "paused", "end"]


def test_files_are_copied_in_and_out(daemon: Any, forkd: Forkd, tmp_path: Path) -> None:
    child = json.loads(ok(forkd("spawn", "--tag", PARENT, "--json")))[0]["id"]
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "data").write_bytes(bytes(range(256)) * 999)
    ok(forkd("cp", str(tree / "data"), f"{child}:/root/one"))
    ok(forkd("cp", f"{child}:/root/one", str(tmp_path / "back")))
    assert (tmp_path / "back").read_bytes() == (tree / "data").read_bytes()
    refused = forkd("cp", f"{child}:/root/nothing", str(tmp_path / "gone"))
    assert refused.returncode != 0
    assert not (tmp_path / "gone").exists()
