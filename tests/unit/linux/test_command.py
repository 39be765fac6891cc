"""Programs run to their end: their output, their failure, and that nothing of them outlives a cancellation or us."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from forkd.linux.command import MAX_LINE, CommandFailed, run_command

FAMILY = """sh -c 'echo $$ > "$0/child"; exec sleep 1000' "$0" & echo $$ > "$0/leader"; wait"""


def alive(directory: Path) -> list[int]:
    """Those of the family that have said who they are and still run."""
    pids = [int(path.read_text()) for path in directory.iterdir() if path.read_text().strip()]
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] if state not in "ZX" else []
    return found


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def wait_for(directory: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(alive(directory)) != count:
        assert time.monotonic() < deadline, f"{alive(directory)} run, not {count}"
        time.sleep(0.01)


async def test_output_comes_by_lines_and_is_returned() -> None:
    seen: list[str] = []
    output = await run_command(["sh", "-c", "echo one; echo two >&2; printf 'three\\rfour'"], on_line=seen.append)
    assert output == ["one", "three", "four"]
    assert sorted(seen) == ["four", "one", "three", "two"]


async def test_a_line_without_end_comes_in_pieces() -> None:
    output = await run_command(["sh", "-c", f"head -c {3 * MAX_LINE + 1} /dev/zero | tr '\\0' x"])
    assert sum(map(len, output)) == 3 * MAX_LINE + 1
    assert max(map(len, output)) <= MAX_LINE


async def test_failure_says_how_and_the_last_words() -> None:
    with pytest.raises(CommandFailed) as failed:
        await run_command(["sh", "-c", "echo why >&2; exit 7"])
    assert (failed.value.status, failed.value.tail) == (7, ("why",))
    assert "exit code 7\n  why" in str(failed.value)
    with pytest.raises(CommandFailed, match="signal 9"):
        await run_command(["sh", "-c", "kill -9 $$"])


async def test_a_missing_program_is_told_as_such() -> None:
    with pytest.raises(FileNotFoundError):
        await run_command(["/no/such/program"])


async def test_environment_and_directory_are_given_and_there_is_no_input(tmp_path: Path) -> None:
    assert await run_command(["sh", "-c", "cat; echo $MARK; pwd"], cwd=tmp_path, env={"MARK": "x"}) == [
        "x",
        str(tmp_path),
    ]


async def test_cancelled_the_whole_family_is_gone_and_no_guard_is_left(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_command, ["sh", "-c", FAMILY, str(tmp_path)])
        await trio.to_thread.run_sync(wait_for, tmp_path, 2)
        nursery.cancel_scope.cancel()
    assert alive(tmp_path) == []
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read(path)] == []


def test_if_we_are_killed_the_whole_family_is_killed(tmp_path: Path) -> None:
    code = (
        "import trio, sys; from forkd.linux.command import run_command; "
        "trio.run(run_command, ['sh', '-c', sys.argv[1], sys.argv[2]])"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, FAMILY, str(tmp_path)])
    wait_for(tmp_path, 2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(tmp_path, 0)
