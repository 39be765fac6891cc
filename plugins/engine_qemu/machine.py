"""One QEMU process: started or adopted, controlled over QMP, ended for certain."""

from __future__ import annotations

import base64
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import trio

from forkd.linux.mapping import find_ram
from forkd.linux.process import ProcessHandle, small_pages
from forkd.plugins.engine_qemu.command import CONSOLE_BYTES
from forkd.plugins.engine_qemu.qmp import Qmp, QmpClosed
from forkd.specs.engine import RamRegion, Slot
from forkd.specs.errors import Conflict, EngineError, LaunchFailed, MachineGone

QMP_SOCKET = "qmp.sock"
AGENT_SOCKET = "agent.sock"
LOG = "vmm.log"
CONSOLE = "console.log"
STATE_SET = 1
MAX_STATE = 64 << 20
TAIL = 2000
NOTICE = "info: QEMU waiting for connection"
HOLD = 'read -r go && exec "$@" </dev/null'
"""A shell that waits for a line and becomes QEMU: what a process takes before it is under its limits never counts."""


class QemuMachine:
    """A running QEMU. Its working directory is its slot, by which ``forkd cleanup`` finds it if all else is lost."""

    def __init__(
        self,
        process: ProcessHandle,
        qmp: Qmp,
        agent: trio.SocketStream,
        slot: Slot,
        ram: str,
        ram_size: int | None = None,
    ) -> None:
        self._process = process
        self._qmp = qmp
        self._agent = agent
        self._slot = slot
        self._ram = ram
        self._ram_size = ram_size
        self._lent = False  # QEMU holds a descriptor that device state was written to

    @property
    def pid(self) -> int:
        """QEMU's process id."""
        return self._process.pid

    @property
    def directory(self) -> Path:
        """Where it works: its slot."""
        return self._slot.directory

    @property
    def image(self) -> str:
        """What its RAM maps."""
        return self._ram

    @property
    def ram_size(self) -> int | None:
        """How large its RAM is, where that was needed to find it."""
        return self._ram_size

    @property
    def agent(self) -> trio.SocketStream:
        """The host end of the guest's virtio-serial port."""
        return self._agent

    async def pause(self) -> None:
        """Stop the virtual CPUs."""
        await self._command("stop")

    async def resume(self) -> None:
        """Let them run.

        A descriptor lent for device state is taken back only now: QEMU closes none of a set while it stands still.
        """
        lent, self._lent = self._lent, False
        with self._gone_explained():
            if not lent:
                await self._qmp.execute("cont")
                return
            try:
                await self._qmp.execute_all(("cont", {}), ("remove-fd", {"fdset-id": STATE_SET}))
            except QmpClosed:
                raise
            except EngineError:  # a capture cancelled before it lent anything? Then this is all there is to do
                await self._qmp.execute("cont")

    async def save_devices(self) -> bytes:
        """Device state alone; the command is not Xen's only, whatever its name says (see decisions/0001).

        QEMU writes it into memory it is handed: no disk is waited for, and it needs no right to make a file.
        """
        file = os.memfd_create("forkd-devices", os.MFD_CLOEXEC)
        try:
            # QEMU wants a descriptor that can do no more than it needs.
            writing = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._lent = True
                with self._gone_explained():
                    await self._qmp.execute_all(
                        ("add-fd", {"fdset-id": STATE_SET}),
                        ("xen-save-devices-state", {"filename": f"/dev/fdset/{STATE_SET}", "live": False}),
                        descriptor=writing,
                    )
            finally:
                os.close(writing)
            state = os.pread(file, MAX_STATE + 1, 0)
        finally:
            os.close(file)
        if len(state) > MAX_STATE:
            raise EngineError(f"QEMU wrote more than {MAX_STATE >> 20} MiB of device state")
        return state

    async def look_for_lent(self) -> None:
        """Find out whether a former owner lent it a descriptor and never came to take it back."""
        self._lent = any(each["fdset-id"] == STATE_SET for each in await self._command("query-fdsets"))

    @property
    def log(self) -> Path:
        """QEMU's own messages."""
        return self._slot.directory / LOG

    async def console(self) -> bytes:
        """What is in QEMU's ring, which is empty then. A machine that was booted, not restored, has a file instead."""
        if (self._slot.directory / CONSOLE).exists():
            raise Conflict("the console of a parent that is being made is in its slot", hint=f"see {CONSOLE} there")
        return base64.b64decode(
            await self._command("ringbuf-read", device="console", size=CONSOLE_BYTES, format="base64")
        )

    def ram(self) -> list[RamRegion]:
        """Guest RAM is one private mapping; the kernel may show it in pieces."""
        try:
            return [RamRegion(*region) for region in find_ram(self.pid, self._ram, self._ram_size)]
        except OSError as error:
            raise MachineGone(f"VMM {self.pid} has no RAM mapping to read: {error}") from error

    async def wait(self) -> str:
        """Wait for QEMU's end."""
        status = await self._process.wait()
        return f"QEMU {self.pid} {describe_exit(status)}{last_words(self._slot.directory)}"

    async def kill(self) -> None:
        """SIGKILL, then wait until the kernel says it is gone."""
        with trio.CancelScope(shield=True):
            self._process.kill()
            await self._process.wait()
            await self._qmp.aclose()
            await self._agent.aclose()

    async def _command(self, name: str, **arguments: object) -> Any:
        with self._gone_explained():
            return await self._qmp.execute(name, **arguments)

    @contextmanager
    def _gone_explained(self) -> Iterator[None]:
        try:
            yield
        except QmpClosed as error:
            raise MachineGone(f"QEMU {self.pid} is gone{last_words(self._slot.directory)}") from error


class Launch:
    """Three named phases: ``prepare`` sockets, ``start`` the process, ``handshake`` over QMP; ``undo`` at any point."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.command: list[str] = []
        self._process: ProcessHandle | None = None
        self._listeners: list[socket.socket] = []
        self._clients: list[socket.socket] = []

    def prepare(self) -> tuple[int, int]:
        """Make both listening sockets and connect to them at once: descriptors for QEMU's qmp and agent."""
        for name in (QMP_SOCKET, AGENT_SOCKET):
            try:
                listener, client = listen_and_connect(self.slot.directory, name)
            except OSError as error:
                raise LaunchFailed(f"no sockets can be made in {self.slot.directory}: {error}") from error
            self._listeners.append(listener)
            self._clients.append(client)
        return self._listeners[0].fileno(), self._listeners[1].fileno()

    def start(self, command: list[str], extra_fds: tuple[int, ...] = ()) -> None:
        """Run QEMU in its slot, in a session of its own, dying with us where the slot says so."""
        self.command = command
        # PDEATHSIG belongs to the thread that forks, so the process is started here in the main thread, not in trio's
        # worker threads, which come and go.
        prefix = [] if self.slot.netns is None else ["nsenter", f"--net={self.slot.netns}", "--"]
        prefix += ["setpriv", "--pdeathsig", "KILL", "--"] if self.slot.die_with_owner else []
        held = self.slot.limited()
        prefix += ["sh", "-c", HOLD, "sh"] if held else []
        fds = (*(listener.fileno() for listener in self._listeners), *extra_fds)
        try:
            with open(self.slot.directory / LOG, "wb") as log, small_pages():
                child = subprocess.Popen(
                    [*prefix, *command],
                    bufsize=0,
                    stdin=subprocess.PIPE if held else subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=fds,
                    cwd=self.slot.directory,
                    start_new_session=True,
                )
            self._process = ProcessHandle.of_child(child)
        except OSError as error:
            raise LaunchFailed(f"QEMU could not be started: {error}\ncommand: {shlex.join(command)}") from error
        with child.stdin or nullcontext():
            self.slot.admit(child.pid)
            if child.stdin is not None:
                with suppress(BrokenPipeError):  # it ended already, as the handshake will tell
                    child.stdin.write(b"\n")
        for listener in self._listeners:
            listener.close()

    async def handshake(self, ram: str, ram_size: int) -> QemuMachine:
        """Enter QMP's command mode: QEMU has made its machine. Raises LaunchFailed."""
        assert self._process is not None
        qmp_client, agent_client = self._clients
        qmp = Qmp(trio.SocketStream(trio.socket.from_stdlib_socket(qmp_client)))
        agent = trio.SocketStream(trio.socket.from_stdlib_socket(agent_client))
        machine = QemuMachine(self._process, qmp, agent, self.slot, ram, ram_size)
        with self.explained():
            await qmp.negotiate()
        return machine

    async def running(self, machine: QemuMachine) -> None:
        """Wait until incoming state is loaded and the guest runs. Raises LaunchFailed."""
        with self.explained():
            # Asked first: an event from before QMP's command mode, which a busy host enters late, is never sent.
            if (await machine._qmp.execute("query-status"))["status"] != "running":
                await machine._qmp.event("RESUME")

    def explained(self) -> _Explained:
        """Turn the loss of the control socket into a LaunchFailed that tells the whole story."""
        return _Explained(self)

    async def undo(self) -> None:
        """End the process, if there is one, and close what is open."""
        with trio.CancelScope(shield=True):
            if self._process is not None:
                self._process.kill()
                await self._process.wait()
        for sock in (*self._listeners, *self._clients):
            sock.close()

    def failure(self, error: EngineError) -> LaunchFailed:
        """The one error for a failed launch: exit code, command line, last words."""
        status = self._process.poll() if self._process is not None else None
        how = describe_exit(status) if status is not None else "gave up"
        words = last_words(self.slot.directory)
        return LaunchFailed(f"QEMU {how} at launch ({error.message}){words}\ncommand: {shlex.join(self.command)}")


class _Explained:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineError) and not isinstance(error, LaunchFailed):
            raise self._launch.failure(error) from error


async def connect(directory: Path, name: str) -> trio.SocketStream:
    """Connect to a socket QEMU listens on (used when a machine is adopted)."""
    client = _connect(directory, name)
    return trio.SocketStream(trio.socket.from_stdlib_socket(client))


def last_words(directory: Path) -> str:
    """The end of QEMU's own messages and of the guest's console, for an error's text."""
    words = ""
    for name, what in ((LOG, "QEMU said"), (CONSOLE, "console ended with")):
        try:
            text = (directory / name).read_bytes()[-TAIL:].decode(errors="replace")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if line.strip() and NOTICE not in line]
        if lines:
            words += f"\n{what}: " + "\n  ".join(lines)
    return words


def describe_exit(status: int | None) -> str:
    """How a process ended, in words; None means it was not our child to ask."""
    if status is None:
        return "ended"
    return f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"


def listen_and_connect(directory: Path, name: str) -> tuple[socket.socket, socket.socket]:
    """A listening socket in ``directory`` for QEMU, and our connection to it."""
    with _short_path(directory, name) as path:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(1)
            return listener, _connect(directory, name)
        except OSError:
            listener.close()
            raise


def _connect(directory: Path, name: str) -> socket.socket:
    with _short_path(directory, name) as path:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.setblocking(False)
            client.connect(path)
            return client
        except OSError:
            client.close()
            raise


@contextmanager
def _short_path(directory: Path, name: str) -> Iterator[str]:
    """Through /proc a socket's address stays short however deep the slot is."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
