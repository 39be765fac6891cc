"""A ghost: a stopped copy-on-write clone of a running process, from which its memory is read at leisure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from forkd.linux.arch import X86_64, UnsupportedArch, host_arch
from forkd.linux.held import Gadgets, HeldThread, Step, no_step
from forkd.linux.mapping import read_smaps
from forkd.linux.ptrace import Tracee, TraceError, Tracees

_MADV_DOFORK = 11
_SPECIAL = {"io", "pf"}  # device memory: the kernel refuses to fork it

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the source was held, in milliseconds: `stopped_ms` is the whole, the others its parts."""

    attach_ms: float
    fork_ms: float
    detach_ms: float
    stopped_ms: float


def unforked_ranges(pid: int) -> list[Range]:
    """Mappings marked MADV_DONTFORK (a VMM marks guest RAM so): a ghost would lack them."""
    try:
        uses = read_smaps(pid)
    except OSError as error:
        raise TraceError(f"cannot read the mappings of process {pid}", error.errno) from error
    return [(use.mapping.start, use.mapping.end) for use in uses if "dc" in use.flags and not _SPECIAL & use.flags]


def allow_fork(thread: HeldThread, ranges: Iterable[Range]) -> None:
    """Undo MADV_DONTFORK on (start, end) ranges of a held thread's process."""
    for start, end in ranges:
        if (result := thread.call("madvise", start, end - start, _MADV_DOFORK)) < 0:
            raise TraceError(f"range {start:#x}-{end:#x} of process {thread.tid} cannot be forked", -result)


class Ghost:
    """A held clone of a process, that dies with its holder. Every method may be called from any thread.

    The ghost's parent is the source's parent. When that is the calling process, as it is for a VMM the caller started,
    `close` leaves nothing behind; otherwise the source's parent (or init) gets to reap it.

    A caller that is the source's parent must not ask `waitpid` (nor `Popen.poll`, `wait`, `send_signal`, `kill`, which
    do) about the source while it is held: the kernel would hand it the tracer's stops. A pidfd tells life from death.
    """

    def __init__(self, source: int, dofork: Iterable[Range] | None, step: Step) -> None:
        self._source = source
        self._dofork = dofork
        self._step = step
        self._prepared: tuple[X86_64, Gadgets, list[Range]] | None = None
        self._tracee: Tracee | None = None
        self.timings = Timings(0, 0, 0, 0)
        # The kernel ties a tracee to the OS thread that traces it, so this one thread lives as long as the ghost.
        self._tracer = ThreadPoolExecutor(1, thread_name_prefix=f"ghost-of-{source}")

    @classmethod
    def of(cls, pid: int, dofork: Iterable[Range] | None = None, *, step: Step = no_step) -> Ghost:
        """Freeze process `pid` and let it go on; blocks for some milliseconds.

        `dofork` are the (start, end) ranges marked MADV_DONTFORK that the ghost must have; None looks for all of them.
        They stay forkable afterwards, so later ghosts of the same process may pass ().

        Owns: the ghost and one OS thread, until `close`. Raises TraceError; the source runs on in every case.
        """
        ghost = cls.prepare(pid, dofork, step=step)
        ghost.appear()
        return ghost

    @classmethod
    def prepare(cls, pid: int, dofork: Iterable[Range] | None = None, *, step: Step = no_step) -> Ghost:
        """All of `of` that can be done before: the source notices nothing, and `appear` takes that much less time.

        Owns one OS thread, until `close`. Raises TraceError.
        """
        ghost = cls(pid, dofork, step)
        ghost._in_tracer(ghost._prepare)
        return ghost

    def appear(self) -> None:
        """Freeze the source and let it go on; blocks for some milliseconds. Raises TraceError, and is closed then."""
        self._in_tracer(self._make)

    def _in_tracer(self, work: Callable[[], None]) -> None:
        try:
            self._tracer.submit(work).result()
        except UnsupportedArch as error:
            self.close()
            raise TraceError(str(error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        if self._tracee is None:
            raise TraceError(f"the ghost of process {self._source} is closed")
        return self._tracee.tid

    def _prepare(self) -> None:
        arch = host_arch()
        ranges = unforked_ranges(self._source) if self._dofork is None else list(self._dofork)
        self._prepared = arch, Gadgets.find(self._source, arch), ranges

    def _make(self) -> None:
        assert self._prepared is not None, "prepare comes first"
        arch, gadgets, ranges = self._prepared
        with HeldThread(self._source, gadgets, arch, Tracees(), self._step) as source:
            allow_fork(source, ranges)
            attached = time.perf_counter()
            self._tracee = source.fork()
            forked = time.perf_counter()
        detached = time.perf_counter()
        begun = source.stopped_at
        self.timings = Timings(
            attach_ms=(attached - begun) * 1e3,
            fork_ms=(forked - attached) * 1e3,
            detach_ms=(detached - forked) * 1e3,
            stopped_ms=(detached - begun) * 1e3,
        )

    def close(self) -> None:
        """Kill and reap the ghost and end its thread. May be called twice."""
        try:
            ended = self._tracer.submit(self._end)
        except RuntimeError:
            return  # closed already
        self._tracer.shutdown(wait=True)
        ended.result()

    def _end(self) -> None:
        tracee, self._tracee = self._tracee, None
        if tracee is not None:
            tracee.kill()

    def __enter__(self) -> Ghost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
