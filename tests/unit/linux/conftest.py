"""Small processes of our own to trace, and a way to see what a killed tracer leaves behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PR_SET_CHILD_SUBREAPER = 36


class Target:
    """A Python process that says `ready`, then answers lines on its standard input with lines on its output."""

    def __init__(self, code: str) -> None:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        # Unbuffered: select must see every byte that was not read yet.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.pid = self.process.pid

    def spoke(self, seconds: float) -> bool:
        """Whether it has said something that was not read yet."""
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def line(self) -> str:
        assert self.process.stdout is not None
        assert self.spoke(20), "the process says nothing"
        return self.process.stdout.readline().decode().strip()

    def ask(self, question: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(question.encode() + b"\n")
        return self.line()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def target() -> Iterator[Callable[[str], Target]]:
    """Start a process from source code and wait until it is ready; all are ended after the test."""
    started: list[Target] = []

    def start(code: str) -> Target:
        started.append(Target(code))
        assert started[-1].line() == "ready"
        return started[-1]

    yield start
    for each in started:
        each.end()


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except FileNotFoundError:
            continue  # a thread of ours that has just ended
    return found


@pytest.fixture
def orphans() -> Iterator[Callable[[], set[int]]]:
    """Make this process the one that inherits orphans, and end those a test leaves."""
    before = children()
    # SAFETY: prctl with plain numbers; undone below.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield lambda: children() - before
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def wait_dead(pid: int, seconds: float = 10) -> bool:
    """Whether a child of ours is dead or dies in time; it is reaped then."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            return False
        os.waitpid(pid, 0)
        return True
    finally:
        os.close(descriptor)


@pytest.fixture
def dies() -> Callable[[int], bool]:
    return wait_dead
