"""The real agent, over a socket pair."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.guestframes import FrameType, encode_credit, encode_frame, encode_object
from forkd.guestlink import GuestLink, fresh_identity
from forkd.specs.errors import BadInput, CapabilityMissing, Conflict, ForkdError, GuestError, GuestFileNotFound
from tests.unit.guest_support import AGENT, AgentProcess, FakeGuest, check_shape, is_running, running_agent

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.fixture
async def link(agent: AgentProcess) -> AsyncIterator[GuestLink]:
    with trio.fail_after(20):
        async with agent.link() as link:
            yield link


async def sh(link: GuestLink, script: str, **options: Any) -> str:
    """Standard output of a shell script that must succeed."""
    result = await link.run(["sh", "-c", script], **options)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def code_of(error: pytest.ExceptionInfo[ForkdError]) -> object:
    return error.value.details["guest_code"]


# -- the agent as a whole --------------------------------------------------------------------------------------------


def test_the_agent_is_valid_python_3_7_and_imports_only_the_standard_library() -> None:
    tree = ast.parse(AGENT.read_text(), feature_version=(3, 7))
    import sys

    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"numpy"}


async def test_ping_and_hello_have_their_documented_shape(link: GuestLink) -> None:
    hello = await link.ready()
    assert hello.locked
    assert hello.notes == []
    assert hello.warmup_ready
    pong = await link.request({"op": "ping"}, timeout=5)
    check_shape({"ok": True, **pong}, "answer_ping")
    assert pong["pid"] == hello.pid
    assert pong["hostname"] == "box"


async def test_a_locked_agent_answers_only_ping(agent: AgentProcess) -> None:
    async with agent.link(locked=True) as link:
        assert (await link.request({"op": "ping"}, timeout=5))["pong"]
        for op in ({"op": "exec", "args": ["true"]}, {"op": "eval", "code": "1"}, {"op": "stat", "path": "/"}):
            with pytest.raises(GuestError) as caught:
                await link.request(op, timeout=5)
            assert code_of(caught) == "locked"


async def test_a_resume_that_is_malformed_leaves_the_agent_locked(agent: AgentProcess) -> None:
    async with agent.link(locked=True) as link:
        for wrong in ({"entropy": "00"}, {"time_ns": -1}, {"machine_id": "x" * 32}, {"env": {"A": 1}}, {"hostname": 7}):
            with pytest.raises(BadInput):
                await link.request({"op": "resume", **wrong}, timeout=5)
        with pytest.raises(GuestError, match="locked"):
            await link.request({"op": "procs"}, timeout=5)


async def test_resume_gives_a_new_identity(agent: AgentProcess) -> None:
    identity = fresh_identity("sandbox-7", {"GREETING": "hello"})
    async with agent.link(identity) as link:
        pong = await link.request({"op": "ping"}, timeout=5)
        assert identity.entropy is not None
        assert pong["recorded"] == {
            "entropy": identity.entropy.hex(),
            "hostname": "sandbox-7",
            "machine_id": identity.machine_id,
        }
        assert await sh(link, "echo $GREETING") == "hello\n"
        assert (await link.eval("import os; os.environ['GREETING']")).result == "'hello'"
    async with agent.link() as link:
        assert await sh(link, "echo $GREETING") == "\n"
        assert (await link.eval("'GREETING' in os.environ")).result == "False"


async def test_a_resumed_interpreter_does_not_repeat_its_random_numbers(agent: AgentProcess) -> None:
    seen = set()
    async with agent.link() as link:
        await link.eval("import random")
    for _ in range(3):
        async with agent.link() as link:
            seen.add((await link.eval("state = random.getstate(); random.random()")).result)
    assert len(seen) == 3


async def test_resume_reseeds_an_eval_that_is_running(agent: AgentProcess, tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        f"import random\nrandom.seed(7)\nstate = random.getstate()\nopen({str(started)!r}, 'w').close()\n"
        "while random.getstate() == state: pass"
    )
    async with agent.link() as link, link.open_stream({"op": "eval", "code": code}):
        with trio.fail_after(10):
            while not started.exists():
                await trio.sleep(0.01)
        await link.aclose()
    async with agent.link() as link:
        assert (await link.eval("random.getstate() == state", timeout=10)).result == "False"


async def test_the_clock_is_set_and_shifted(agent: AgentProcess) -> None:
    async with agent.link(locked=True) as link:
        answer = await link.request({"op": "resume", "time_ns": 10**18}, timeout=5)
        check_shape({"ok": True, **answer}, "answer_resume")
        assert 0 <= answer["time_ns"] - 10**18 < 10**9
        shifted = await link.request({"op": "clock", "delta_ns": -(10**17)}, timeout=5)
        assert 0 <= shifted["time_ns"] - 9 * 10**17 < 10**10


async def test_unknown_ops_and_malformed_requests_are_refused(link: GuestLink) -> None:
    with pytest.raises(CapabilityMissing) as caught:
        await link.request({"op": "fly"}, timeout=5)
    assert code_of(caught) == "bad_op"
    wrong: list[dict[str, Any]] = [
        {"op": ["ping"]},
        {},
        {"op": "exec"},
        {"op": "exec", "args": []},
        {"op": "exec", "args": ["true", 1]},
        {"op": "exec", "args": ["true"], "timeout": 0},
        {"op": "exec", "args": ["true"], "timeout": float("nan")},
        {"op": "exec", "args": ["true"], "timeout": True},
        {"op": "exec", "args": ["a\0b"]},
        {"op": "exec", "args": ["\ud800"]},
        {"op": "exec", "args": ["true"], "env": {"A=B": "x"}},
        {"op": "exec", "args": ["true"], "window": -1},
        {"op": "exec", "args": ["true"], "pty": {"rows": "many"}},
        {"op": "read", "path": "/etc/passwd", "offset": -1},
        {"op": "stat", "path": "\0"},
        {"op": "clock", "delta_ns": 1 << 70},
        {"op": "dial", "port": 70000},
        {"op": "dial", "port": 80, "host": "example.com"},
    ]
    for op in wrong:
        with pytest.raises(BadInput) as caught:
            await link.request(op, timeout=5)
        assert code_of(caught) == "bad_request", op


# -- exec ------------------------------------------------------------------------------------------------------------


async def test_a_command_reports_output_and_exit_code(link: GuestLink) -> None:
    result = await link.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.stdout, result.stderr, result.exit_code, result.reason) == ("out\n", "err\n", 3, "exited")


async def test_how_a_command_ended_is_told_apart(link: GuestLink) -> None:
    killed = await link.run(["sh", "-c", "kill -SEGV $$"])
    assert (killed.reason, killed.signal, killed.exit_code) == ("signaled", signal.SIGSEGV, 139)
    missing = await link.run(["no-such-program"])
    assert (missing.reason, missing.exit_code) == ("not_found", 127)
    assert missing.error == "no-such-program: command not found"
    assert (await link.run(["/etc/passwd"])).exit_code == 126
    assert (await link.run(["/"])).exit_code == 126
    assert (await link.run(["sh", "-c", "exit 127"])).reason == "exited"


@pytest.mark.parametrize(
    ("options", "code"), [({"cwd": "/nowhere"}, "bad_cwd"), ({"user": "nobody-at-all"}, "unknown_user")]
)
async def test_an_impossible_place_or_user_is_refused(link: GuestLink, options: dict[str, Any], code: str) -> None:
    with pytest.raises(BadInput) as caught:
        await link.run(["true"], **options)
    assert code_of(caught) == code


async def test_environment_and_working_directory_are_as_asked(link: GuestLink, tmp_path: Path) -> None:
    assert await sh(link, "echo $A; pwd", env={"A": "b"}, cwd=str(tmp_path)) == f"b\n{tmp_path}\n"
    assert await sh(link, "echo ${HOME-none}", clear_env=True) == "none\n"
    result = await link.run(["/usr/bin/env"], clear_env=True, env={"ONLY": "this"})
    assert result.stdout == "ONLY=this\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="changing users needs root")
async def test_a_command_runs_as_another_user(link: GuestLink) -> None:
    assert await sh(link, "id -u; id -g", user="12345:54321") == "12345\n54321\n"
    assert await sh(link, "id -un; echo $USER", user="nobody") == "nobody\nnobody\n"
    async with link.exec(["sh", "-c", "test -O $(tty) && id -u"], user="nobody", pty=(24, 80)) as stream:
        assert b"".join([data async for _, data in stream]) == b"65534\r\n"


async def test_input_comes_back_from_cat_byte_for_byte(link: GuestLink, tmp_path: Path) -> None:
    data = os.urandom(MIB + 17)
    taken = bytearray()

    async def take(name: str, piece: bytes) -> None:
        assert name == "stdout"
        taken.extend(piece)

    result = await link.run(["cat"], stdin=data, on_output=take)
    assert result.exit_code == 0
    assert taken == data


async def test_input_nobody_reads_does_no_harm(link: GuestLink) -> None:
    assert (await link.run(["true"], stdin=bytes(2 * MIB))).exit_code == 0
    assert (await link.run(["cat"], stdin=b"")).stdout == ""
    assert (await link.run(["sh", "-c", "exec 0<&-; echo closed"], stdin=bytes(2 * MIB))).stdout == "closed\n"
    assert (await link.run(["cat"])).stdout == ""


async def test_output_that_is_no_text_is_shown_with_replacements(link: GuestLink) -> None:
    assert (await link.run(["printf", r"a\377b\000"])).stdout == "a\ufffdb\0"


async def test_a_signal_reaches_the_whole_group(link: GuestLink) -> None:
    script = "trap 'echo got it; exit 5' TERM; echo ready; sleep 1000 & wait"
    async with link.exec(["sh", "-c", script]) as stream:
        assert await anext(stream) == ("stdout", b"ready\n")
        stream.control({"signal": 15})
        assert await anext(stream) == ("stdout", b"got it\n")
        assert (await stream.result())["exit_code"] == 5


async def test_a_time_limit_kills_grandchildren_too(link: GuestLink) -> None:
    result = await link.run(["sh", "-c", "sleep 1000 & echo $!; sleep 1000"], timeout=2)
    assert (result.reason, result.exit_code, result.timed_out) == ("timed_out", 124, True)
    with trio.fail_after(10):
        while is_running(int(result.stdout)):
            await trio.sleep(0.01)


async def test_a_command_that_takes_its_time_limit_seriously_leaves_no_timer_behind(link: GuestLink) -> None:
    assert (await link.run(["true"], timeout=1000)).reason == "exited"


async def test_leaving_a_stream_ends_its_command(link: GuestLink) -> None:
    async with link.exec(["sh", "-c", "echo $$; sleep 1000"]) as stream:
        pid = (await stream.started())["pid"]
        assert await anext(stream) == ("stdout", b"%d\n" % pid)
    answer = await link.request({"op": "procs"}, timeout=5)
    while any(each["pid"] == pid for each in answer["procs"]):
        answer = await link.request({"op": "procs"}, timeout=5)
    assert not is_running(pid)


async def test_the_answer_does_not_wait_for_a_grandchild_that_holds_the_pipe(link: GuestLink) -> None:
    result = await link.run(["sh", "-c", "sleep 1000 & echo $!"])
    assert result.exit_code == 0
    os.kill(int(result.stdout), signal.SIGKILL)


async def test_a_grandchild_may_go_on_writing_after_the_answer(link: GuestLink, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "done")
    script = "(read x <go; head -c 300000 /dev/zero; echo $? >done) & echo started"
    assert await sh(link, script, cwd=str(tmp_path)) == "started\n"
    assert await sh(link, "echo >go; cat done", cwd=str(tmp_path)) == "0\n"


async def test_the_last_output_is_complete_however_small_the_window(link: GuestLink) -> None:
    async with link.exec(["sh", "-c", "head -c 50000 /dev/zero; head -c 5 /dev/zero >&2"], window=1000) as stream:
        sizes = {"stdout": 0, "stderr": 0}
        async for name, data in stream:
            assert len(data) <= 1000
            sizes[name] += len(data)
    assert sizes == {"stdout": 50000, "stderr": 5}


async def test_a_terminal_has_a_size_and_ends_its_input(link: GuestLink) -> None:
    script = "stty -echo; stty size; trap 'stty size' WINCH; echo ready; while :; do cat && break; done; echo bye"
    async with link.exec(["sh", "-c", script], pty=(30, 100)) as stream:
        said = b""
        while b"ready" not in said:
            said += (await anext(stream))[1]
        assert said.startswith(b"30 100\r\n")
        await stream.send_data(b"typed\n")
        while b"typed" not in said:
            said += (await anext(stream))[1]
        await stream.end_input()
        async for name, data in stream:
            assert name == "stdout"
            said += data
        assert said.endswith(b"bye\r\n")


async def test_a_terminal_can_be_resized_and_controls_its_session(link: GuestLink) -> None:
    async with link.exec(["sh", "-c", "echo ready; cat; stty size </dev/tty"], pty=(5, 6)) as stream:
        assert (await anext(stream))[1] == b"ready\r\n"
        stream.control({"resize": [50, 60]})
        await stream.end_input()
        assert b"50 60\r\n" in b"".join([data async for _, data in stream])


async def test_wrong_control_messages_are_ignored(link: GuestLink) -> None:
    async with link.exec(["cat"], stdin=True) as stream:
        for message in ({"signal": "TERM"}, {"signal": 9999}, {"resize": ["a"]}, {"what": 1}):
            stream.control(message)
        await stream.end_input()
        assert (await stream.result())["reason"] == "exited"


async def test_a_detached_command_is_listed_until_it_ends(link: GuestLink) -> None:
    async with link.exec(["sleep", "1000"], detach=True) as stream:
        answer = await stream.result()
    check_shape({"ok": True, **answer}, "answer_exec")
    assert answer["reason"] == "started"
    procs = await link.request({"op": "procs"}, timeout=5)
    check_shape({"ok": True, **procs}, "answer_procs")
    assert [each["args"] for each in procs["procs"] if each["pid"] == answer["pid"]] == [["sleep", "1000"]]
    os.kill(answer["pid"], signal.SIGKILL)
    while any(each["pid"] == answer["pid"] for each in procs["procs"]):
        procs = await link.request({"op": "procs"}, timeout=5)


async def test_a_flood_with_a_slow_reader_holds_up_nobody(link: GuestLink) -> None:
    size = 50 * MIB
    async with link.exec(["head", "-c", str(size), "/dev/zero"]) as stream:
        got = len((await anext(stream))[1])
        for _ in range(5):  # nobody reads the flood meanwhile
            with trio.fail_after(2):
                assert (await link.request({"op": "ping"}, timeout=None))["pong"]
        async for _, data in stream:
            got += len(data)
    assert got == size


async def test_output_beyond_the_limit_is_dropped_and_the_command_lives(link: GuestLink) -> None:
    result = await link.run(["sh", "-c", "head -c 5000000 /dev/zero; exit 4"], limit=1000)
    assert (len(result.stdout), result.truncated, result.exit_code) == (1000, True, 4)


async def test_many_commands_at_once_get_their_own_output(link: GuestLink) -> None:
    results: dict[int, str] = {}

    async def one(number: int) -> None:
        results[number] = await sh(link, f"cat; echo {number}", stdin=b"in ")

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(one, number)
    assert results == {number: f"in {number}\n" for number in range(30)}


async def test_commands_do_not_inherit_ignored_signals_or_descriptors(link: GuestLink) -> None:
    shown = await sh(link, "ls /proc/self/fd | wc -l; grep SigIgn /proc/self/status; grep SigBlk /proc/self/status")
    count, _, ignored, _, blocked = shown.split()
    assert (count, blocked) == ("4", "0" * 16)
    # What the test run itself was started with may be ignored; what Python ignores for itself must not be.
    assert not int(ignored, 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


# -- eval ------------------------------------------------------------------------------------------------------------


async def test_eval_answers_expressions_and_runs_statements(link: GuestLink) -> None:
    assert (await link.eval("1 + 1")).result == "2"
    assert (await link.eval("None")).result == "None"
    assert (await link.eval("x = 5")).result is None
    assert (await link.eval("y = x * 2\n[x, y]")).result == "[5, 10]"
    assert (await link.eval("")).result is None
    assert (await link.eval("def f():\n    return x\n\nf()")).result == "5"
    assert (await link.eval("import __main__; __main__.x is x")).result == "True"


async def test_eval_captures_what_is_printed(link: GuestLink) -> None:
    code = ["import sys", "print('out')", "print('err', file=sys.stderr)", "sys.stdout.buffer.write(b'raw\\xff')"]
    result = await link.eval("\n".join([*code, "sys.stdout.close()", "7"]))
    assert (result.result, result.stdout) == ("7", "out\nerr\nraw\ufffd")
    assert (await link.eval("print('again')")).stdout == "again\n"


async def test_an_exception_has_its_traceback_and_what_was_printed(link: GuestLink) -> None:
    result = await link.eval("print('before')\ndef f():\n    return 1 / 0\nf()")
    assert (result.error, result.exit_code, result.stdout) == ("ZeroDivisionError: division by zero", 1, "before\n")
    assert result.traceback is not None
    assert "return 1 / 0" in result.traceback
    assert "agent.py" not in result.traceback
    syntax = await link.eval("1 +")
    assert syntax.error is not None
    assert syntax.error.startswith("SyntaxError: ")
    assert (await link.eval("raise SystemExit(3)")).error == "SystemExit: 3"
    awkward = "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E"
    assert (await link.eval(awkward)).error == "E: (its text cannot be shown: ZeroDivisionError)"


async def test_code_that_ends_the_interpreter_costs_only_the_names(link: GuestLink) -> None:
    await link.eval("kept = 1")
    for code in ("import os; os._exit(3)", "import os; os.kill(os.getpid(), 11)", "import os; os.closerange(3, 100)"):
        result = await link.eval(code)
        assert result.error is not None
        assert result.error.startswith("the interpreter exited")
        assert (await link.eval("'kept' in globals()")).result == "False"


async def test_an_endless_loop_is_interrupted_and_the_names_stay(link: GuestLink) -> None:
    await link.eval("kept = 1")
    result = await link.eval("print('looping')\nwhile True: pass", timeout=0.2)
    assert (result.error, result.exit_code, result.stdout) == ("Timeout: took longer than 0.2 s", 124, "looping\n")
    assert (await link.eval("kept")).result == "1"


async def test_code_that_ignores_interrupts_is_killed(link: GuestLink) -> None:
    result = await link.eval("import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass", timeout=0.1)
    assert result.exit_code == 124
    assert (await link.eval("6 * 7")).result == "42"


async def test_evals_wait_for_each_other_and_time_limits_count_the_wait(link: GuestLink) -> None:
    order: list[str | None] = []

    async def one(code: str, timeout: float | None = None) -> None:
        result = await link.eval(code, timeout)
        order.append(result.result or result.error)

    async with trio.open_nursery() as nursery:
        for code in ("import threading; gate = threading.Event(); 'first'", "gate.wait(10) or 'second'"):
            await link.ready()
            nursery.start_soon(one, code)
            await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.start_soon(one, "'third'", 0.1)
        while len(order) < 2:
            await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    assert order == ["'first'", "Timeout: took longer than 0.1 s"]
    assert (await link.eval("'free again'", timeout=5)).result == "'free again'"


async def test_what_eval_answers_is_cut_not_lost(link: GuestLink) -> None:
    result = await link.eval("print('a' * 3_000_000)\n'b' * 3_000_000")
    assert result.result is not None
    assert len(result.result) == len(result.stdout) == MIB
    odd = await link.eval("print('\\x01' * 3_000_000)\n'\\x01' * 3_000_000")
    assert odd.stdout == "\x01" * len(odd.stdout)
    assert len(odd.stdout) >= 100_000
    assert (await link.eval("print('\\ud800')")).stdout == "\\ud800\n"
    async with link.open_stream({"op": "eval", "code": "print('a' * 3_000_000)"}) as stream:
        answer = await stream.result()
    check_shape({"ok": True, **answer}, "answer_eval")
    assert answer["truncated"] is True


async def test_code_that_forks_is_answered_once(link: GuestLink) -> None:
    code = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\npid > 0"
    assert (await link.eval(code)).result == "True"
    assert (await link.eval("1")).result == "1"


# -- files -----------------------------------------------------------------------------------------------------------


async def read(link: GuestLink, path: Path, **options: Any) -> bytes:
    async with link.read_file(str(path), **options) as stream:
        return b"".join([data async for _, data in stream])


async def test_files_go_both_ways_unchanged(link: GuestLink, tmp_path: Path) -> None:
    data = os.urandom(3 * MIB + 1)
    assert await link.write_file(str(tmp_path / "f"), data) == len(data)
    assert (tmp_path / "f").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644
    assert await read(link, tmp_path / "f") == data
    assert await read(link, tmp_path / "f", offset=5, length=7) == data[5:12]
    assert await read(link, tmp_path / "f", offset=len(data) + 5) == b""
    assert await read(link, tmp_path / "f", length=0) == b""
    async with link.read_file(str(tmp_path / "f"), length=10) as stream:
        answer = await stream.result()
    check_shape({"ok": True, **answer}, "answer_read")
    assert answer == {"size": len(data), "sent": 10}


async def test_a_file_of_unknown_size_is_read_to_its_end(link: GuestLink) -> None:
    assert await read(link, Path("/proc/self/status")) != b""


async def test_a_file_is_never_seen_half_written(link: GuestLink, tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_text("old")
    target.chmod(0o640)
    async with link.open_stream({"op": "write", "path": str(target)}) as stream:
        await stream.send_data(bytes(MIB))
        assert (await link.request({"op": "ping"}, timeout=5))["pong"]
        assert target.read_text() == "old"
        await stream.send_data(b"end")
        await stream.end_input()
        await stream.result()
    assert target.stat().st_size == MIB + 3
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["f"]


async def test_an_abandoned_write_leaves_nothing(link: GuestLink, agent: AgentProcess, tmp_path: Path) -> None:
    async with link.open_stream({"op": "write", "path": str(tmp_path / "f")}) as stream:
        await stream.send_data(b"half")
    await link.request({"op": "ping"}, timeout=5)
    assert os.listdir(tmp_path) == []
    async with link.open_stream({"op": "write", "path": str(tmp_path / "f")}) as stream:
        await stream.send_data(b"half")
        await link.request({"op": "ping"}, timeout=5)
        assert len(os.listdir(tmp_path)) == 1
        await link.aclose()
    async with agent.link() as fresh:
        await fresh.request({"op": "ping"}, timeout=5)
        assert os.listdir(tmp_path) == []


async def test_write_options(link: GuestLink, tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "f"
    await link.write_file(str(deep), b"one", make_parents=True, mode=0o600)
    assert stat.S_IMODE(deep.stat().st_mode) == 0o600
    inode = deep.stat().st_ino
    await link.write_file(str(deep), b"two", append=True)
    assert deep.read_bytes() == b"onetwo"
    assert deep.stat().st_ino == inode
    await link.write_file(str(tmp_path / "new"), b"x", append=True)
    (tmp_path / "link").symlink_to(deep)
    await link.write_file(str(tmp_path / "link"), b"through")
    assert deep.read_bytes() == b"through"
    assert (tmp_path / "link").is_symlink()
    await link.write_file(str(tmp_path / ("n" * 255)), b"long name")


async def test_list_and_stat_describe_every_kind_of_file(link: GuestLink, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / os.fsdecode(b"z\xff")).touch()
    answer = await link.request({"op": "list", "path": str(tmp_path)}, timeout=5)
    check_shape({"ok": True, **answer}, "answer_list")
    found = {entry["name"]: entry for entry in answer["entries"]}
    assert {name: entry["type"] for name, entry in found.items()} == {
        "dir": "dir",
        "file": "file",
        "link": "symlink",
        "pipe": "fifo",
        "z?": "file",
    }
    assert found["file"]["size"] == 3
    assert found["link"]["target"] == "file"
    assert found["z?"]["name_b64"] == "ev8="
    check_shape({"ok": True, "entry": await link.stat(str(tmp_path / "file"))}, "answer_stat")
    assert (await link.stat("/"))["name"] == "/"
    assert (await link.stat("/dev/null"))["type"] == "char"


async def test_a_long_listing_comes_whole_and_a_longer_one_is_cut(link: GuestLink, tmp_path: Path) -> None:
    for number in range(10_001):
        (tmp_path / f"{'n' * 50}-{number:05}").touch()
    answer = await link.request({"op": "list", "path": str(tmp_path)}, timeout=10)
    assert (len(answer["entries"]), answer["truncated"]) == (10_000, True)
    (tmp_path / f"{'n' * 50}-00000").unlink()
    answer = await link.request({"op": "list", "path": str(tmp_path)}, timeout=10)
    assert (len(answer["entries"]), answer["truncated"]) == (10_000, False)


async def test_directories_are_made_moved_changed_and_removed(link: GuestLink, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    await link.mkdir(str(folder / "b"), parents=True)
    await link.chmod(str(folder), 0o700)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await link.move(str(folder), str(tmp_path / "c"))
    with pytest.raises(Conflict):
        await link.mkdir(str(tmp_path / "c"))
    with pytest.raises(Conflict, match="not empty"):
        await link.remove(str(tmp_path / "c"))
    await link.remove(str(tmp_path / "c"), recursive=True)
    await link.mkdir(str(folder))
    await link.remove(str(folder))
    assert os.listdir(tmp_path) == []


async def test_a_move_between_file_systems_copies(link: GuestLink, tmp_path: Path) -> None:
    other = Path("/dev/shm") / f"forkd-test-{os.urandom(4).hex()}"
    other.write_bytes(b"moved")
    try:
        if other.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("only one file system here")
        await link.move(str(other), str(tmp_path / "here"))
        assert (tmp_path / "here").read_bytes() == b"moved"
        assert not other.exists()
    finally:
        other.unlink(missing_ok=True)


async def test_what_is_wrong_with_a_path_has_its_own_code(link: GuestLink, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.mkfifo(tmp_path / "pipe")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"op": "read", "path": "missing"}, "no_such_file"),
        ({"op": "read", "path": "."}, "is_dir"),
        ({"op": "read", "path": "f/x"}, "not_dir"),
        ({"op": "read", "path": "pipe"}, "os_error"),
        ({"op": "read", "path": "/dev/zero"}, "os_error"),
        ({"op": "write", "path": "."}, "is_dir"),
        ({"op": "write", "path": "missing/x"}, "no_such_file"),
        ({"op": "write", "path": "pipe"}, "os_error"),
        ({"op": "write", "path": "x", "user": "nobody-at-all"}, "unknown_user"),
        ({"op": "list", "path": "f"}, "not_dir"),
        ({"op": "stat", "path": "missing"}, "no_such_file"),
        ({"op": "mkdir", "path": "f"}, "exists"),
        ({"op": "remove", "path": "missing"}, "no_such_file"),
        ({"op": "move", "from": "missing", "to": "x"}, "no_such_file"),
        ({"op": "chmod", "path": "missing", "mode": 0}, "no_such_file"),
        ({"op": "mkdir", "path": "/proc/x"}, "no_such_file"),
        ({"op": "write", "path": "/proc/version"}, "denied"),
    ]
    for op, code in cases:
        for key in ("path", "from", "to"):
            if key in op and not op[key].startswith("/"):
                op[key] = f"{tmp_path}/{op[key]}"
        with pytest.raises(ForkdError) as caught:
            await link.request(op, timeout=5)
        allowed = {code, "no_such_file"} if op["path" if "path" in op else "from"].startswith("/proc") else {code}
        assert code_of(caught) in allowed, op


async def test_a_full_disk_is_said(link: GuestLink) -> None:
    result = await link.run(["dd", "if=/dev/zero", "of=/dev/full", "count=1"])
    assert os.strerror(errno.ENOSPC) in result.stderr
    with pytest.raises(GuestFileNotFound):
        await link.write_file("/nowhere/at/all", b"")


# -- dial ------------------------------------------------------------------------------------------------------------


async def test_a_connection_carries_both_ways_and_closes_in_halves(link: GuestLink) -> None:
    data = os.urandom(MIB)

    async def serve(stream: trio.SocketStream) -> None:
        got = bytearray()
        async for piece in stream:
            got += piece
        await stream.send_all(bytes(reversed(got)))
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            async with link.open_stream({"op": "dial", "port": port, "host": host}) as stream:
                await stream.send_data(data)
                assert await stream.started() == {}
                await stream.end_input()
                got = [piece async for _, piece in stream]
            assert got[-1] == b""
            assert b"".join(got) == data[::-1]
        nursery.cancel_scope.cancel()


async def test_a_server_that_closes_first_is_seen_and_an_abandoned_connection_is_closed(link: GuestLink) -> None:
    closed = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(b"bye")
        await stream.send_eof()
        assert await stream.receive_some(10) == b""
        closed.set()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        async with link.open_stream({"op": "dial", "port": port}) as stream:
            assert [(await anext(stream))[1] for _ in range(2)] == [b"bye", b""]
            await stream.end_input()
            assert await stream.result() == {}
        await closed.wait()
        closed = trio.Event()
        async with link.open_stream({"op": "dial", "port": port}) as stream:
            await stream.started()
        await closed.wait()
        nursery.cancel_scope.cancel()


async def test_a_port_nobody_listens_on_refuses(link: GuestLink) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(GuestError) as caught:
            await link.request({"op": "dial", "port": 1, "host": host}, timeout=5)
        assert code_of(caught) == "refused"


# -- sessions --------------------------------------------------------------------------------------------------------


def frame(op: dict[str, Any], stream: int = 1) -> bytes:
    return encode_frame(FrameType.REQUEST, stream, encode_object(op))


async def answers_again(agent: AgentProcess) -> None:
    with trio.fail_after(10):
        async with agent.link() as link:
            assert (await link.run(["echo", "well"])).stdout == "well\n"


@pytest.mark.parametrize("cut", [1, 8, 9, 20, 300])
async def test_a_new_session_begins_in_the_middle_of_a_half_sent_frame(agent: AgentProcess, cut: int) -> None:
    half = frame({"op": "stat", "path": "x" * 400})[:cut]
    agent.host.sendall(agent.sync + bytes(16) + half)
    await answers_again(agent)


async def test_a_token_is_found_across_reads_and_across_the_end_of_a_frame(agent: AgentProcess) -> None:
    stream = agent.stream()
    guest = FakeGuest(stream)
    for split in range(1, 16):
        nonce = os.urandom(16)
        # The old frame lacks as many bytes as the first part of the token has: it is completed by the token.
        old = encode_frame(FrameType.NOOP, 0, bytes(50))[:-split]
        for part in (agent.sync + bytes(16) + old, agent.sync[:split], agent.sync[split:] + nonce[:3], nonce[3:]):
            await stream.send_all(part)
            await trio.testing.wait_all_tasks_blocked(0.002)
        await stream.send_all(frame({"op": "ping"}))
        mark = b"FORKDSYN" + nonce
        while mark not in guest.received:
            guest.received += await stream.receive_some(65536)
        del guest.received[: guest.received.index(mark) + len(mark)]
        assert (await guest.frame())[0] == FrameType.HELLO
        assert (await guest.frame())[:2] == (FrameType.RESPONSE, 1)
    await stream.aclose()


async def test_a_session_begins_while_the_former_one_floods_and_its_command_lives_on(agent: AgentProcess) -> None:
    with trio.fail_after(10):
        async with agent.link() as link, link.exec(["sh", "-c", "head -c 3000000 /dev/zero; echo end; cat"]) as stream:
            pid = (await stream.started())["pid"]
            await anext(stream)
            await link.aclose()
        async with agent.link() as link:
            procs = (await link.request({"op": "procs"}, timeout=5))["procs"]
            assert [each["pid"] for each in procs if each["pid"] == pid] == [pid]
            await sh(link, f"while [ -e /proc/{pid} ]; do :; done")  # the flood was dropped, so the command got on


async def test_a_former_session_loses_its_queue_but_not_the_running_eval(agent: AgentProcess, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    async with agent.link() as link:
        await link.eval("seen = []")
    stream = agent.stream()
    guest = FakeGuest(stream)
    waits = frame({"op": "eval", "code": f"open('{tmp_path}/gate').read(); seen.append(1)"}, 2)
    await stream.send_all(agent.sync + bytes(16) + frame({"op": "resume"}) + waits)
    await stream.send_all(frame({"op": "eval", "code": "seen.append(2)"}, 3) + frame({"op": "ping"}, 4))
    while b'"pong"' not in guest.received:
        guest.received += await stream.receive_some(65536)
    await stream.aclose()
    with trio.fail_after(5):
        async with agent.link() as link:
            await sh(link, f"echo >{tmp_path}/gate")
            assert (await link.eval("seen")).result == "[1]"


async def test_frames_against_the_rules_end_the_session_and_nothing_else(agent: AgentProcess) -> None:
    good = agent.sync + bytes(16) + frame({"op": "resume"}, 1)
    for bad in (
        b"\xff\xff\xff\xff" + bytes(5),
        encode_frame(FrameType.HELLO, 0),
        bytes([0, 0, 0, 0, 77, 0, 0, 0, 0]),
        frame({"op": "ping"}, 0),
        frame({"op": "exec", "args": ["cat"], "stdin": True}, 2) + frame({"op": "ping"}, 2),
        frame({"op": "exec", "args": ["sleep", "9"], "stdin": True}, 2)
        + encode_frame(FrameType.DATA_IN, 2, bytes(200_000)) * 3,
        frame({"op": "exec", "args": ["cat"], "stdin": True}, 2) + encode_frame(FrameType.CREDIT, 2, b"x"),
    ):
        stream = agent.stream()
        guest = FakeGuest(stream)
        await stream.send_all(good + bad)
        with trio.fail_after(5):
            while b'"bad_frame"' not in guest.received:
                guest.received += await stream.receive_some(65536)
        await stream.aclose()
        await answers_again(agent)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(encode_frame, st.sampled_from(list(FrameType)), st.integers(0, 4), st.binary(max_size=40)),
            st.builds(encode_credit, st.integers(0, 4), st.integers(0, 2**32 - 1)),
            st.builds(
                lambda stream, op, extra: encode_frame(FrameType.REQUEST, stream, encode_object({**extra, "op": op})),
                st.integers(1, 4),
                st.sampled_from(["ping", "resume", "clock", "procs", "read", "list", "stat", "eval", "dial", "write"]),
                st.dictionaries(
                    st.sampled_from(["path", "window", "timeout", "code", "port", "env", "delta_ns", "mode", "offset"]),
                    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just("1"), st.lists(st.none())),
                    max_size=3,
                ),
            ),
        ),
        max_size=12,
    )
)
def test_no_bytes_of_a_host_end_the_agent(agent: AgentProcess, parts: list[bytes]) -> None:
    agent.host.setblocking(True)
    agent.host.sendall(agent.sync + bytes(16) + frame({"op": "resume"}, 5) + b"".join(parts))
    trio.run(answers_again, agent)
    assert agent.process.poll() is None


def test_the_end_of_a_socket_ends_the_agent_and_all_it_started() -> None:
    async def start(agent: AgentProcess) -> list[int]:
        async with agent.link() as link:
            async with link.exec(["sleep", "1000"], detach=True) as stream:
                sleeper = (await stream.result())["pid"]
            code = "import os; os.getpid()"
            interpreter = (await link.eval(code)).result
            assert interpreter is not None
            return [sleeper, int(interpreter)]

    with running_agent() as agent:
        pids = trio.run(start, agent)
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)


# -- warm-up ---------------------------------------------------------------------------------------------------------

BRIDGE = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    if ask["code"] == "fail":
        answer = {"id": ask["id"], "error": "Error: no", "stack": "at nowhere"}
    else:
        answer = {"id": ask["id"], "result": {"code": ask["code"]}}
    print(json.dumps(answer), flush=True)
"""


def recipe(tmp_path: Path, **lines: str) -> Path:
    path = tmp_path / "recipe.env"
    path.write_text("# a recipe\n\n" + "".join(f"{key}={value}\n" for key, value in lines.items()))
    return path


async def test_a_warm_up_command_can_answer_evals(tmp_path: Path) -> None:
    (tmp_path / "bridge.py").write_text(BRIDGE)
    command = f"'python3 {tmp_path}/bridge.py'"
    with running_agent(recipe(tmp_path, FORKD_WARMUP_CMD=command, FORKD_AGENT_LANG='"node"')) as agent:
        async with agent.link() as link:
            hello = await link.ready()
            assert (hello.lang, hello.warmup_ready, hello.notes) == ("node", True, [])
            result = await link.eval("page.title()")
            assert (result.result, result.result_json) == (None, {"code": "page.title()"})
            failed = await link.eval("fail")
            assert (failed.error, failed.traceback, failed.exit_code) == ("Error: no", "at nowhere", 1)
            assert (await link.request({"op": "ping"}, timeout=5))["agent_lang"] == "node"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/nonexistent/program", "did not start"),
        ("false", "exited (code 1)"),
        ("'sleep 1000'", "was not ready in time"),
        ("'echo {}'", "is not ready"),
        ('"\'"', "FORKD_WARMUP_CMD is not understood"),
    ],
)
async def test_a_warm_up_that_fails_is_reported_and_does_not_hang(tmp_path: Path, command: str, said: str) -> None:
    path = recipe(tmp_path, FORKD_WARMUP_CMD=command, FORKD_WARMUP_TIMEOUT="1.0")
    with running_agent(path) as agent:
        async with agent.link() as link:
            hello = await link.ready()
            assert re.search(re.escape(said), " ".join(hello.notes)), hello.notes
            assert hello.warmup_ready == ("understood" in said)
            assert (await link.eval("1")).result == "1"


async def test_python_warm_up_code_runs_in_the_interpreter_and_again_in_a_fresh_one(tmp_path: Path) -> None:
    with running_agent(recipe(tmp_path, FORKD_WARMUP_PY="'import colorsys as c'")) as agent:
        async with agent.link() as link:
            assert (await link.eval("c.__name__")).result == "'colorsys'"
            await link.eval("import os; os._exit(0)")
            assert (await link.eval("c.__name__")).result == "'colorsys'"
    with running_agent(env={"FORKD_WARMUP_PY": "import no_such_module"}) as agent:
        async with agent.link() as link:
            notes = (await link.ready()).notes
            assert "FORKD_WARMUP_PY failed" in notes[0]
            assert "no_such_module" in notes[0]


async def test_a_running_guest_is_prepared_for_its_children(tmp_path: Path) -> None:
    (tmp_path / "bridge.py").write_text(BRIDGE)
    with running_agent() as agent:
        async with agent.link() as link:
            defaults = {"op": "prepare", "env": {"WHO": "prepared"}, "workdir": str(tmp_path)}
            check_shape(defaults, "request_prepare")
            await link.request(defaults, timeout=5)
            assert await sh(link, "echo $WHO; pwd") == f"prepared\n{tmp_path}\n"
            assert (await link.eval("import os; os.environ['WHO']")).result == "'prepared'"
            runtime = {"op": "prepare", "args": ["python3", f"{tmp_path}/bridge.py"], "lang": "node"}
            check_shape(runtime, "request_prepare")
            await link.request(runtime, timeout=20)
            assert (await link.eval("x")).result_json == {"code": "x"}
            assert (await link.request({"op": "ping"}, timeout=5))["agent_lang"] == "node"
            with pytest.raises(BadInput):
                await link.request(runtime, timeout=20)


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"args": ["/nonexistent/program"]}, "not_ready", "did not start"),
        ({"args": ["false"]}, "not_ready", "exited"),
        ({"args": ["sleep", "1000"], "timeout": 0.2}, "not_ready", "in time"),
        ({"args": []}, "bad_request", "args"),
        ({"lang": "node"}, "bad_request", "lang"),
        ({"workdir": "/nonexistent"}, "bad_cwd", "directory"),
    ],
)
async def test_a_preparation_that_fails_says_why_and_changes_nothing(
    link: GuestLink, fields: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(ForkdError, match=said) as caught:
        await link.request({"op": "prepare", **fields}, timeout=10)
    assert code_of(caught) == code
    assert (await link.eval("1")).result == "1"
    assert (await link.request({"op": "ping"}, timeout=5))["warmup_ready"] is True


async def test_an_image_gives_commands_their_defaults(tmp_path: Path) -> None:
    image = tmp_path / "image.json"
    image.write_text(json.dumps({"env": {"WHO": "the image"}, "workdir": str(tmp_path), "user": "root"}))
    with running_agent(image=image) as agent:
        async with agent.link() as link:
            assert await sh(link, "echo $WHO; pwd") == f"the image\n{tmp_path}\n"
            assert await sh(link, "pwd", cwd="/") == "/\n"
    image.write_text("[]")
    with running_agent(image=image) as agent:
        async with agent.link() as link:
            assert "not understood" in (await link.ready()).notes[0]
