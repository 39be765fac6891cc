"""One traced thread: seize, stop, read and write its registers, run a system call in it, let it go.

All calls on a tracee must come from the OS thread that seized it: the kernel ties the relation to that thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from forkd.linux.arch import ERESTARTNOINTR, X86_64, Registers

_CONT, _SYSCALL, _DETACH, _SETREGS, _GETREGS = 7, 24, 17, 13, 12
_SETOPTIONS, _GETREGSET, _SEIZE, _INTERRUPT = 0x4200, 0x4204, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _GET_RSEQ = 0x420A, 0x420B, 0x420F
_NT_X86_XSTATE = 0x202
_WALL = 0x40000000  # also children that are not ours and threads
_NOTHREAD = 0x20000000  # nothing of other threads of this program
_EVENT_STOP = 128

SYSGOOD = 1  # mark stops at system calls, so that they differ from a SIGTRAP
EXITKILL = 1 << 20  # the tracee dies with its tracer
SUSPEND_SECCOMP = 1 << 21  # the tracee's filters rest while it is traced
ALL_SIGNALS = (1 << 64) - 1


class TraceError(Exception):
    """Tracing failed; `errno` is the system's reason where there is one. The traced process was let go."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(f"{message}: {os.strerror(errno)}" if errno else message)
        self.errno = errno


class Ended(TraceError):
    """The traced thread is no more."""


@dataclass(frozen=True, slots=True)
class Rseq:
    """A thread's registration for restartable sequences."""

    address: int
    size: int
    signature: int


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    length: int


class _RseqConfiguration(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("signature", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    ]

    address: int
    size: int
    signature: int


@cache
def _ptrace_function() -> Callable[[int, int, int | None, int | None], int]:
    # SAFETY: PyDLL keeps the interpreter lock: these calls take microseconds, and waiting for the lock again after each
    # would lengthen the stop of the traced process by milliseconds in a busy daemon.
    function = ctypes.PyDLL(None, use_errno=True).ptrace
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_long
    return function


@cache
def _syscall_function() -> Callable[..., int]:
    # SAFETY: as above.
    function = ctypes.PyDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def system_call(number: int, *arguments: object) -> int:
    """A quick system call of our own that has no wrapper. Raises OSError.

    Arguments are ints that fit 32 bits or ctypes values; the caller answers for what they point to.
    """
    # SAFETY: see above.
    result = _syscall_function()(number, *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    # SAFETY: `data` and `address` are numbers, or addresses of ctypes objects that the caller holds during the call.
    result = _ptrace_function()(request, tid, address or None, data or None)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Tracees:
    """What the calling OS thread traces. News of one that come while another is waited for are kept for it.

    One is not waited for alone: the kernel tells the death of a process only when all its threads are reaped, which for
    traced ones is up to us.
    """

    def __init__(self) -> None:
        self._main: dict[int, bool] = {}  # whether it is the main thread of its process
        self._stops: dict[int, int] = {}
        self._ended: set[int] = set()

    def add(self, tid: int, *, main: bool) -> None:
        self._main[tid] = main

    def forget(self, tid: int) -> None:
        self._main.pop(tid, None)
        self._stops.pop(tid, None)
        self._ended.discard(tid)

    def wait(self, tid: int) -> int:
        """Wait for a thread's next stop: the signal in the low byte, the event above. Raises Ended.

        A process's death is seen but not reaped: it belongs to whoever started it. A stop is taken at once, so that the
        rest of this program does not find it when it asks after its children.
        """
        kind, which = os.P_ALL, 0
        while tid not in self._stops:
            if tid in self._ended:
                raise Ended(f"thread {tid} ended while it was traced")
            try:
                seen = os.waitid(kind, which, os.WEXITED | os.WSTOPPED | os.WNOWAIT | _WALL | _NOTHREAD)
                assert seen is not None
                if seen.si_code == os.CLD_TRAPPED:
                    os.waitid(os.P_PID, seen.si_pid, os.WSTOPPED | os.WNOHANG | _WALL)
                    self._stops[seen.si_pid] = seen.si_status
                elif seen.si_pid not in self._main:
                    kind, which = os.P_PID, tid  # another child of this thread, which would be told again and again
                elif self._main[seen.si_pid]:
                    raise Ended(f"process {seen.si_pid} ended while it was traced")
                else:
                    os.waitpid(seen.si_pid, _WALL)
                    self._ended.add(seen.si_pid)
            except ChildProcessError as error:
                raise Ended(f"thread {tid} is gone", error.errno) from error
        return self._stops.pop(tid)


class Tracee:
    """A thread seized by the calling OS thread."""

    def __init__(self, tid: int, arch: X86_64, tracees: Tracees, *, main: bool = True) -> None:
        self.tid = tid
        self.arch = arch
        self.tracees = tracees
        self.postponed: list[int] = []  # signals that came while calls were injected
        tracees.add(tid, main=main)

    def seize(self, options: int) -> None:
        """Trace the thread without stopping it."""
        # SAFETY: no memory is passed.
        self._request("seize", _SEIZE, 0, options)

    def _request(self, what: str, request: int, address: int = 0, data: int = 0) -> int:
        try:
            return _ptrace(request, self.tid, address, data)
        except ProcessLookupError as error:
            raise Ended(f"thread {self.tid} is gone or not stopped ({what})", error.errno) from error
        except OSError as error:
            raise TraceError(f"cannot trace thread {self.tid} ({what})", error.errno) from error

    def set_options(self, options: int) -> None:
        # SAFETY: no memory is passed.
        self._request("set options", _SETOPTIONS, 0, options)

    def interrupt(self) -> None:
        """Ask for a stop; the thread runs none of its own code between its return from the kernel and the stop."""
        # SAFETY: no memory is passed.
        self._request("interrupt", _INTERRUPT)

    def resume(self, *, to_syscall: bool = False) -> None:
        """Let the thread run, on request up to the next entry or exit of a system call."""
        # SAFETY: no memory is passed.
        self._request("resume", _SYSCALL if to_syscall else _CONT)

    def detach(self) -> None:
        """Let the thread go, and give it the signals that were held back."""
        # SAFETY: no memory is passed.
        self._request("detach", _DETACH)
        self.tracees.forget(self.tid)
        for number in self.postponed:
            os.kill(self.tid, number)
        self.postponed.clear()

    def wait_interrupted(self) -> None:
        """Wait for the stop that `interrupt` asked for."""
        self._wait_for(lambda stop: stop >> 8 == _EVENT_STOP, to_syscall=False)

    def wait_syscall(self) -> None:
        """Wait for the entry or exit of a system call."""
        self._wait_for(lambda stop: stop == signal.SIGTRAP | 0x80, to_syscall=True)

    def wait_signal(self, number: int) -> None:
        """Wait for a signal the thread sends to itself; resuming does not deliver it."""
        self._wait_for(lambda stop: stop == number, to_syscall=False)

    def _wait_for(self, wanted: Callable[[int], bool], *, to_syscall: bool) -> None:
        while not wanted(stop := self.tracees.wait(self.tid)):
            if stop >> 8 == 0 and stop != signal.SIGTRAP | 0x80:
                self.postponed.append(stop)
            self.resume(to_syscall=to_syscall)

    def registers(self) -> Registers:
        registers = Registers()
        # SAFETY: `registers` is ours and as large as the kernel's structure.
        self._request("read registers", _GETREGS, 0, ctypes.addressof(registers))
        return registers

    def set_registers(self, registers: Registers) -> None:
        # SAFETY: the kernel copies from `registers` and checks the values.
        self._request("write registers", _SETREGS, 0, ctypes.addressof(registers))

    def signal_mask(self) -> int:
        mask = ctypes.c_uint64()
        # SAFETY: `mask` is ours and has the eight bytes announced.
        self._request("read signal mask", _GETSIGMASK, 8, ctypes.addressof(mask))
        return mask.value

    def set_signal_mask(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        # SAFETY: the kernel copies eight bytes.
        self._request("write signal mask", _SETSIGMASK, 8, ctypes.addressof(value))

    def vectors(self) -> bytes:
        """FPU and vector registers in the processor's XSAVE layout."""
        room = ctypes.create_string_buffer(16384)
        vector = _IoVec(ctypes.addressof(room), len(room))
        # SAFETY: the kernel writes at most `length` bytes into `room` and says how many.
        self._request("read vector registers", _GETREGSET, _NT_X86_XSTATE, ctypes.addressof(vector))
        return room.raw[: vector.length]

    def rseq(self) -> Rseq | None:
        """The thread's restartable sequence area, or None when it registered none."""
        found = _RseqConfiguration()
        # SAFETY: `found` is ours; its size is passed in the address argument.
        self._request("read rseq", _GET_RSEQ, ctypes.sizeof(found), ctypes.addressof(found))
        return Rseq(found.address, found.size, found.signature) if found.address else None

    def enter_call(self, at: int, stack: int, number: int, arguments: Sequence[int]) -> None:
        """Set a stopped thread up for a system call and bring it to the entry of the call."""
        self.set_registers(self.arch.call(self.registers(), at, stack, number, arguments))
        self.resume(to_syscall=True)
        self.wait_syscall()

    def finish_call(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """From the entry of a system call to its exit: its result. `meanwhile` is done beside the call."""
        self.resume(to_syscall=True)
        meanwhile()
        while True:
            self.wait_syscall()
            result = self.arch.result(self.registers())
            if result != -ERESTARTNOINTR:
                return result
            self.resume(to_syscall=True)  # an unblockable signal came: it is held back now, the kernel tries again
            self.wait_syscall()
            self.resume(to_syscall=True)

    def kill(self) -> None:
        """End the whole process of this thread and wait until it is reaped. Safe for a process that ended already."""
        try:
            os.kill(self.tid, signal.SIGKILL)
            while True:
                _, status = os.waitpid(self.tid, _WALL)
                if not os.WIFSTOPPED(status):
                    break
        except (ProcessLookupError, ChildProcessError):
            pass
        self.tracees.forget(self.tid)


def read_proc(name: str) -> bytes:
    """A file of `/proc`, by the shortest way: a stopped process waits meanwhile. Raises OSError."""
    descriptor = os.open(f"/proc/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while piece := os.read(descriptor, 1 << 16):
            content += piece
        return content
    finally:
        os.close(descriptor)


def read_status(tid: int) -> dict[str, str]:
    """`/proc/TID/status`, read once."""
    try:
        text = read_proc(f"{tid}/status").decode(errors="replace")  # a thread's name may be any bytes
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Ended(f"process {tid} is gone", error.errno) from error
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def seize_options(status: dict[str, str]) -> int:
    """Options to seize a thread with: its seccomp filters must rest, or an injected call could kill it."""
    return SYSGOOD | (SUSPEND_SECCOMP if status.get("Seccomp", "0") != "0" else 0)


def seize(tid: int, arch: X86_64, tracees: Tracees, status: dict[str, str] | None = None) -> Tracee:
    """Seize a thread; where its seccomp filters cannot be suspended this is refused with the reason."""
    status = status or read_status(tid)
    options = seize_options(status)
    if (tracer := status["TracerPid"]) != "0":
        raise TraceError(f"thread {tid} is traced by process {tracer} already")
    tracee = Tracee(tid, arch, tracees, main=status["Tgid"] == str(tid))
    try:
        tracee.seize(options)
    except Ended:
        raise
    except TraceError as error:
        if read_status(tid)["State"][:1] in "ZX":  # on its way out it may not be traced either
            raise Ended(f"thread {tid} is gone", error.errno) from error
        if options & SUSPEND_SECCOMP:
            raise TraceError(
                f"thread {tid} has a seccomp filter and it cannot be suspended "
                "(needs root, a kernel with CHECKPOINT_RESTORE, and no seccomp filter on forkd itself)",
                error.errno,
            ) from error
        raise
    return tracee
