"""A frozen QEMU from which running machines are cloned: no state is loaded, no guest code translated again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import trio

from forkd.linux.clone import ProcessTemplate, Survey
from forkd.linux.descriptors import Descriptor, Unsettled, read_descriptors, take
from forkd.linux.mapping import read_maps
from forkd.linux.process import ProcessHandle
from forkd.linux.ptrace import TraceError
from forkd.plugins.engine_qemu.machine import AGENT_SOCKET, LOG, QMP_SOCKET, QemuMachine, listen_and_connect
from forkd.plugins.engine_qemu.qmp import Qmp
from forkd.plugins.engine_qemu.user import give_slot, owner_of
from forkd.specs.engine import Slot
from forkd.specs.errors import LaunchFailed, TemplateRefused

T = TypeVar("T")
Role = tuple[str, bool]
"""What one of QEMU's descriptors is for: the name of its socket and whether it listens, or its log."""
_LOG: Role = (LOG, False)
TRIED_AGAIN_AFTER = (0.005, 0.02, 0.1)
"""Seconds for which a machine that was in the middle of something runs on before it is stopped again."""


class QemuTemplate:
    """Each clone has sockets, log and working directory of its own, and runs where the stopped machine stood."""

    def __init__(self, process: ProcessTemplate, roles: dict[int, Role], machine: QemuMachine, pause_ms: float) -> None:
        self._process = process
        self._roles = roles
        self._ram = machine.image
        self._ram_size = machine.ram_size
        self._user = owner_of(machine.directory)
        self.pause_ms = pause_ms
        self._one_at_a_time = trio.CapacityLimiter(1)  # the tracer is one thread: let tasks wait, not threads

    @classmethod
    async def of(cls, machine: QemuMachine, *, die_with_owner: bool, resume: bool) -> QemuTemplate:
        """Stop a machine and freeze it; with ``resume`` it runs again as soon as that is done.

        One that is in the middle of something (bytes on their way to the guest, say) is given some more moments.
        Raises TemplateRefused with the reason, MachineGone.
        """
        for pause in TRIED_AGAIN_AFTER:
            try:
                return await cls._freeze(machine, die_with_owner=die_with_owner, resume=resume)
            except TemplateRefused as error:
                if not isinstance(error.__cause__, Unsettled):
                    raise
                if not resume:
                    await machine.resume()
                await trio.sleep(pause)
        return await cls._freeze(machine, die_with_owner=die_with_owner, resume=resume)

    @classmethod
    async def _freeze(cls, machine: QemuMachine, *, die_with_owner: bool, resume: bool) -> QemuTemplate:
        survey, roles, shared = await _traced(_survey, machine)
        death_signal = signal.SIGKILL if die_with_owner else 0
        process: ProcessTemplate | None = None
        began = time.monotonic()
        try:
            try:
                await machine.pause()
                process = await _traced(
                    lambda: ProcessTemplate.freeze(machine.pid, survey, roles, shared, death_signal=death_signal)
                )
            finally:
                if resume:
                    with trio.CancelScope(shield=True):
                        await machine.resume()
            pause_ms = (time.monotonic() - began) * 1000
            await _traced(process.prepare)
        except BaseException:
            if process is not None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(process.close)
            raise
        return cls(process, roles, machine, pause_ms)

    @property
    def pid(self) -> int:
        """The frozen process, whose memory is the template's."""
        return self._process.pid

    async def clone(self, slot: Slot) -> QemuMachine:
        """A running machine in ``slot``. Raises LaunchFailed; then, as on cancellation, nothing is left."""
        if slot.netns or slot.tap:
            raise LaunchFailed("a clone cannot have a network of its own: restore it")
        if self._user is not None:
            give_slot(slot.directory, self._user)
        with _explained(slot), ExitStack() as theirs, ExitStack() as ours:
            ends = {name: _Ends(slot.directory, name, theirs, ours) for name in (QMP_SOCKET, AGENT_SOCKET)}
            log = theirs.enter_context((slot.directory / LOG).open("wb"))
            given = {number: ends[role[0]].of(role) for number, role in self._roles.items() if role != _LOG}
            given |= {number: log.fileno() for number, role in self._roles.items() if role == _LOG}
            process = await trio.to_thread.run_sync(self._clone, given, slot, limiter=self._one_at_a_time)
            ours.pop_all()
        qmp = Qmp(ends[QMP_SOCKET].stream())
        machine = QemuMachine(process, qmp, ends[AGENT_SOCKET].stream(), slot, self._ram, self._ram_size)
        try:
            await machine.resume()
        except BaseException:
            await machine.kill()
            raise
        return machine

    def _clone(self, given: dict[int, int], slot: Slot) -> ProcessHandle:
        try:
            return ProcessHandle.of_clone(self._process.clone(given, slot.directory, slot.admit))
        except TraceError as error:
            raise LaunchFailed(f"the template could not be cloned: {error}") from error

    async def close(self) -> None:
        """End the frozen process; clones live on. Safe to call twice, and while cancelled."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._process.close)


class _Ends:
    """One of a clone's two sockets: listening in its slot as QEMU's own did, with our connection accepted already."""

    def __init__(self, directory: Path, name: str, theirs: ExitStack, ours: ExitStack) -> None:
        listener, client = listen_and_connect(directory, name)
        self._listener, self._client = theirs.enter_context(listener), ours.enter_context(client)
        self._accepted = theirs.enter_context(listener.accept()[0])

    def of(self, role: Role) -> int:
        """The descriptor for one of QEMU's two."""
        return (self._listener if role[1] else self._accepted).fileno()

    def stream(self) -> trio.SocketStream:
        """Our end, which is the machine's from now on."""
        return trio.SocketStream(trio.socket.from_stdlib_socket(self._client))


@contextmanager
def _explained(slot: Slot) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchFailed(f"the template could not be cloned for {slot.id}: {error}") from error


async def _traced(work: Callable[..., T], *arguments: object) -> T:
    # A thread of its own: for those all share it may have to wait, and the machine stands still.
    try:
        return await trio.to_thread.run_sync(work, *arguments, limiter=trio.CapacityLimiter(1))
    except (TraceError, OSError) as error:
        raise TemplateRefused(f"QEMU cannot be cloned: {error}") from error


def _survey(machine: QemuMachine) -> tuple[Survey, dict[int, Role], set[int]]:
    return Survey.of(machine.pid), *_sort_descriptors(machine)


def _sort_descriptors(machine: QemuMachine) -> tuple[dict[int, Role], set[int]]:
    """Which of QEMU's descriptors each clone needs its own of, and which all may share: the memory image's.

    QEMU keeps the image open for writing although it maps it privately; it never writes through the descriptor.
    """
    address = machine.ram()[0].address
    image = {mapping.name for mapping in read_maps(machine.pid) if mapping.start == address}
    roles: dict[int, Role] = {}
    shared: set[int] = set()
    for descriptor in read_descriptors(machine.pid):
        if descriptor.target.removesuffix(" (deleted)") in image:
            shared.add(descriptor.number)
        elif role := _role(machine, descriptor):
            roles[descriptor.number] = role
    return roles, shared


def _role(machine: QemuMachine, descriptor: Descriptor) -> Role | None:
    if descriptor.target == str(machine.directory / LOG):
        return _LOG
    if not descriptor.target.startswith("socket:"):
        return None
    with socket.socket(fileno=take(machine.pid, descriptor.number)) as own:
        if own.family != socket.AF_UNIX:
            return None
        name = os.path.basename(own.getsockname())
        listens = bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return (name, listens) if name in (QMP_SOCKET, AGENT_SOCKET) else None
