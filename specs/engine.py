"""Engines: how a VMM process is started, controlled and ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forkd.specs.models import Hardware, Platform

if TYPE_CHECKING:
    import trio

GHOST = "ghost"
"""Capability: the machine's RAM is privately mapped in one process, so a fork of that process freezes it."""
TEMPLATE = "template"
"""Capability: a stopped machine can be cloned whole, device state and threads included."""
IDLE_NIC = "idle_nic"
"""Capability: a machine's network device may be connected to nothing; without it, it needs a tap always."""

USER_NETWORK = "user_network"
"""Capability: the VMM has a network stack of its own, for ``Slot.user_network``."""
VOLUMES = "volumes"
"""Capability: a machine can have disks besides the rootfs."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine factory is given: a directory for its own small caches, and its settings."""

    cache_dir: Path
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What this engine would run a new machine on, here and now."""

    platform: Platform
    capabilities: frozenset[str]
    why: str


@dataclass(frozen=True, slots=True)
class Slot:
    """The host side of one child: a private directory, and whether the VMM must end with the process that owns it.

    An engine calls ``admit(pid)`` as soon as its process exists, before that has done anything: so it is under its
    limits from the start. Raises LimitRefused. ``limited()`` tells whether there are any, and so whether a process that
    would begin by itself has to be held until then. With ``netns`` (a path) the VMM runs in that network namespace,
    where ``tap`` is the device its guest's network goes to; ``user_network`` asks for the VMM's own user-mode stack
    instead. With neither the guest's network device, if it has one, leads nowhere.
    """

    id: str
    directory: Path
    die_with_owner: bool = True
    admit: Callable[[int], None] = lambda pid: None
    limited: Callable[[], bool] = lambda: False
    netns: str | None = None
    tap: str | None = None
    user_network: bool = False


@dataclass(frozen=True, slots=True)
class VolumeDisk:
    """A read-only disk besides the rootfs; the guest mounts it at ``guest_path``, for itself to write to or not."""

    path: Path
    guest_path: str
    read_only: bool


def volume_words(volumes: Sequence[VolumeDisk]) -> list[str]:
    """What the guest's kernel command line says about volumes: ``forkd.volume=N:ro|rw:PATH``, outer paths first.

    The disk of volume N has the serial number ``forkd-volumeN``; with volumes, that of the rootfs has ``forkd-root``.
    """
    rows = sorted(enumerate(volumes), key=lambda row: row[1].guest_path)
    return [f"forkd.volume={index}:{'ro' if one.read_only else 'rw'}:{one.guest_path}" for index, one in rows]


@dataclass(frozen=True, slots=True)
class BootSpec:
    """A machine to boot from a kernel. ``agent_sync`` reaches the guest on its command line (formats/agent.md).

    So do ``volumes``, which only an engine with the capability VOLUMES is given.
    """

    kernel: Path
    initrd: Path
    rootfs: Path
    hardware: Hardware
    agent_sync: str
    volumes: tuple[VolumeDisk, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryImage:
    """RAM contents a VMM maps privately: a path it can open (a file, or ``/proc/PID/fd/N`` of a memfd)."""

    path: str
    size: int
    hugepages: bool = False


@dataclass(frozen=True, slots=True)
class RestoreSpec:
    """A machine to bring back from device state and a memory image, over read-only disks."""

    vmstate: Path
    memory: MemoryImage
    rootfs: Path | None
    hardware: Hardware
    platform: Platform
    volumes: tuple[VolumeDisk, ...] = ()


@dataclass(frozen=True, slots=True)
class RamRegion:
    """Where a part of guest RAM is in the VMM process: address and length there, offset in the memory image."""

    address: int
    length: int
    offset: int


class Machine(Protocol):
    """One VMM process. Whoever holds it must ``kill`` it; cancellation of any method leaves it killable."""

    @property
    def pid(self) -> int:
        """The VMM's process id."""

    @property
    def agent(self) -> trio.abc.Stream:
        """The agent channel, connected before the guest runs; closed by ``kill``."""

    async def pause(self) -> None:
        """Stop all virtual CPUs; returns when they stand still. Raises MachineGone or EngineError."""

    async def resume(self) -> None:
        """Let the guest run; harmless if it does. Raises MachineGone or EngineError."""

    async def save_devices(self) -> bytes:
        """The paused machine's CPU and device state, without RAM. Touches no disk the guest would have to wait for.

        Raises MachineGone or EngineError, also when it is larger than any device state.
        """

    def ram(self) -> list[RamRegion]:
        """Where guest RAM is mapped in the process, ascending by offset. Raises MachineGone."""

    async def wait(self) -> str:
        """Return, once the VMM has ended for whatever reason, a sentence that says how, with its last words."""

    async def kill(self) -> None:
        """End the VMM and return when the process is gone for certain. Safe to call twice, and while cancelled."""


@runtime_checkable
class LoggedMachine(Protocol):
    """What a machine can do besides whose logs can be read while it runs; asking for them changes nothing in it."""

    @property
    def log(self) -> Path:
        """The file with the VMM's own messages; what is in it may be hostile."""

    async def console(self) -> bytes:
        """What the guest wrote to its console since this was last asked, the newest of it if that was much.

        Raises Conflict where no console is kept, MachineGone.
        """


class Engine(Protocol):
    """A kind of VMM. One object per process, safe for concurrent use."""

    name: str

    async def describe(self) -> EngineInfo:
        """Say what a new machine would run on. Cheap after the first call. Raises ToolMissing."""

    def check(self, platform: Platform, here: EngineInfo) -> None:
        """Raise SnapshotIncompatible, naming what differs, if device state made on ``platform`` cannot run here."""

    async def boot(self, spec: BootSpec, slot: Slot) -> Machine:
        """Start a machine from its kernel; returns when the VMM runs it (that the guest is ready is the agent's word).

        Raises LaunchFailed with exit code, full command line and console tail. On cancellation nothing is left.
        """

    async def restore(self, spec: RestoreSpec, slot: Slot) -> Machine:
        """Bring a machine back; returns with the guest running and nothing yet written to its agent channel.

        Raises LaunchFailed as ``boot`` does. On cancellation nothing is left.
        """

    async def adopt(self, slot: Slot, pid: int, starttime: int) -> Machine:
        """Take over a running VMM that an earlier process of ours started in ``slot``. Raises MachineGone."""


class MachineTemplate(Protocol):
    """A frozen machine from which running ones are cloned. Ends with the process that holds it, if not before."""

    @property
    def pid(self) -> int:
        """The frozen process."""

    @property
    def pause_ms(self) -> float:
        """How long the machine stood still for it, if it was to run again."""

    async def clone(self, slot: Slot) -> Machine:
        """A machine in ``slot`` that goes on where the frozen one stood, with nothing yet written to its agent channel.

        It shares nothing writable with its siblings, answers on sockets of its own in ``slot``, can be captured like a
        restored one, and lives on after ``close``. Raises LaunchFailed. On cancellation nothing is left.
        """

    async def close(self) -> None:
        """End the frozen process and return when it is gone. Safe to call twice, and while cancelled."""


@runtime_checkable
class TemplateEngine(Protocol):
    """What an engine with the capability TEMPLATE can do besides."""

    async def freeze(self, machine: Machine, slot: Slot, *, resume: bool) -> MachineTemplate:
        """Stop a machine of this engine in ``slot`` and make a template of it; the machine may be ended then.

        With ``resume`` it runs again as soon as it is frozen, and in any case when this raises. Raises TemplateRefused
        with the reason where a clone would not be safe: then restore. On cancellation nothing is left.
        """
