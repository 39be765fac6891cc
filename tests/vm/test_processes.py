"""Processes that outlive their request: started, listened to, fed, signalled, found again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
async def child(controller: AsyncController) -> AsyncIterator[str]:
    with trio.fail_after(60):
        yield (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]


async def follow(controller: AsyncController, child: str, process: Any, position: int = 0) -> tuple[bytes, Any]:
    pieces: list[bytes] = []
    done = await controller.follow_process(child, process, lambda kind, data: pieces.append(data), position)
    return b"".join(pieces), done


async def test_a_process_goes_on_without_listeners_and_is_found_by_tag(controller: AsyncController, child: str) -> None:
    started = await controller.start_process(
        child, shell="echo one; read x; echo got $x; exit 5", stdin=True, tag="job"
    )
    assert started["running"]
    with pytest.raises(ControllerError) as caught:
        await controller.start_process(child, ["true"], tag="job")
    assert (caught.value.status, caught.value.code) == (409, "conflict")
    await controller.send_stdin(child, "job", b"word\n", eof=True)
    said, done = await follow(controller, child, "job")
    assert said == b"one\ngot word\n"
    assert (done["exit_code"], done["running"], done["truncated"]) == (5, False, False)
    again, _ = await follow(controller, child, started["pid"], position=4)
    assert again == b"got word\n"
    rows = await controller.list_processes(child)
    assert [row["exit_code"] for row in rows if row["tag"] == "job"] == [5]
    kept = await controller.process_output(child, "job")
    assert kept["stdout"] == b"one\ngot word\n"


async def test_a_fork_knows_the_tags_of_what_it_inherits_and_what_takes_input(
    controller: AsyncController, child: str
) -> None:
    await controller.start_process(child, ["cat"], stdin=True, tag="fed")
    await controller.start_process(child, ["sleep", "1000"], tag="deaf")
    fork = (await controller.fork(child, 1))[0]["id"]
    with pytest.raises(ControllerError, match="has the tag"):
        await controller.start_process(fork, ["true"], tag="fed")
    with pytest.raises(ControllerError, match="without stdin"):
        await controller.send_stdin(fork, "deaf", b"x")
    await controller.send_stdin(fork, "fed", b"word", eof=True)
    said, done = await follow(controller, fork, "fed")
    assert (said, done["exit_code"], done["tag"]) == (b"word", 0, "fed")


async def test_signals_and_time_limits_reach_the_whole_group(controller: AsyncController, child: str) -> None:
    script = "sleep 1000 & echo $!; wait"
    for end in ("signal", "kill", "timeout"):
        process = await controller.start_process(child, shell=script, timeout_secs=2 if end == "timeout" else None)
        if end == "signal":
            await controller.signal_process(child, process["pid"], "SIGTERM")
        elif end == "kill":
            await controller.kill_process(child, process["pid"])
        said, done = await follow(controller, child, process["pid"])
        assert done["reason"] == ("timed_out" if end == "timeout" else "signaled")
        assert done["exit_code"] == {"signal": 143, "kill": 137, "timeout": 124}[end]
        if said:
            gone = await controller.exec_command(child, ["sh", "-c", f"while kill -0 {int(said)}; do :; done"])
            assert gone["reason"] == "exited"


async def test_output_nobody_reads_is_cut_at_its_beginning_and_says_so(controller: AsyncController, child: str) -> None:
    process = await controller.start_process(child, shell="head -c 3000000 /dev/zero; echo end")
    while (await controller.get_process(child, process["pid"]))["running"]:
        await trio.sleep(0.05)
    said, done = await follow(controller, child, process["pid"])
    assert said.endswith(b"end\n")
    assert len(said) <= 256 * 1024
    assert done["lost"] == done["output_begin"]
    assert done["truncated"]
    assert done["output_begin"] + len(said) == done["output_end"] == 3000004


async def test_output_waits_for_the_listener_that_was_announced(controller: AsyncController, child: str) -> None:
    script = "head -c 3000000 /dev/zero; touch /tmp/said"
    process = await controller.start_process(child, shell=script, attach=True)
    gone = await controller.exec_command(child, ["sh", "-c", "sleep 1; test -e /tmp/said"])
    assert gone["exit_code"] == 1  # what the buffer has no room for is not said yet
    said, done = await follow(controller, child, process["pid"])
    assert (len(said), done["lost"]) == (3000000, 0)


async def test_a_slow_listener_loses_nothing_and_slows_only_its_own_command(
    controller: AsyncController, child: str
) -> None:
    process = await controller.start_process(child, shell="head -c 3000000 /dev/zero | tr '\\0' x")
    async with await controller.attach_process(child, process["pid"]) as slow:
        assert json.loads(await anext(slow))["event"] == "started"
        fast = await controller.exec_command(child, ["sh", "-c", "head -c 2000000 /dev/zero | wc -c"], 120)
        assert fast["stdout"].strip() == "2000000"
        assert (await controller.get_process(child, process["pid"]))["running"]
        size = 0
        async for message in slow:
            if isinstance(message, bytes):
                size += len(message) - 1
            else:
                assert json.loads(message)["event"] == "end"
        assert size == 3000000


async def test_a_terminal_echoes_resizes_interrupts_and_survives_a_lost_connection(
    controller: AsyncController, child: str
) -> None:
    # No prompt: it would come anywhere between what is typed ahead.
    process = await controller.start_process(child, ["sh"], pty={"rows": 30, "cols": 100}, env={"PS1": ""})
    pid, at = process["pid"], 0

    async def until(channel: Any, words: bytes) -> bytes:
        nonlocal at
        said = b""
        while words not in said:
            message = await anext(channel)
            if isinstance(message, bytes):
                said += message[1:]
                at += len(message) - 1
        return said

    async with await controller.attach_process(child, pid) as terminal:
        await terminal.send(b"stty size\n")
        await until(terminal, b"30 100\r\n")
        await terminal.send(json.dumps({"resize": [50, 60]}))
        await terminal.send(b"stty size\n")
        await until(terminal, b"50 60\r\n")
        await terminal.send(b"cat\nmark\n")
        await until(terminal, b"mark\r\nmark\r\n")  # typed, and said by a cat that runs
        await terminal.send(b"\x03")
        await until(terminal, b"^C\r\n")  # the shell is back: what was typed before that is lost with cat
        await terminal.send(b"echo after=$?\n")
        await until(terminal, b"after=130")
    await controller.send_stdin(child, pid, b"echo alone\n")
    async with await controller.attach_process(child, pid, position=at) as terminal:
        await until(terminal, b"\nalone\r\n")
        await terminal.send(b"exit 9\n")
        last = [message async for message in terminal][-1]
        assert json.loads(last)["process"]["exit_code"] == 9


async def test_what_is_not_possible_is_refused_by_name(controller: AsyncController, child: str) -> None:
    refusals: list[tuple[Any, int, str]] = [
        (controller.start_process(child, ["no-such-program"]), 400, "command_not_found"),
        (controller.start_process(child, []), 400, "bad_input"),
        (controller.start_process(child, ["true"], shell="true"), 400, "bad_input"),
        (controller.start_process(child, ["true"], cwd="/nowhere"), 400, "bad_input"),
        (controller.start_process(child, ["true"], user="nobody-at-all"), 400, "bad_input"),
        (controller.start_process(child, ["true"], pty={"rows": 0, "cols": 5}), 400, "bad_input"),
        (controller.get_process(child, 99999), 404, "process_not_found"),
        (controller.get_process("sb-none", 1), 404, "sandbox_not_found"),
        (controller.attach_process(child, "none"), 404, "process_not_found"),
        (controller.connect_port(child, 1), 502, "port_closed"),
    ]
    for call, status, code in refusals:
        with pytest.raises(ControllerError) as caught:
            await call
        assert (caught.value.status, caught.value.code) == (status, code), caught.value
    process = await controller.start_process(child, ["sleep", "100"])
    for call, code in (
        (controller.signal_process(child, process["pid"], "SIGNONE"), "bad_input"),
        (controller.resize_terminal(child, process["pid"], 5, 5), "conflict"),
        (controller.send_stdin(child, process["pid"], b"x"), "conflict"),
    ):
        with pytest.raises(ControllerError) as caught:
            await call
        assert caught.value.code == code
