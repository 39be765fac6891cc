"""The threads of a process: held still all at once, described completely, and made again in a clone."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from forkd.linux.arch import NR, X86_64, AltStack, Registers
from forkd.linux.batch import Area, Call, encode
from forkd.linux.descriptors import Refused, Unsettled
from forkd.linux.held import Gadgets, HeldThread, Step, frames_size
from forkd.linux.ptrace import Ended, Rseq, TraceError, Tracees, read_proc, system_call

_GET_ROBUST_LIST = 274
_PR_SET_NAME = 15
_FUTEX_WAIT_PRIVATE = 128
_THREAD_AREA = 4096  # bytes of the C library's thread structure in which the tid is looked for
_SAME_IN_ALL = ("Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters")
# VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID
_CLONE_THREAD = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000 | 0x100000 | 0x200000


@dataclass(frozen=True, slots=True)
class ThreadState:
    """All that makes a thread of a stopped process, ready to be made again."""

    tid: int
    name: bytes
    registers: Registers  # such that an interrupted call is issued again
    mask: int
    vectors: bytes
    stack: AltStack
    robust_list: tuple[int, int]
    rseq: Rseq | None
    affinity: frozenset[int]


def hold_threads(
    pid: int, gadgets: Gadgets, arch: X86_64, tracees: Tracees, step: Step, stack: ExitStack
) -> list[HeldThread]:
    """Stop every thread of a process until `stack` is left, the main thread first."""
    held: dict[int, HeldThread] = {}
    # A thread that still ran may have made another one: look again until there is none left to stop.
    while new := [tid for tid in _thread_ids(pid) if tid not in held]:
        asked = []
        for tid in sorted(new, key=lambda tid: tid != pid):
            thread = HeldThread(tid, gadgets, arch, tracees, step)
            with _leaving_allowed(unless=tid == pid):
                thread.ask()
                stack.push(thread)
                asked.append(thread)
        for thread in asked:  # all are on their way to a stop: the first is waited for longest
            with _leaving_allowed(unless=thread.tid == pid):
                thread.settle()
                held[thread.tid] = thread
    return list(held.values())


@contextmanager
def _leaving_allowed(*, unless: bool) -> Iterator[None]:
    """A thread may leave by itself before it is held."""
    try:
        yield
    except Ended:
        if unless:
            raise


def _thread_ids(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError as error:
        raise Ended(f"process {pid} is gone", error.errno) from error


def begin_description(thread: HeldThread, memory: int) -> Rseq | None:
    """Send a held thread, in which no call has been run yet, to where `describe` asks it about itself.

    Many can be sent there before one is awaited. `memory` is the process's memory. Raises Unsettled.
    """
    rseq = thread.rseq()
    # Before any call: on its way to one the kernel would clear the mark.
    if rseq is not None and os.pread(memory, 8, rseq.address + 8) != bytes(8):
        raise Unsettled(f"thread {thread.tid} was stopped inside a restartable sequence")
    thread.start_call("sigaltstack", 0, thread.room)
    return rseq


def describe(thread: HeldThread, rseq: Rseq | None, memory: int) -> ThreadState:
    """Everything about a held thread; `rseq` is from `begin_description`. Raises Refused."""
    arch, tid = thread.arch, thread.tid
    _refuse_odd_state(thread)
    return ThreadState(
        tid=tid,
        name=read_proc(f"{tid}/comm").removesuffix(b"\n"),
        registers=arch.reissued(thread.registers, _interrupted_call(thread, memory)),
        mask=thread.mask,
        vectors=thread.vectors,
        stack=_alternate_stack(thread, memory),
        robust_list=_robust_list(tid),
        rseq=rseq,
        affinity=frozenset(os.sched_getaffinity(tid)),
    )


def _refuse_odd_state(thread: HeldThread) -> None:
    tid = thread.tid
    if os.sched_getscheduler(tid) != os.SCHED_OTHER or os.getpriority(os.PRIO_PROCESS, tid) != os.getpriority(
        os.PRIO_PROCESS, int(thread.status["Tgid"])
    ):
        raise Refused(f"thread {tid} has a scheduling policy or priority of its own")


def _interrupted_call(thread: HeldThread, memory: int) -> int | None:
    """The call to issue again. One that was interrupted before shows as restart_syscall: its code tells the number."""
    number = thread.arch.interrupted_call(thread.registers)
    if number != NR["restart_syscall"]:
        return number
    code = os.pread(memory, 7, thread.registers.rip - 7)
    if (number := thread.arch.number_before(code)) is None:
        raise Refused(f"thread {thread.tid} was stopped in a restarted call whose number is not known")
    return number


def _alternate_stack(thread: HeldThread, memory: int) -> AltStack:
    if (result := thread.finish_call()) < 0:
        raise TraceError(f"the alternate stack of thread {thread.tid} cannot be read", -result)
    address, flags, size = struct.unpack("<QixxxxQ", os.pread(memory, 24, thread.room))
    if flags & 1:  # SS_ONSTACK: a signal handler runs
        raise Unsettled(f"thread {thread.tid} was stopped in a signal handler on its alternate stack")
    return AltStack(address, flags, size)


def _robust_list(tid: int) -> tuple[int, int]:
    head, size = ctypes.c_uint64(), ctypes.c_size_t()
    # SAFETY: the kernel writes one word into each of the two objects, which are ours.
    try:
        system_call(_GET_ROBUST_LIST, tid, ctypes.byref(head), ctypes.byref(size))
    except OSError as error:
        raise TraceError(f"the robust list of thread {tid} cannot be read", error.errno) from error
    return head.value, size.value


def refuse_different(threads: list[HeldThread]) -> None:
    """A new thread gets the credentials and filters of the one that makes it, so all must have the same."""
    main = threads[0].status
    for thread in threads[1:]:
        for field in _SAME_IN_ALL:
            if thread.status.get(field) != main.get(field):
                raise Refused(f"thread {thread.tid} differs from the main thread in {field}")


def tid_offset(threads: list[ThreadState], memory: int, arch: X86_64) -> int:
    """Where the C library keeps a thread's tid in its thread structure: the one place that is right in all threads."""
    offsets = set(range(0, _THREAD_AREA, 4))
    for thread in threads:
        words = struct.unpack("<1024i", os.pread(memory, _THREAD_AREA, arch.thread_area(thread.registers)))
        offsets &= {4 * index for index, word in enumerate(words) if word == thread.tid}
    if len(offsets) != 1:
        raise Refused(f"the place of the thread id was found {len(offsets)} times in the threads' structures")
    return offsets.pop()


def place_frame(thread: ThreadState, area: Area, arch: X86_64) -> int:
    """Put the signal frame by which a thread becomes itself into the area."""
    at = area.reserve(arch.frame_size(thread.vectors), 64)
    frame = arch.signal_frame(at, 0, thread.registers, thread.mask, thread.vectors, thread.stack)
    area.write(at, frame)
    return at


def own_calls(thread: ThreadState, *, inherits: bool) -> list[Call]:
    """Calls a re-made thread does first; the main thread of a fork inherits what `inherits` leaves out."""
    calls = [Call("set_robust_list", thread.robust_list)] if thread.robust_list[0] else []
    if not inherits:
        calls.append(Call("prctl", (_PR_SET_NAME, thread.name + b"\0")))
        if thread.rseq:
            calls.append(Call("rseq", (thread.rseq.address, thread.rseq.size, 0, thread.rseq.signature)))
    return calls


def clone_call(thread: ThreadState, offset: int, gate: int, area: Area, arch: X86_64) -> Call:
    """The call that makes a thread again: it does its own calls, waits until the word at `gate` is set, and leaves."""
    wait = Call("futex", (gate, _FUTEX_WAIT_PRIVATE, 0, 0), may_fail=True)
    table = encode([*own_calls(thread, inherits=False), wait], area, arch)
    table += arch.leave_entry(place_frame(thread, area, arch))
    # Until it first runs, the table is the thread's stack: whoever holds it meanwhile, to freeze the clone in its turn,
    # writes frames below.
    area.reserve(frames_size(thread.vectors, arch))
    tid_address = arch.thread_area(thread.registers) + offset
    return Call("clone", arch.thread_clone(_CLONE_THREAD, area.place(table), tid_address, thread.registers))
