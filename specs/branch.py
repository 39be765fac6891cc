"""Branch modes: how a running machine is captured while it is disturbed as little as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forkd.specs.engine import Machine, RamRegion

if TYPE_CHECKING:
    import trio

Step = Callable[[str], None]
"""``step(name)`` marks progress through a capture; tests use it to inject faults at each named point."""


@dataclass(frozen=True, slots=True)
class MemoryView:
    """RAM to read from: the process that holds it (the machine itself, or a ghost of it) and where."""

    pid: int
    regions: tuple[RamRegion, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """How long the guest stood still, measured around stop and cont."""

    pause_ms: float


class CaptureSink(Protocol):
    """Where a capture goes: files in a staging directory that becomes visible only if everything succeeded."""

    async def write_devices(self, state: bytes) -> None:
        """Write the machine's device state; best done when the guest runs again. Raises NoSpace."""

    async def write_image(self, memory: MemoryView) -> None:
        """Write all of RAM; zero pages become holes. Raises NoSpace, CaptureFailed."""

    async def write_delta(self, memory: MemoryView) -> None:
        """Write the pages changed against the snapshot the machine was restored from. Raises NoSpace, CaptureFailed."""


class BranchMode(Protocol):
    """One way to capture. Stateless; one object per process."""

    name: str
    needs: frozenset[str]
    """Engine capabilities without which the mode refuses."""
    keeps_running: bool
    """Whether the source runs again before its memory is written, so that a caller need not wait for the disk."""

    async def capture(
        self, machine: Machine, sink: CaptureSink, step: Step, task_status: trio.TaskStatus[Pause] = ...
    ) -> None:
        """Capture ``machine`` into ``sink``; ``task_status.started`` is called once, when the guest runs again.

        Only the mode pauses, and it always resumes, in a shielded ``finally``, whatever happens. Raises CaptureFailed,
        NoSpace or MachineGone. On cancellation the guest runs again and nothing of the mode's own is left.
        """
