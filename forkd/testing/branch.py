"""The contract of branch modes."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from forkd.specs.branch import BranchMode, MemoryView, Pause, Step
from forkd.specs.engine import GHOST, TEMPLATE
from forkd.specs.errors import CaptureFailed, ForkdError, NoSpace
from forkd.store import deltas
from forkd.store.capture import StageSink
from forkd.testing.machines import PAGE, StampingMachine, assert_one_instant, stamps

RAM = 16 << 20
STAMPED = 4 << 20
MACHINE_STEPS = ("pause", "devices", "memory")
"""Steps every mode must announce; it may have more."""


@dataclass(slots=True)
class Taken:
    """What came of one capture: the steps announced and the pauses reported."""

    steps: list[str] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)


class _Status(trio.TaskStatus[Pause]):
    def __init__(self, taken: Taken) -> None:
        self._taken = taken

    def started(self, value: Pause | None = None) -> None:
        assert value is not None
        self._taken.pauses.append(value)


class WatchedSink(StageSink):
    """The store's own sink, which also notes who was read, and can be slow or full."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, RAM)
        self.views: list[MemoryView] = []
        self.delay = 0.0
        self.full = False

    async def write_image(self, memory: MemoryView) -> None:
        """As the store does."""
        await self._watch(memory)
        await super().write_image(memory)

    async def write_delta(self, memory: MemoryView) -> None:
        """As the store does."""
        await self._watch(memory)
        await super().write_delta(memory)

    async def _watch(self, memory: MemoryView) -> None:
        self.views.append(memory)
        await trio.sleep(self.delay)
        if self.full:
            raise NoSpace("the disk is full")


def children_of(pid: int) -> set[int]:
    """Processes whose parent it is."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as listed:
            found |= {int(word) for word in listed.read().split()}
    return found


class BranchModeContract:
    """Subclass it and give the fixture ``mode``. Machines are small processes; the suite needs no VMM."""

    @pytest.fixture
    def image(self, tmp_path: Path) -> Path:
        """The image the source was restored from: not zero, so that a page missing from a delta shows."""
        path = tmp_path / "parent.bin"
        path.write_bytes((b"\0" * 8 + b"parent".ljust(PAGE - 8, b".")) * (RAM // PAGE))
        return path

    @pytest.fixture
    async def machine(self, image: Path) -> AsyncIterator[StampingMachine]:
        """A running source."""
        machine = StampingMachine(image, STAMPED)
        yield machine
        await machine.kill()

    @pytest.fixture
    def sink(self, tmp_path: Path) -> WatchedSink:
        """Where the capture goes."""
        (tmp_path / "stage").mkdir()
        return WatchedSink(tmp_path / "stage")

    @pytest.fixture
    def no_process_is_left(self) -> Iterator[None]:
        """Ghosts and helpers are gone after the test."""
        before = children_of(os.getpid())
        yield
        left = children_of(os.getpid()) - before
        assert not left, f"processes left behind: {left}"

    def test_it_says_what_it_needs(self, mode: BranchMode) -> None:
        assert mode.name.isidentifier()
        assert mode.needs <= {GHOST, TEMPLATE}
        assert isinstance(mode.keeps_running, bool)

    async def test_the_capture_is_of_one_instant_and_the_source_goes_on(
        self, mode: BranchMode, machine: StampingMachine, image: Path, tmp_path: Path
    ) -> None:
        for turn in range(5):
            directory = tmp_path / f"turn-{turn}"
            directory.mkdir()
            turn_sink = WatchedSink(directory)
            taken = await capture(mode, machine, turn_sink)
            assert [type(pause) for pause in taken.pauses] == [Pause]
            assert set(MACHINE_STEPS) <= set(taken.steps)
            values = stamps(whole_image(turn_sink, image, directory), STAMPED)
            assert_one_instant(values)
            # The device state was saved in the same pause.
            assert int.from_bytes(turn_sink.vmstate.read_bytes(), "little") == values[0]
            await assert_running(machine)

    async def test_what_was_not_changed_is_as_it_was(
        self, mode: BranchMode, machine: StampingMachine, sink: WatchedSink, image: Path, tmp_path: Path
    ) -> None:
        await capture(mode, machine, sink)
        with open(whole_image(sink, image, tmp_path), "rb") as taken, open(image, "rb") as parent:
            taken.seek(STAMPED)
            parent.seek(STAMPED)
            assert taken.read() == parent.read()

    async def test_the_pause_is_how_long_the_source_stood_still(
        self, mode: BranchMode, machine: StampingMachine, sink: WatchedSink
    ) -> None:
        sink.delay = 0.5
        began = time.monotonic()
        (pause,) = (await capture(mode, machine, sink)).pauses
        total = (time.monotonic() - began) * 1000
        if mode.keeps_running:
            assert pause.pause_ms <= total - sink.delay * 1000, "a slow disk must not hold the source up"
            assert sink.views[0].pid != machine.pid
        else:
            assert sink.delay * 1000 <= pause.pause_ms <= total

    @pytest.mark.usefixtures("no_process_is_left")
    @pytest.mark.parametrize("error", [NoSpace("made up"), CaptureFailed("made up")], ids=["no-space", "failed"])
    async def test_whatever_fails_at_any_step_the_source_runs_on(
        self, mode: BranchMode, machine: StampingMachine, tmp_path: Path, error: ForkdError
    ) -> None:
        for step in await steps_of(mode, machine, tmp_path):
            sink = WatchedSink(fresh_directory(tmp_path))

            def fail(name: str, step: str = step) -> None:
                if name == step:
                    raise error

            with pytest.raises(type(error)):
                await capture(mode, machine, sink, fail)
            await assert_running(machine)

    @pytest.mark.usefixtures("no_process_is_left")
    async def test_a_full_disk_is_an_error_and_the_source_runs_on(
        self, mode: BranchMode, machine: StampingMachine, sink: WatchedSink
    ) -> None:
        sink.full = True
        with pytest.raises(NoSpace):
            await capture(mode, machine, sink)
        await assert_running(machine)

    @pytest.mark.usefixtures("no_process_is_left")
    async def test_cancelled_at_any_step_the_source_runs_on(
        self, mode: BranchMode, machine: StampingMachine, tmp_path: Path
    ) -> None:
        for step in await steps_of(mode, machine, tmp_path):
            with trio.CancelScope() as scope:

                def cancel(name: str, step: str = step, scope: trio.CancelScope = scope) -> None:
                    if name == step:
                        scope.cancel()

                await capture(mode, machine, WatchedSink(fresh_directory(tmp_path)), cancel)
            await assert_running(machine)

    @pytest.mark.usefixtures("no_process_is_left")
    async def test_a_machine_that_dies_at_any_step_is_an_error_of_ours_or_was_captured_before(
        self, mode: BranchMode, image: Path, tmp_path: Path
    ) -> None:
        first = StampingMachine(image, STAMPED)
        steps = await steps_of(mode, first, tmp_path)
        await first.kill()
        for step in steps:
            machine = StampingMachine(image, STAMPED)

            def die(name: str, step: str = step, pid: int = machine.pid) -> None:
                if name == step:
                    os.kill(pid, 9)

            taken = Taken()
            with trio.fail_after(30):
                try:
                    await capture(mode, machine, WatchedSink(fresh_directory(tmp_path)), die, taken)
                except ForkdError:
                    pass
                else:
                    assert taken.pauses, f"killed at {step!r} before it ran again, and no error"
            await machine.kill()

    async def test_captures_of_several_machines_at_once_do_not_mix(
        self, mode: BranchMode, image: Path, tmp_path: Path
    ) -> None:
        machines = [StampingMachine(image, STAMPED) for _ in range(4)]
        sinks = [WatchedSink(fresh_directory(tmp_path)) for _ in machines]
        try:
            async with trio.open_nursery() as nursery:
                for machine, sink in zip(machines, sinks, strict=True):
                    nursery.start_soon(capture, mode, machine, sink)
            for machine, sink in zip(machines, sinks, strict=True):
                values = stamps(whole_image(sink, image, fresh_directory(tmp_path)), STAMPED)
                assert_one_instant(values)
                assert int.from_bytes(sink.vmstate.read_bytes(), "little") == values[0]
                await assert_running(machine)
        finally:
            for machine in machines:
                await machine.kill()


async def capture(
    mode: BranchMode,
    machine: StampingMachine,
    sink: WatchedSink,
    step: Step = lambda name: None,
    taken: Taken | None = None,
) -> Taken:
    """Run ``mode`` once; ``step`` may raise, cancel or kill."""
    taken = taken or Taken()

    def noted(name: str) -> None:
        taken.steps.append(name)
        step(name)

    await mode.capture(machine, sink, noted, task_status=_Status(taken))
    return taken


async def steps_of(mode: BranchMode, machine: StampingMachine, tmp_path: Path) -> list[str]:
    """The steps a capture goes through, found out by making one."""
    return (await capture(mode, machine, WatchedSink(fresh_directory(tmp_path)))).steps


async def assert_running(machine: StampingMachine) -> None:
    """Fail unless the source's memory goes on changing."""
    before = machine.stamp()
    with trio.fail_after(30):
        while machine.stamp() == before:
            await trio.sleep(0.001)


def whole_image(sink: WatchedSink, parent: Path, directory: Path) -> Path:
    """The captured memory as one file, laid over the parent's if it is a delta."""
    assert sink.memory is not None
    written = sink.vmstate.parent
    if sink.memory.kind == "image":
        return written / "memory.bin"
    out = directory / "whole.bin"
    deltas.materialise(parent, [written / "memory.delta"], out)
    return out


def fresh_directory(tmp_path: Path) -> Path:
    """A new empty directory."""
    made = tmp_path / f"d{len(os.listdir(tmp_path))}-{time.monotonic_ns()}"
    made.mkdir()
    return made
