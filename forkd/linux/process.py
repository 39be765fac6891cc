"""Processes named for certain: by a pidfd while we run, by pid and start time across our own restarts."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42


@contextmanager
def small_pages() -> Iterator[None]:
    """Programs started inside have no transparent huge pages: of one, a clone that writes a byte gets all 2 MiB.

    The kernel hands this on to children and what they execute. Where it cannot, they are started all the same.
    """
    prctl = ctypes.CDLL(None).prctl
    # SAFETY: integers only; what is changed is how this process gets memory in the meantime.
    before = prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0)
    prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        if before == 0:
            prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def start_time(pid: int) -> int:
    """When the process began, in ticks since boot. Raises FileNotFoundError or ProcessLookupError if it is gone."""
    return int(_stat(pid)[19])


def alive(pid: int, starttime: int) -> bool:
    """Whether this very process still runs; one that has ended but was not reaped does not."""
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == starttime and fields[0] not in ("Z", "X")


async def wait_dead(pidfd: int) -> None:
    """Return once the process has ended, all its threads included. Any number of tasks may wait at once."""
    own = os.dup(pidfd)  # trio lets only one task wait for a descriptor
    try:
        await trio.lowlevel.wait_readable(own)
    finally:
        os.close(own)


class ProcessHandle:
    """A process that cannot be mistaken for another, even if it ends and its pid is used again.

    Holds a descriptor until ``wait`` or ``poll`` has seen the process end, or until ``close``.
    """

    def __init__(
        self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None = None, *, cloned: bool = False
    ) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._child = child
        self._cloned = cloned
        self._status: int | None = None

    @classmethod
    def of_child(cls, child: subprocess.Popen[bytes]) -> ProcessHandle:
        """Take over a child nobody has waited for; it will be reaped here. One we cannot watch is ended: OSError."""
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError:  # too many descriptors, most likely: nobody else would ever end it
            child.kill()
            child.wait()
            raise
        return cls(child.pid, pidfd, child)

    @classmethod
    def of_clone(cls, pid: int) -> ProcessHandle:
        """A clone just made of a process: if that one is our child, so is this one, and will be reaped here.

        One we cannot watch is ended: OSError. Raises ProcessLookupError if it is gone already.
        """
        try:
            return cls(pid, os.pidfd_open(pid), cloned=True)
        except ProcessLookupError:
            raise
        except OSError:
            os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            raise

    @classmethod
    def of_running(cls, pid: int, starttime: int) -> ProcessHandle | None:
        """A process that is not our child, or None if it is gone (or the pid is another's by now)."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        # Asked after opening: if the pid is still the right one now, it was when it was opened.
        if not alive(pid, starttime):
            os.close(pidfd)
            return None
        return cls(pid, pidfd)

    @property
    def starttime(self) -> int:
        """See ``start_time``."""
        return start_time(self.pid)

    def fileno(self) -> int:
        """The pidfd, readable once the process has ended; it stays ours. Raises ValueError after the end was seen."""
        if self._pidfd is None:
            raise ValueError(f"process {self.pid} was waited for")
        return self._pidfd

    def send_signal(self, number: int) -> None:
        """Send a signal; harmless if the process has ended."""
        if self._pidfd is None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """Send SIGKILL; ``wait`` says when it is done."""
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int | None:
        """Return once the process has ended: a child's exit code (minus the signal that killed it), else None."""
        if self._pidfd is None:
            await trio.lowlevel.checkpoint()
        else:
            await wait_dead(self._pidfd)
        return self._reap()

    def poll(self) -> int | None:
        """A child's exit code as ``wait`` gives it if it has ended; None otherwise, and for every other process."""
        return self._reap() if self._child is not None and self._child.poll() is not None else None

    def close(self) -> None:
        """Let go of the process, whatever it does."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _reap(self) -> int | None:
        self.close()
        if self._cloned:
            self._cloned = False
            try:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                pass  # its origin was not our child: init reaps it
        return self._child.wait() if self._child is not None else self._status


async def end_process(pid: int, starttime: int | None = None) -> None:
    """End the process that has this pid (now, or since ``starttime``) and wait until it is gone.

    Harmless if there is none.
    """
    try:
        process = ProcessHandle.of_running(pid, start_time(pid) if starttime is None else starttime)
    except (FileNotFoundError, ProcessLookupError):
        return
    if process is not None:
        process.kill()
        await process.wait()


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name, which may hold anything, so the last parenthesis counts."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as source:
        return source.read().rpartition(")")[2].split()
