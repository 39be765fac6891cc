"""A stopped thread of a running process, in which system calls can be run without ever endangering the process.

Nothing is left to the tracer's good health: before the thread's registers are touched, signal frames are written below
its stack (where the kernel puts its own), and an injected call returns into them. So if the tracer dies at any moment,
the thread restores its registers, vector state and signal mask by itself and goes on, and a fork that nobody holds runs
straight into exit_group. When all goes well neither frame is used: the tracer puts the registers back and the kernel
restarts the interrupted call.

One gap cannot be closed: a seccomp filter rests only while the tracer lives, so a tracer that dies in the microseconds
between resuming the thread and the kernel's check lets a filter that forbids the injected call act on it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from forkd.linux.arch import NR, X86_64
from forkd.linux.mapping import Mapping, read_maps
from forkd.linux.ptrace import (
    ALL_SIGNALS,
    EXITKILL,
    Ended,
    Rseq,
    Tracee,
    TraceError,
    Tracees,
    read_status,
    seize,
    seize_options,
)

_CLONE_PTRACE, _CLONE_PARENT = 0x2000, 0x8000
_RED_ZONE = 128
_ROOM = 64  # bytes an injected call may write its answer into

Step = Callable[[str], None]


def no_step(name: str) -> None:
    """The default for `step` callbacks: tests pass one that ends the tracer at a named moment."""


@contextmanager
def open_memory(pid: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    """`/proc/PID/mem` as a descriptor."""
    try:
        memory = os.open(f"/proc/{pid}/mem", flags | os.O_CLOEXEC)
    except OSError as error:
        raise TraceError(f"cannot open the memory of process {pid}", error.errno) from error
    try:
        yield memory
    finally:
        os.close(memory)


@dataclass(frozen=True, slots=True)
class Gadgets:
    """Instructions found in the process's own code: it needs no page of ours to run a call and come back from it."""

    call: int
    sigreturn: int

    @classmethod
    def find(cls, pid: int, arch: X86_64) -> Gadgets:
        """Search the executable mappings, the C library first."""
        places: dict[bytes, int] = {}
        with open_memory(pid) as memory:
            for mapping in _executable(pid):
                code = os.pread(memory, mapping.length, mapping.start)
                for wanted in (arch.syscall_return, arch.sigreturn):
                    if wanted not in places and (offset := code.find(wanted)) >= 0:
                        places[wanted] = mapping.start + offset
                if len(places) == 2:
                    return cls(places[arch.syscall_return], places[arch.sigreturn])
        raise TraceError(f"process {pid} has no system call and signal return code that could be used")


def _executable(pid: int) -> list[Mapping]:
    try:
        mappings = read_maps(pid)
    except OSError as error:
        raise TraceError(f"cannot read the mappings of process {pid}", error.errno) from error
    found = [mapping for mapping in mappings if "r-xp" in mapping.access and mapping.name != "[vsyscall]"]
    return sorted(found, key=lambda mapping: "libc" not in mapping.name)


def frames_size(vectors: bytes, arch: X86_64) -> int:
    """How much room below the stack of a thread with these vector registers is written to while it is held."""
    return _RED_ZONE + arch.frame_size(vectors) + arch.frame_size(b"") + _ROOM + 64


class HeldThread:
    """Seized and stopped by the calling OS thread inside its `with` block, and let go on every way out of it."""

    def __init__(self, tid: int, gadgets: Gadgets, arch: X86_64, tracees: Tracees, step: Step = no_step) -> None:
        self.tid = tid
        self._tracees = tracees
        self.arch = arch
        self._gadgets = gadgets
        self._step = step
        self._expected: Callable[[], None] | None = None  # waits for the stop it is on its way to; None: it stands
        self._armed = False  # the registers are not the thread's own
        self._entered = False  # stopped at the entry of an injected call, or on its way there
        self._resting = False  # stopped behind the last injected call, or on its way there
        self._gone = False

    def __enter__(self) -> HeldThread:
        self.ask()
        try:
            self.settle()
        except BaseException:
            self._abandon()
            raise
        return self

    def ask(self) -> None:
        """The first half of entering: seize the thread and ask it to stop. Many can be asked before one is awaited."""
        self.status = read_status(self.tid)
        self._tracee = seize(self.tid, self.arch, self._tracees, self.status)
        try:
            self._step("seized")
            self.stopped_at = time.perf_counter()
            self._tracee.interrupt()
            self._expected = self._tracee.wait_interrupted
        except BaseException:
            self._abandon()
            raise

    def settle(self) -> None:
        """The second half of entering. Who does the halves one by one calls `__exit__` from `ask` on. Raises Ended."""
        try:
            self._arrive()
            self._step("stopped")
            self.registers = self._tracee.registers()
            self.mask = self._tracee.signal_mask()
            self.vectors = self._tracee.vectors()
            self._write_frames()
            self._step("framed")
        except Ended:
            self._gone = True
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gone:
            return
        if error is None:
            self._release()
        else:
            self._abandon()

    def _arrive(self) -> None:
        """Wait for the stop the thread is on its way to."""
        if self._expected is not None:
            self._expected()
            self._expected = None

    def _write_frames(self) -> None:
        """Two signal frames below the stack: back to where the thread was, and straight out for a fork."""
        arch, gadgets, own = self.arch, self._gadgets, self.registers
        if not arch.is_native(own):
            raise TraceError(f"thread {self.tid} does not run 64-bit code")
        self._back = (own.rsp - frames_size(self.vectors, arch)) & ~63
        again = arch.reissued(own, arch.interrupted_call(own))
        back = arch.signal_frame(self._back, gadgets.sigreturn, again, self.mask, self.vectors)
        self._out = (self._back + len(back) + 15) & ~15
        leave = arch.call(own, gadgets.call, own.rsp, NR["exit_group"], [0])
        out = arch.signal_frame(self._out, gadgets.sigreturn, leave, ALL_SIGNALS)
        frames = back.ljust(self._out - self._back, b"\0") + out
        self.room = self._out + len(out)
        with open_memory(self.tid, os.O_RDWR) as memory:
            try:
                written = os.pwrite(memory, frames, self._back)
            except OSError as error:
                raise TraceError(f"no room below the stack of thread {self.tid}", error.errno) from error
        if written != len(frames):
            raise TraceError(f"no room below the stack of thread {self.tid}")

    def call(self, name: str, *arguments: int) -> int:
        """Run one system call in the thread; a negative result is an error number. The call must not block."""
        self.start_call(name, *arguments)
        return self.finish_call()

    def start_call(self, name: str, *arguments: int) -> None:
        """Send the thread to the entry of a system call, which `finish_call` then lets it do."""
        self._tracee.set_registers(self.arch.call(self.registers, self._gadgets.call, self._back, NR[name], arguments))
        if not self._armed:
            # Not before the registers: from now on the frame restores the mask should the tracer die. Signals that come
            # meanwhile wait, so the call is undisturbed.
            self._armed = True
            self._tracee.set_signal_mask(ALL_SIGNALS)
            self._step("armed")
        self._tracee.resume(to_syscall=True)
        self._expected, self._entered = self._tracee.wait_syscall, True

    def finish_call(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The result of the call that was started. `meanwhile`, which must not raise, is done beside it."""
        self._arrive()
        self._step("entered")
        result = self._tracee.finish_call(meanwhile)
        self._entered = False
        return result

    def rseq(self) -> Rseq | None:
        """The thread's restartable sequence area."""
        return self._tracee.rseq()

    def fork(self, meanwhile: Callable[[], None] = lambda: None) -> Tracee:
        """Clone the process: the clone is a stopped tracee of the calling OS thread and dies with it.

        Its parent is the parent of this process, which itself sees no child and gets no SIGCHLD. `meanwhile` is done
        while the kernel copies; if it raises there is no clone.
        """
        failures: list[BaseException] = []

        def guarded() -> None:
            try:
                meanwhile()
            except BaseException as error:
                failures.append(error)  # raised below: the call is under way and must be seen to its end

        self.start_call("clone", _CLONE_PARENT | _CLONE_PTRACE | signal.SIGCHLD, self._out)
        pid = self.finish_call(guarded)
        if pid < 0:
            raise TraceError(f"process {self.tid} cannot be forked", -pid)
        child = Tracee(pid, self.arch, self._tracees)
        try:
            self._step("forked")
            child.wait_interrupted()
            child.set_options(seize_options(self.status) | EXITKILL)
            self._step("held")
            for failure in failures:
                raise failure
        except BaseException:
            child.kill()
            raise
        return child

    def rest(self) -> None:
        """The first part of leaving, for those who have many to leave: no call can be run in it any more."""
        if self._armed and not self._resting:
            self._tracee.interrupt()
            self._tracee.resume()
            self._expected, self._resting = self._tracee.wait_interrupted, True

    def _release(self) -> None:
        """Put everything back and let the thread run; the kernel restarts what it was doing."""
        try:
            if self._armed:
                self.rest()
                self._arrive()  # on the way out of the kernel: no code of the process ran
                self._step("rested")
                self._tracee.set_signal_mask(self.mask)
                self._step("unmasked")
            self._tracee.set_registers(self.arch.resumed_by_kernel(self.registers, self._signal_waits))
            self._armed = False
            self._step("restored")
        finally:
            self._tracee.detach()
        self._step("detached")

    def _signal_waits(self) -> bool:
        status = read_status(self.tid)
        waiting = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
        return bool(waiting & ~self.mask)

    def _abandon(self) -> None:
        """Let go in the middle: the frames bring the thread back by themselves."""
        try:
            self._arrive()
            if self._entered:
                self._tracee.set_registers(self.arch.skip_call(self._tracee.registers()))
            self._tracee.detach()
        except TraceError:
            return  # it ended while it was held: nothing to let go
