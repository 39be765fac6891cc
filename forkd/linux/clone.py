"""Clones of a whole process, threads and all: from a frozen ghost of it, any number of running copies.

The template is a ghost (see `held` for how the source survives anything). A small table of system calls is written into
it once. Each clone is a fork of the ghost that runs this table by itself: it takes the descriptors it is handed, makes
its own of those it must not share, makes its threads again, which wait, and stops. The tracer looks at the results and
lets it go; the threads then become themselves through a signal frame each. Until that moment the clone dies with its
tracer, and it never runs the program's code.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from forkd.linux.arch import NR, UnsupportedArch, host_arch
from forkd.linux.batch import Area, Call, FreeNumbers, encode, first_failure
from forkd.linux.descriptors import Plan, Refused, plan, take
from forkd.linux.ghost import Range, allow_fork
from forkd.linux.held import Gadgets, Step, no_step, open_memory
from forkd.linux.mapping import read_smaps
from forkd.linux.ptrace import Tracee, TraceError, Tracees, read_proc
from forkd.linux.threads import (
    ThreadState,
    begin_description,
    clone_call,
    describe,
    hold_threads,
    own_calls,
    place_frame,
    refuse_different,
    tid_offset,
)  # fmt: skip

_CLONE_PTRACE, _CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x2000, 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG = 1
_FUTEX_WAKE_PRIVATE = 129
_MSG = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_PAGE = 4096
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
_MAP_PRIVATE_ANONYMOUS = 0x22


@dataclass(frozen=True, slots=True)
class Survey:
    """What can be found out about a process while it still runs, so that it need not stand still for it."""

    gadgets: Gadgets
    maps: bytes
    unforked: list[Range]
    unforkable: int  # pages of devices, which no fork keeps and no clone needs

    @classmethod
    def of(cls, pid: int) -> Survey:
        """Look at process `pid`. Raises Refused where a clone would share memory or lose it, TraceError."""
        try:
            maps = _read_maps(pid)
            return cls(Gadgets.find(pid, host_arch()), maps, *_check_memory(pid))
        except UnsupportedArch as error:
            raise TraceError(str(error)) from error


class ProcessTemplate:
    """A frozen process from which running clones are made. Every method may be called from any thread.

    A clone's parent is the source's parent, as with a Ghost: the caller that started the source waits for clones too.
    """

    def __init__(
        self, source: int, replaced: Collection[int], shared: Collection[int], death_signal: int, step: Step
    ) -> None:
        self._source = source
        self._replaced = sorted(replaced)
        self._shared = shared
        self._death_signal = death_signal
        self._step = step
        self._ghost: Tracee | None = None
        self._tracees = Tracees()
        self._control: tuple[socket.socket, socket.socket] | None = None
        self.stopped_ms = 0.0
        self._tracer = ThreadPoolExecutor(1, thread_name_prefix=f"template-of-{source}")

    @classmethod
    def of(
        cls,
        pid: int,
        replaced: Collection[int] = (),
        shared: Collection[int] = (),
        *,
        death_signal: int = 0,
        step: Step = no_step,
    ) -> ProcessTemplate:
        """Freeze process `pid` and let it go on; blocks for some milliseconds.

        For each descriptor in `replaced` the caller hands every clone another one; those in `shared` the caller knows
        to be harmless. All others must be of a kind that can be made afresh. `death_signal` is what clones get when the
        thread that started the source ends.

        Owns: a ghost and one OS thread, until `close`. Raises Refused where a clone would not be safe, TraceError; the
        source runs on in every case.
        """
        template = cls.freeze(pid, Survey.of(pid), replaced, shared, death_signal=death_signal, step=step)
        template.prepare()
        return template

    @classmethod
    def freeze(
        cls,
        pid: int,
        survey: Survey,
        replaced: Collection[int] = (),
        shared: Collection[int] = (),
        *,
        death_signal: int = 0,
        step: Step = no_step,
    ) -> ProcessTemplate:
        """The first half of `of`, and the only one for which the process stands still; `prepare` is the second."""
        template = cls(pid, replaced, shared, death_signal, step)
        template._do(template._freeze, survey)
        return template

    def prepare(self) -> None:
        """Make ready for cloning. Raises as `of` does; then the template is closed."""
        self._do(self._prepare)

    def _do(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            self._tracer.submit(work, *arguments).result()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The ghost, whose memory is the template's."""
        if self._ghost is None:
            raise TraceError(f"the template of process {self._source} is closed")
        return self._ghost.tid

    def clone(
        self,
        descriptors: Mapping[int, int] | None = None,
        directory: str | os.PathLike[str] = "/",
        admit: Callable[[int], None] = lambda pid: None,
    ) -> int:
        """A new running process that works in `directory`.

        `descriptors` maps each number in `replaced` to the caller's, which it may close afterwards. `admit` is called
        with its pid before it runs any code of the program. Raises TraceError, and what `admit` raises; then there is
        no new process.
        """
        try:
            cloning = self._tracer.submit(self._clone, dict(descriptors or {}), directory, admit)
        except RuntimeError as error:
            raise TraceError(f"the template of process {self._source} is closed") from error
        return cloning.result()

    def close(self) -> None:
        """End the ghost and its thread; clones live on. May be called twice."""
        try:
            ended = self._tracer.submit(self._end)
        except RuntimeError:
            return  # closed already
        self._tracer.shutdown(wait=True)
        ended.result()

    def __enter__(self) -> ProcessTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # All below runs on the tracer's thread.

    def _freeze(self, survey: Survey) -> None:
        self._arch = host_arch()
        self._gadgets, self._survey = survey.gadgets, survey
        with ExitStack() as stack:
            memory = stack.enter_context(open_memory(self._source))
            held = hold_threads(self._source, survey.gadgets, self._arch, self._tracees, self._step, stack)
            main = held[0]
            sequences = [begin_description(thread, memory) for thread in held]
            self._threads = [describe(main, sequences[0], memory)]
            allow_fork(main, survey.unforked)

            def look() -> None:
                refuse_different(held)
                _refuse_timers(self._source)
                self._size = _read_size(self._source)
                self._descriptors = plan(self._source, self._replaced, self._shared)
                others = zip(held[1:], sequences[1:], strict=True)
                self._threads += [describe(thread, rseq, memory) for thread, rseq in others]

            # The kernel takes its time to fork, in which all that can be seen from outside is looked at.
            self._ghost = main.fork(look)
            for thread in held:
                thread.rest()
        self.stopped_ms = (time.perf_counter() - main.stopped_at) * 1e3

    def _check_late(self, ghost: int) -> None:
        """Look at what appeared between the survey and the stop; the source, which runs again, need not wait for it."""
        if self._size - _read_size(ghost) != self._survey.unforkable:
            raise Refused(f"process {self._source} has new memory that a fork does not keep")
        if _read_maps(ghost) != self._survey.maps:
            _check_memory(self._source)

    def _prepare(self) -> None:
        """Write the runner and its table into the ghost."""
        at, threads, descriptors = self._gadgets.call, self._threads, self._descriptors
        ghost, arch = self._require_ghost(), self._arch
        self._check_late(ghost.tid)
        with open_memory(ghost.tid) as memory:
            offset = tid_offset(threads, memory, arch)

        def call(name: str, *arguments: int) -> int:
            ghost.enter_call(at, 0, NR[name], arguments)
            if (result := ghost.finish_call()) < 0:
                raise TraceError(f"{name} failed in the ghost of process {self._source}", -result)
            return result

        size = 16 * _PAGE + sum(2 * _PAGE + 3 * arch.frame_size(thread.vectors) for thread in threads)
        address = call("mmap", 0, size, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
        area = Area(address, size)
        code = area.place(arch.runner.ljust(_PAGE, b"\0"))
        with open_memory(ghost.tid, os.O_RDWR) as memory:
            call("socketpair", socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC, 0, code)
            near, far = struct.unpack("<ii", os.pread(memory, 8, code))
            self._control = (_take_socket(ghost.tid, near), _take_socket(ghost.tid, far))
            call("close", far)
            self._lay_out(area, threads, offset, descriptors, near)
            os.pwrite(memory, area.image(), address)
        call("chdir", self._root)  # it keeps no directory busy
        call("mprotect", code, _PAGE, _PROT_READ | _PROT_EXEC)
        flags = _CLONE_PARENT | _CLONE_PTRACE | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
        main_tid = arch.thread_area(threads[0].registers) + offset
        self._fork_registers = arch.run_fork(ghost.registers(), code, self._table, flags, main_tid)
        self._step("prepared")

    def _lay_out(self, area: Area, threads: list[ThreadState], offset: int, descriptors: Plan, control: int) -> None:
        arch = self._arch
        self._root = area.place(b"/\0")
        self._affinities = {}
        free = FreeNumbers(descriptors.used | {control})
        calls = [*_receive(area, descriptors, control, free), Call("close", (control,))]
        calls += own_calls(threads[0], inherits=True)
        if self._death_signal:
            calls.append(Call("prctl", (_PR_SET_PDEATHSIG, self._death_signal)))
        # The threads must know where the gate is, which follows them in the table: so its room is taken first.
        count = len(calls) + len(threads) - 1
        self._table = area.reserve((count + 4) * arch.entry_size, 64)
        gate = self._table + (count + 1) * arch.entry_size + arch.result_offset
        for thread in threads[1:]:
            if thread.affinity != threads[0].affinity:
                self._affinities[len(calls)] = thread.affinity
            calls.append(clone_call(thread, offset, gate, area, arch))
        opening = [Call("getpid", ()), Call("futex", (gate, _FUTEX_WAKE_PRIVATE, len(threads)))]
        table = encode(calls, area, arch) + arch.stop_entry() + encode(opening, area, arch)
        area.write(self._table, table + arch.leave_entry(place_frame(threads[0], area, arch)))
        self._calls = calls

    def _clone(
        self, descriptors: dict[int, int], directory: str | os.PathLike[str], admit: Callable[[int], None]
    ) -> int:
        ghost = self._require_ghost()
        if sorted(descriptors) != self._replaced:
            raise TraceError(f"a clone needs the descriptors {self._replaced}, not {sorted(descriptors)}")
        self._hand_over(descriptors, directory)
        child: Tracee | None = None
        try:
            self._step("handed")
            child = self._fork(ghost)
            self._step("forked")
            child.wait_interrupted()
            self._step("held")
            child.resume()
            child.wait_signal(signal.SIGSTOP)
            self._step("built")
            self._check(child)
            admit(child.tid)
            self._step("checked")
            child.detach()
        except BaseException:
            if child is not None:
                child.kill()
            self._drain()
            raise
        self._step("detached")
        return child.tid

    def _fork(self, ghost: Tracee) -> Tracee:
        ghost.set_registers(self._fork_registers)
        ghost.resume(to_syscall=True)
        ghost.wait_syscall()
        try:
            self._step("entered")
        except BaseException:
            ghost.set_registers(self._arch.skip_call(ghost.registers()))
            ghost.finish_call()
            raise
        if (pid := ghost.finish_call()) < 0:
            raise TraceError(f"the ghost of process {self._source} cannot be forked", -pid)
        return Tracee(pid, self._arch, self._tracees)

    def _hand_over(self, descriptors: dict[int, int], directory: str | os.PathLike[str]) -> None:
        """Send the directory and the caller's descriptors to where the clone looks for them, in its table's order."""
        assert self._control is not None
        for original in self._descriptors.replaced:
            own = descriptors[original.number]
            flags = fcntl.fcntl(own, fcntl.F_GETFL)
            fcntl.fcntl(own, fcntl.F_SETFL, flags & ~os.O_NONBLOCK | original.nonblocking)
        numbers = [descriptors[original.number] for original in self._descriptors.replaced]
        try:
            place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TraceError(f"a clone cannot work in {os.fspath(directory)}", error.errno) from error
        try:
            socket.send_fds(self._control[1], [b"x"], [place, *numbers])
        finally:
            os.close(place)

    def _drain(self) -> None:
        """Take back descriptors that no clone took, or the next one would get them."""
        assert self._control is not None
        try:
            # Not socket.recv_fds: it drops the flags it is given, and would wait for ever.
            _, messages, _, _ = self._control[0].recvmsg(1, socket.CMSG_SPACE(4 + 4 * len(self._replaced)), _MSG)
        except BlockingIOError:
            return
        for _, _, data in messages:
            for (number,) in struct.iter_unpack("i", data):
                os.close(number)

    def _check(self, child: Tracee) -> None:
        """Look at every result; give threads the processors they had."""
        size = self._arch.entry_size
        with open_memory(child.tid) as memory:
            table = os.pread(memory, len(self._calls) * size, self._table)
        if failure := first_failure(self._calls, table, self._arch):
            call, result = failure
            raise TraceError(f"{call.name} gave {result} in a clone of process {self._source}", max(0, -result))
        for index, affinity in self._affinities.items():
            os.sched_setaffinity(self._arch.entry_result(table[index * size : (index + 1) * size]), affinity)

    def _require_ghost(self) -> Tracee:
        if self._ghost is None:
            raise TraceError(f"the template of process {self._source} is closed")
        return self._ghost

    def _end(self) -> None:
        ghost, self._ghost = self._ghost, None
        if ghost is not None:
            ghost.kill()
        for end in self._control or ():
            end.close()


def _receive(area: Area, descriptors: Plan, control: int, free: FreeNumbers) -> list[Call]:
    """Calls that receive what the tracer sent, go to the directory and put all descriptors in place."""
    space = socket.CMSG_SPACE(4 + 4 * len(descriptors.replaced))
    vector = area.place(struct.pack("<QQ", area.reserve(16), 1))
    header = struct.pack("<QQQQQQQ", 0, 0, vector, 1, area.reserve(space), space, 0)
    place, *received = [free.take() for _ in range(1 + len(descriptors.replaced))]
    calls = [Call("recvmsg", (control, header, _MSG), 1), Call("fchdir", (place,)), Call("close", (place,))]
    free.give_back(place)
    return [*calls, *descriptors.calls(received, free)]


def _take_socket(pid: int, number: int) -> socket.socket:
    return socket.socket(fileno=take(pid, number))


def _read_maps(pid: int) -> bytes:
    try:
        return read_proc(f"{pid}/maps")
    except OSError as error:
        raise TraceError(f"cannot read the mappings of process {pid}", error.errno) from error


def _read_size(pid: int) -> int:
    """Pages of all mappings together: quicker than the mappings, and not held up by a fork in progress."""
    try:
        return int(read_proc(f"{pid}/statm").split()[0])
    except OSError as error:
        raise TraceError(f"cannot read the size of process {pid}", error.errno) from error


def _refuse_timers(pid: int) -> None:
    try:
        timers = read_proc(f"{pid}/timers")
    except OSError as error:
        raise TraceError(f"cannot read the timers of process {pid}", error.errno) from error
    if timers:
        raise Refused(f"process {pid} has POSIX timers, which a fork does not keep")


def _check_memory(pid: int) -> tuple[list[Range], int]:
    """Ranges to be made forkable, and how many pages cannot be; refuses what clones would share with each other."""
    try:
        uses = read_smaps(pid)
    except OSError as error:
        raise TraceError(f"cannot read the mappings of process {pid}", error.errno) from error
    for use in uses:
        mapping, where = use.mapping, f"{use.mapping.start:#x} ({use.mapping.name or 'anonymous'})"
        if not mapping.private and "w" in mapping.access:
            raise Refused(f"memory at {where} is shared and writable: clones would write into each other's")
        if mapping.name.startswith("/[aio]"):
            raise Refused(f"process {pid} has kernel input and output in flight at {where}")
        if use.flags & {"um", "uw", "ui"}:
            raise Refused(f"faults of memory at {where} are handled by userfaultfd, which a fork does not keep")
        if "wf" in use.flags:
            raise Refused(f"memory at {where} is wiped by a fork")
        if "dc" in use.flags and use.flags & {"io", "pf"} and "w" in mapping.access:
            raise Refused(f"memory at {where} belongs to a device")
    left_out = [use for use in uses if "dc" in use.flags]
    devices = [use for use in left_out if use.flags & {"io", "pf"}]
    ranges = [(use.mapping.start, use.mapping.end) for use in left_out if use not in devices]
    return ranges, sum(use.mapping.length for use in devices) // mmap.PAGESIZE
