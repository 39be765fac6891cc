"""A sandbox: a machine, its slot and its guest link, kept alive by one task."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from forkd.canary import Canary
from forkd.guestlink import GuestLink, ResumeInfo
from forkd.linux.process import end_process
from forkd.network import HOST_TAP_NETWORK, guest_network
from forkd.processtable import ProcessTable
from forkd.specs.engine import Machine, Slot
from forkd.specs.errors import (
    EngineError,
    ForkdError,
    GuestError,
    GuestTimeout,
    GuestUnreachable,
    MachineGone,
    OutOfMemory,
    SandboxPaused,
)
from forkd.specs.models import SandboxInfo

if TYPE_CHECKING:
    from forkd.pool import Waiting
    from forkd.runtime import Runtime
    from forkd.store.snapshots import Stored

READY_TIMEOUT = 60.0


class ConsoleTail:
    """The newest of what a guest wrote to its console, by position: the number of bytes it had written before."""

    LIMIT = 256 * 1024

    def __init__(self) -> None:
        self.kept = bytearray()
        self.end = 0

    def add(self, data: bytes) -> None:
        """Add what is new; the oldest goes."""
        self.kept += data
        self.end += len(data)
        del self.kept[: -self.LIMIT]

    def after(self, position: int) -> bytes:
        """What is kept behind a position."""
        return bytes(self.kept[max(0, len(self.kept) - (self.end - position)) :]) if position < self.end else b""


@dataclass(slots=True)
class Sandbox:
    """A running child. ``stop`` asks its task to end the machine; ``ended`` is set when nothing of it is left."""

    id: str
    machine: Machine
    link: GuestLink
    slot: Slot
    source: Stored | None
    info: SandboxInfo
    stop: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    capturing: trio.Lock = field(default_factory=trio.Lock)
    processes: ProcessTable = field(default_factory=ProcessTable)
    users: int = 0
    """How many requests work with it now; with none since ``used`` (trio's clock) it is idle."""
    used: float = field(default_factory=trio.current_time)
    changed: trio.Event = field(default_factory=trio.Event)
    """Set when something its timekeeper goes by has changed."""
    timed: bool = False
    suspending: bool = False
    """Its state is being saved and it ends after that, so nothing may make it run on."""
    console: ConsoleTail = field(default_factory=ConsoleTail)

    def check_stays(self) -> None:
        """Raise SandboxPaused while it is being suspended: what it did now would be acknowledged, and lost."""
        if self.suspending:
            raise SandboxPaused(f"sandbox {self.id} is being suspended", hint="resume its workspace when that is done")


@dataclass(frozen=True, slots=True)
class Running:
    """A VMM that an earlier owner started in a slot: its process, named for certain."""

    slot: Slot
    pid: int
    starttime: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How to bring one sandbox up: ``start`` makes its machine in the slot it is given."""

    id: str
    start: Callable[[Slot], Awaitable[Machine]]
    agent_sync: str
    info: SandboxInfo
    source: Stored | None
    ready_timeout: float = READY_TIMEOUT
    tap: bool = False
    """Whether its machine has a network device that needs a tap even when it leads nowhere."""
    host_tap: str | None = None
    """A tap of the host itself that its network device is to lead to."""
    adopted: Running | None = None
    """A machine that runs already: ``start`` connects to it, and its guest stays who it is."""
    waiting: Waiting | None = None
    """The machine ``start`` claims, with its slot; ended with the sandbox's task if it comes to nothing."""
    canary: Canary | None = None
    """What a clone must still have."""
    keep: Path | None = None
    """Where its slot goes in the end, for whoever wants to look into it; without it, nowhere."""


async def run_sandbox(
    runtime: Runtime, plan: Plan, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED
) -> None:
    """Bring a sandbox up, report it when its guest serves, and end it when asked, when cancelled or when its VMM dies.

    A failure before it is up is raised to the caller; a later one is remembered in ``runtime.endings``. Whatever
    happens, no process and no directory is left; except that a sandbox which is up when a runtime that ``keeps`` them
    is left goes on, for the next one to adopt.
    """
    began = time.monotonic()
    ready = plan.adopted or plan.waiting
    slot = ready.slot if ready else runtime.slots.take(plan.id, plan.info.snapshot_tag)
    machine: Machine | None = None
    sandbox: Sandbox | None = None
    failed = False
    try:
        async with runtime.start_limit:
            runtime.slots.limits.apply(plan.info, lenient=plan.adopted is not None)
            slot = await runtime.slots.attach(slot, plan.info, runtime.nursery, runtime.settings.dns, plan.tap)
            if plan.host_tap is not None:
                slot = dataclasses.replace(slot, tap=plan.host_tap)
            machine = await plan.start(slot)
            link = await _link_up(runtime, plan, machine)
        plan.info.pid = machine.pid
        if plan.adopted is None:
            plan.info.spawn_ms = round((time.monotonic() - began) * 1000, 2)
        sandbox = Sandbox(plan.id, machine, link, slot, plan.source, plan.info)
        if runtime.on_up is not None and plan.source is not None:
            await runtime.on_up(sandbox)
        runtime.inventory.save(sandbox)
        runtime.sandboxes[plan.id] = sandbox
        runtime.nursery.start_soon(_watch, runtime, sandbox)
        if plan.adopted is None and plan.source is not None:
            runtime.observe("spawn", id=plan.id, tag=plan.info.snapshot_tag, spawn_ms=plan.info.spawn_ms)
        task_status.started(sandbox)
        await sandbox.stop.wait()
    except ForkdError as error:
        failed = True
        if not isinstance(error, EngineError | GuestError):
            raise
        if why := runtime.slots.limits.ran_out(plan.info):
            raise OutOfMemory(f"{plan.id} {why}", hint="give it more memory") from error
        raise
    finally:
        runtime.sandboxes.pop(plan.id, None)
        # A caller that is cancelled before the task moves to the runtime's nursery never hears of the sandbox.
        up = plan.adopted is not None or trio.lowlevel.current_task().parent_nursery is runtime.nursery
        stopped = failed or (sandbox is not None and sandbox.stop.is_set())
        if stopped or not (runtime.keeps and up and plan.source is not None):
            with trio.CancelScope(shield=True):
                if machine is not None:
                    await machine.kill()
                elif plan.waiting is not None:
                    await plan.waiting.machine.kill()
                elif plan.adopted is not None:  # nobody else would ever end it: its slot and its row go
                    await end_process(plan.adopted.pid, plan.adopted.starttime)
                await runtime.slots.release(slot, plan.keep)
                runtime.inventory.remove(plan.id)
            if sandbox is not None and sandbox.source is not None:
                runtime.observe("end", id=plan.id, reason=runtime.endings.get(plan.id))
        if sandbox is not None:
            sandbox.ended.set()


async def _link_up(runtime: Runtime, plan: Plan, machine: Machine) -> GuestLink:
    """Open the guest link and wait for the resume handshake; the VMM's own end explains a failure best."""
    sync = bytes.fromhex(plan.agent_sync)
    network = HOST_TAP_NETWORK if plan.host_tap is not None else guest_network(plan.info)
    fresh = dataclasses.replace(ResumeInfo.fresh(plan.id), network=network)
    resume = fresh if plan.adopted is None else ResumeInfo()
    link = await GuestLink.open(machine.agent, sync, runtime.nursery, resume=resume)
    with trio.move_on_after(plan.ready_timeout):
        try:
            async with AsyncExitStack() as stack:
                asked = await stack.enter_async_context(plan.canary.ask(link)) if plan.canary else None
                await link.ready()
                if plan.canary and asked:
                    await plan.canary.check(machine, asked)
        except GuestUnreachable as error:
            raise MachineGone(f"the guest never became ready: {await machine.wait()}") from error
        return link
    raise GuestTimeout(f"the guest of {plan.id} did not answer within {plan.ready_timeout:g} s")


async def _watch(runtime: Runtime, sandbox: Sandbox) -> None:
    """Notice a VMM that ends by itself."""
    words = await sandbox.machine.wait()
    if not sandbox.stop.is_set():
        runtime.endings[sandbox.id] = runtime.slots.limits.ran_out(sandbox.info) or words
        sandbox.stop.set()


async def end_sandbox(sandbox: Sandbox) -> None:
    """End a sandbox and return when nothing of it is left."""
    sandbox.stop.set()
    await sandbox.ended.wait()


async def end_sandboxes(sandboxes: Iterable[Sandbox]) -> None:
    """End many side by side, whether cancelled or not."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for sandbox in sandboxes:
                nursery.start_soon(end_sandbox, sandbox)
