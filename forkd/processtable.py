"""The processes of one sandbox: each keeps its newest output in a bounded buffer that any number may listen to."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from forkd.guestlink import GuestStream
from forkd.specs.errors import Conflict, ForkdError, GuestUnreachable, TooBusy
from forkd.specs.models import ProcessInfo

BUFFER = 256 * 1024
MAX_PIECES = 4096
MAX_RUNNING = 256
MAX_ENDED = 32
ATTACH_SECS = 30.0
"""How long a command waits, its buffer full, for the listener it was promised."""


class Output:
    """The newest output of a command, by position: the number of bytes it had said before.

    Without listeners the oldest is dropped when the buffer is full. A listener that is slow holds the command up
    instead, so nobody who listens loses anything. One who will ``attach`` is waited for likewise, for a while.
    """

    def __init__(self, limit: int = BUFFER, *, attach: bool = False) -> None:
        self._limit = limit
        self._promised = attach
        self._small = limit // 64
        self._pieces: deque[tuple[str, bytes]] = deque()
        self._first = 0
        self._listeners: set[Listener] = set()
        self._news = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self.begin = 0
        self.end = 0
        self.closed = False

    async def put(self, kind: str, data: bytes) -> None:
        """Add a piece, once everybody who listens has taken what must go for it."""
        while not self._evict(len(data)):
            if self._promised:
                with trio.move_on_after(ATTACH_SECS):
                    await self._room.park()
                self._promised = False
            else:
                await self._room.park()
        if not self._merge(kind, data):
            self._pieces.append((kind, data))
        self.end += len(data)
        self._news.unpark_all()

    def _merge(self, kind: str, data: bytes) -> bool:
        """Add to the last piece while it is small: each costs memory of its own, whatever it holds."""
        if not self._pieces or self._pieces[-1][0] != kind:
            return False
        last = self._pieces[-1][1]
        if len(last) + len(data) > self._small:
            return False
        for listener in self._listeners:
            if listener.index == self._first + len(self._pieces):  # it has taken the last piece as it was
                listener.index, listener.skip = listener.index - 1, len(last)
        self._pieces[-1] = kind, last + data
        return True

    def lose(self, count: int) -> None:
        """Note bytes the guest could not keep before this buffer began."""
        assert not self._pieces
        self.begin = self.end = self.end + count

    def close(self) -> None:
        """There is no more."""
        self.closed = True
        self._news.unpark_all()
        self._room.unpark_all()

    @contextmanager
    def listen(self, position: int = 0) -> Iterator[Listener]:
        """Everything from ``position`` on; what is no longer there is skipped, and the listener says how much."""
        listener = Listener(self, position)
        self._listeners.add(listener)
        self._promised = False
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            self._room.unpark_all()

    def kept(self, position: int = 0) -> list[tuple[str, bytes]]:
        """What is in the buffer now, from ``position`` on."""
        index, skip = self._locate(position)
        pieces = list(self._pieces)[index - self._first :]
        return [(kind, data[skip if at == 0 else 0 :]) for at, (kind, data) in enumerate(pieces)]

    def _evict(self, size: int) -> bool:
        """Make room; False if a listener still needs what would have to go."""
        while self._pieces and (self.end - self.begin + size > self._limit or len(self._pieces) >= MAX_PIECES):
            if self._promised or any(listener.index <= self._first for listener in self._listeners):
                return False
            self.begin += len(self._pieces.popleft()[1])
            self._first += 1
        return True

    def _locate(self, position: int) -> tuple[int, int]:
        """The number of the piece that holds ``position``, and how much of it lies before."""
        at = self.begin
        for offset, (_, data) in enumerate(self._pieces):
            if position < at + len(data):
                return self._first + offset, max(0, position - at)
            at += len(data)
        return self._first + len(self._pieces), 0

    def _piece(self, index: int) -> tuple[str, bytes] | None:
        offset = index - self._first
        return self._pieces[offset] if offset < len(self._pieces) else None


class Listener:
    """An async iterator of ``(kind, bytes)``; ``position``: where the next piece begins; ``lost``: what was skipped."""

    def __init__(self, output: Output, position: int) -> None:
        self._output = output
        self.lost = max(0, output.begin - position)
        self.position = min(max(position, output.begin), output.end)
        self.index, self.skip = output._locate(self.position)

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        await trio.lowlevel.checkpoint()
        while (piece := self._output._piece(self.index)) is None:
            if self._output.closed:
                raise StopAsyncIteration
            await self._output._news.park()
        kind, data = piece
        data, self.skip = data[self.skip :], 0
        self.index += 1
        self.position += len(data)
        self._output._room.unpark_all()
        return kind, data


@dataclass(eq=False, slots=True)
class Process:
    """A command in a guest: its stream while it runs, its output, how it ended."""

    args: list[str]
    tag: str | None = None
    pty: bool = False
    stdin: bool = False
    pid: int = 0
    started: float = field(default_factory=time.time)
    output: Output = field(default_factory=Output)
    stream: GuestStream | None = None
    answer: dict[str, Any] | None = None
    error: ForkdError | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.answer is None and self.error is None

    def info(self) -> ProcessInfo:
        """As the API shows it."""
        answer = self.answer or {}
        return ProcessInfo(
            pid=self.pid,
            tag=self.tag,
            args=self.args,
            pty=self.pty,
            started_at_unix=round(self.started, 3),
            running=self.running,
            reason=answer.get("reason") if self.error is None else "lost",
            exit_code=answer.get("exit_code"),
            signal=answer.get("signal"),
            error=self.error.message if self.error is not None else None,
            output_begin=self.output.begin,
            output_end=self.output.end,
            truncated=self.output.begin > 0,
        )

    async def run(self, stream: GuestStream, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take the command's output until it ends; ``started`` when it runs. A failure to start is raised."""
        stream.leave_running()
        reported = False
        try:
            async with stream:
                self.stream = stream
                said = await stream.started()
                self.pid = said["pid"]
                self.output.lose(said.get("dropped", 0))
                reported = True
                task_status.started()
                async for kind, data in stream:
                    await self.output.put(kind, data)
                self.answer = stream.answer
        except ForkdError as error:
            self.error = error
            if not reported:
                raise
        finally:
            self.stream = None
            self.output.close()

    def connected(self) -> GuestStream:
        """The stream to send input and signals on. Raises GuestUnreachable when there is none any more."""
        if self.stream is None:
            raise GuestUnreachable(f"process {self.pid} has ended")
        return self.stream


class ProcessTable:
    """Processes by pid: all that run, and the last that ended."""

    def __init__(self) -> None:
        self._processes: OrderedDict[int, Process] = OrderedDict()
        self._starting: set[str] = set()
        self.adopting = trio.Lock()

    def __iter__(self) -> Iterator[Process]:
        return iter(list(self._processes.values()))

    def find(self, reference: str) -> Process | None:
        """By pid or, the newest first, by tag."""
        if reference.isascii() and reference.isdigit() and len(reference) < 19 and int(reference) in self._processes:
            return self._processes[int(reference)]
        return next((each for each in reversed(self._processes.values()) if each.tag == reference), None)

    @contextmanager
    def starting(self, tag: str | None) -> Iterator[None]:
        """While this lasts a process is being started that shall have the tag. Raises Conflict if another has it."""
        known = None if tag is None else self.find(tag)
        if known is not None and known.running:
            raise Conflict(f"process {known.pid} has the tag {tag!r}", hint="use another tag")
        if tag in self._starting:
            raise Conflict(f"a process with the tag {tag!r} is being started", hint="use another tag")
        taken = set() if tag is None else {tag}
        self._starting |= taken
        try:
            yield
        finally:
            self._starting -= taken

    def check_room(self) -> None:
        """Raise TooBusy if as many run as may."""
        if sum(process.running for process in self) >= MAX_RUNNING:
            raise TooBusy(f"{MAX_RUNNING} processes run in this sandbox already", hint="end some of them")

    def add(self, process: Process) -> None:
        """Remember a process; forget the oldest of those that ended."""
        self._processes.pop(process.pid, None)
        self._processes[process.pid] = process
        ended = [each for each in self if not each.running]
        for old in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._processes[old.pid]
