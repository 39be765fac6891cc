"""Runs a program to its end: output by lines, the whole process group ended on cancellation, last words on failure."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import trio

TAIL_LINES = 15
MAX_LINE = 4096
GRACE_SECONDS = 5.0


class CommandFailed(Exception):
    """A program ended with a status other than 0 (negative: by that signal). ``tail`` has its last lines."""

    def __init__(self, argv: Sequence[str], status: int, tail: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self.status = status
        self.tail = tuple(tail)
        how = f"ended by signal {-status}" if status < 0 else f"failed with exit code {status}"
        super().__init__("\n".join([f"{self.argv[0]} {how}", *(f"  {line}" for line in tail)]))

    @property
    def command_line(self) -> str:
        """The command, quoted so that it can be pasted into a shell."""
        return shlex.join(self.argv)


async def run_command(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> list[str]:
    """Run ``argv`` with no input and return its standard output as lines.

    ``env`` is added to our environment (and ``LC_ALL=C``: output is read by programs). ``on_line`` sees each line of
    standard output and standard error as it comes; a carriage return ends a line too. Raises CommandFailed, and
    FileNotFoundError where there is no such program. On cancellation the program's whole process group gets SIGTERM,
    after a grace time SIGKILL, and is gone when this returns. If we are killed, the group is killed too.
    """
    output: list[str] = []
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def seen(line: str) -> None:
        if line:
            tail.append(line)
            if on_line is not None:
                on_line(line)

    def seen_output(line: str) -> None:
        output.append(line)
        seen(line)

    process = await trio.lowlevel.open_process(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    async with process.stdout, process.stderr:
        try:
            guard = guard_group(process.pid)
        except BaseException:
            process.kill()
            raise
        try:
            async with trio.open_nursery() as readers:
                readers.start_soon(_read_lines, process.stdout, seen_output)
                readers.start_soon(_read_lines, process.stderr, seen)
            await process.wait()
        finally:
            if process.returncode is None:
                with trio.CancelScope(shield=True):
                    await _end_group(process)
            end_guard(guard)
    if process.returncode:
        raise CommandFailed(argv, process.returncode, tail)
    return output


def guard_group(group: int) -> subprocess.Popen[bytes]:
    """A process that kills the group when we die: it waits for a line that never comes, and gets an end of file then.

    End it with ``end_guard``. A death signal would not do: it reaches the program alone, not what the program has
    started, and is lost when the program changes its user.
    """
    script = 'read -r never; kill -s KILL -- "-$1"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "forkd-guard", str(group)], stdin=subprocess.PIPE, start_new_session=True
    )


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End a guard whose group is gone; killed before its standard input is closed, so it does nothing."""
    guard.kill()
    guard.communicate()  # closes its input and reaps it


async def _end_group(process: trio.Process) -> None:
    """End the program and what it started; return when the program is gone."""
    os.killpg(process.pid, signal.SIGTERM)
    with trio.move_on_after(GRACE_SECONDS):
        await process.wait()
    # Also when the leader has obeyed: what it started may not have. A group with members keeps its number.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _read_lines(stream: trio.abc.ReceiveStream, seen: Callable[[str], None]) -> None:
    """Hand over each line; one longer than MAX_LINE comes in pieces, so memory stays bounded."""
    pending = b""
    async for chunk in stream:
        *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            seen(line.decode("utf-8", "replace"))
        while len(pending) > MAX_LINE:
            seen(pending[:MAX_LINE].decode("utf-8", "replace"))
            pending = pending[MAX_LINE:]
    if pending:
        seen(pending.decode("utf-8", "replace"))
