"""One Firecracker process: started, controlled over its API, ended for certain."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from pathlib import Path
from typing import IO

import trio

from forkd.linux.command import end_guard, guard_group
from forkd.linux.inotify import FileWaiter
from forkd.linux.mapping import find_ram
from forkd.linux.process import ProcessHandle
from forkd.plugins.engine_firecracker.api import Api, ApiClosed, ApiRefused
from forkd.plugins.engine_firecracker.requests import AGENT_PORT, VSOCK, Request, save_request, state_request
from forkd.plugins.engine_firecracker.sockets import AgentStream, listen, reach
from forkd.specs.engine import RamRegion, Slot
from forkd.specs.errors import Conflict, EngineError, LaunchFailed, MachineGone

API_SOCKET = "api.sock"
LOG = "vmm.log"
CONSOLE = "console.log"
TAIL = 2000
SAVE_TIMEOUT = 60.0
SOCKET_TIMEOUT = 60.0
LAST_BREATH = 2.0
STATE = "devices"
MAX_STATE = 64 << 20
MAGIC = 0x0710_1984_8664_0000.to_bytes(8, "little")
"""How device state of an x86_64 Firecracker begins."""


class FirecrackerMachine:
    """A running Firecracker. Its working directory is its slot, by which ``forkd cleanup`` finds it if all is lost."""

    def __init__(
        self,
        process: ProcessHandle,
        api: Api,
        agent: trio.abc.Stream,
        root: Path,
        ram: str | None,
        size: int | None,
        guard: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._process = process
        self._api = api
        self._agent = agent
        self._root = root
        self._ram = ram
        self._size = size
        self._guard = guard

    @property
    def pid(self) -> int:
        """Firecracker's process id."""
        return self._process.pid

    @property
    def agent(self) -> trio.abc.Stream:
        """The host end of the guest's vsock connection."""
        return self._agent

    async def pause(self) -> None:
        """Stop the virtual CPUs."""
        await self._send(state_request(paused=True))

    async def resume(self) -> None:
        """Let them run."""
        await self._send(state_request(paused=False))

    async def save_devices(self) -> bytes:
        """Device state alone: Firecracker writes it before it opens the memory file, which here it cannot use.

        Where a version does it otherwise, all of memory goes to a file that is thrown away (decisions/0003).
        """
        staged = self._root / STATE
        try:
            try:
                await self._send(save_request(STATE), SAVE_TIMEOUT)
            except ApiRefused as error:
                if "memory" not in error.message.lower():
                    raise
            if not _is_state(staged):
                await self._save_with_memory(STATE)
            return _read_state(staged)
        finally:
            staged.unlink(missing_ok=True)

    async def _save_with_memory(self, name: str) -> None:
        memory = self._root / "discarded.mem"
        try:
            await self._send(save_request(name, memory.name), SAVE_TIMEOUT)
        finally:
            memory.unlink(missing_ok=True)
        if not _is_state(self._root / name):
            raise EngineError("Firecracker wrote no device state that is understood")

    @property
    def log(self) -> Path:
        """Firecracker's own messages."""
        return self._root / LOG

    async def console(self) -> bytes:
        """Nothing: Firecracker has no console with a bound."""
        raise Conflict("Firecracker keeps no console of a restored machine", hint="run dmesg in the sandbox")

    def ram(self) -> list[RamRegion]:
        """Guest RAM: a private mapping of the image, or, after a boot, the one mapping of its size."""
        try:
            return [RamRegion(*region) for region in find_ram(self.pid, self._ram, self._size)]
        except OSError as error:
            raise MachineGone(f"VMM {self.pid} has no RAM mapping to read: {error}") from error

    async def wait(self) -> str:
        """Wait for Firecracker's end."""
        status = await self._process.wait()
        return f"Firecracker {self.pid} {describe_exit(status)}{last_words(self._root)}"

    async def kill(self) -> None:
        """SIGKILL, then wait until the kernel says it is gone."""
        with trio.CancelScope(shield=True):
            self._process.kill()
            await self._process.wait()
            if self._guard is not None:
                end_guard(self._guard)
                self._guard = None
            await self._api.aclose()
            await self._agent.aclose()

    async def _send(self, request: Request, timeout: float = 30.0) -> None:
        try:
            await send(self._api, request, timeout)
        except ApiClosed as error:
            raise MachineGone(f"Firecracker {self.pid} is gone{last_words(self._root)}") from error


class Launch:
    """Phases: ``prepare`` the agent's socket, ``start`` the process, ``connect`` to its API; ``undo`` at any point."""

    def __init__(self, slot: Slot, root: Path, waiter: FileWaiter) -> None:
        self.slot = slot
        self._waiter = waiter
        self.root = root
        self.command: list[str] = []
        self._process: ProcessHandle | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._api: Api | None = None

    def prepare(self, uid: int | None) -> None:
        """Listen where the guest will knock."""
        self._listener = listen(self.root, f"{VSOCK}_{AGENT_PORT}", uid)

    def start(self, command: list[str], *, keep_console: bool, guarded: bool = False) -> None:
        """Run Firecracker in its slot; a booting guest's console is kept, a restored one's is not (it has no bound).

        ``guarded``: it is ended if we die, by a process that watches us, as no death signal would survive the jailer.
        """
        self.command = command
        try:
            with _new_file(self.root, LOG) as log, _new_file(self.root, CONSOLE if keep_console else os.devnull) as out:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    cwd=self.root,
                    start_new_session=True,
                )
            self._process = ProcessHandle.of_child(child)
            if guarded:
                self._guard = guard_group(child.pid)
        except OSError as error:
            raise LaunchFailed(f"Firecracker could not be started: {error}\ncommand: {shlex.join(command)}") from error
        self.slot.admit(child.pid)

    async def connect(self) -> Api:
        """Reach the API as soon as its socket is there. Raises LaunchFailed if the process ends before."""
        process = self._process
        assert process is not None
        with trio.move_on_after(SOCKET_TIMEOUT) as patience:
            try:
                if not await self._waiter.wait(self.root, API_SOCKET, process.fileno()):
                    raise self.failure("it ended before its API was there")
                self._api = Api(await reach(self.root, API_SOCKET, lambda: process.poll() is not None))
            except OSError as error:
                raise self.failure(f"its API cannot be reached: {error}") from error
        if self._api is None:
            assert patience.cancelled_caught
            raise self.failure(f"its API was not there within {SOCKET_TIMEOUT:g} s")
        return self._api

    async def configure(self, requests: list[Request]) -> None:
        """Send requests in order. Raises LaunchFailed that tells the whole story."""
        assert self._api is not None
        for request in requests:
            try:
                await send(self._api, request, SAVE_TIMEOUT)
            except EngineError as error:
                if isinstance(error, ApiClosed) and self._process is not None:
                    with trio.move_on_after(LAST_BREATH):  # a process that closes its socket is about to say why
                        await self._process.wait()
                raise self.failure(error.message) from error

    def machine(self, ram: str | None, size: int) -> FirecrackerMachine:
        """What the launch made."""
        assert self._process is not None and self._api is not None and self._listener is not None
        agent = AgentStream(self._listener)
        return FirecrackerMachine(self._process, self._api, agent, self.root, ram, size, self._guard)

    async def undo(self) -> None:
        """End the process, if there is one, and close what is open."""
        with trio.CancelScope(shield=True):
            if self._process is not None:
                self._process.kill()
                await self._process.wait()
            if self._guard is not None:
                end_guard(self._guard)
                self._guard = None
            if self._api is not None:
                await self._api.aclose()
        if self._listener is not None:
            self._listener.close()

    def failure(self, why: str) -> LaunchFailed:
        """The one error for a failed launch: exit code, command line, last words."""
        status = self._process.poll() if self._process is not None else None
        how = describe_exit(status) if status is not None else "gave up"
        return LaunchFailed(
            f"Firecracker {how} at launch ({why}){last_words(self.root)}\ncommand: {shlex.join(self.command)}"
        )


async def send(api: Api, request: Request, timeout: float) -> None:
    """Send one request of the table."""
    method, path, body = request
    await (api.put if method == "PUT" else api.patch)(path, body, timeout)


def last_words(root: Path) -> str:
    """The end of Firecracker's own messages and of the guest's console, for an error's text."""
    words = ""
    for name, what in ((LOG, "Firecracker said"), (CONSOLE, "console ended with")):
        try:
            text = _tail(root / name).decode(errors="replace")
        except OSError:
            continue
        if lines := [line for line in text.splitlines() if line.strip()]:
            words += f"\n{what}: " + "\n  ".join(lines)
    return words


def describe_exit(status: int | None) -> str:
    """How a process ended, in words; None means it was not our child to ask."""
    if status is None:
        return "ended"
    return f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"


def _new_file(directory: Path, name: str) -> IO[bytes]:
    return open(os.path.join(directory, name), "wb", buffering=0)


def _open_theirs(path: Path) -> IO[bytes]:
    """Open a file where Firecracker may write, in its jail at least: a link put there would lead anywhere."""
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _tail(path: Path) -> bytes:
    with _open_theirs(path) as source:
        source.seek(max(0, os.fstat(source.fileno()).st_size - TAIL))
        return source.read(TAIL)


def _read_state(path: Path) -> bytes:
    with _open_theirs(path) as source:
        state = source.read(MAX_STATE + 1)
    if len(state) > MAX_STATE:
        raise EngineError(f"Firecracker wrote more than {MAX_STATE >> 20} MiB of device state")
    return state


def _is_state(path: Path) -> bool:
    try:
        with _open_theirs(path) as source:
            return source.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
