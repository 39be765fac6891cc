"""The unix sockets of a slot: where the guest knocks, and where Firecracker's API answers."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import trio

from forkd.plugins.engine_firecracker.requests import AGENT_PORT, VSOCK

DIAL_TIMEOUT = 5.0
REACH_TIMEOUT = 10.0
MAX_GREETING = 64
MAX_ADDRESS = 100


class UnixStream(trio.abc.Stream):
    """A connection that takes few turns of the scheduler: what fits into the socket is sent at once, and what is to be
    read is waited for before it is read. At a hundred starts at once such turns are most of what a start costs us.

    One task may send and one receive at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send; a checkpoint only if the socket is full."""
        rest = memoryview(data)
        await trio.lowlevel.checkpoint_if_cancelled()
        while rest:
            try:
                rest = rest[self._open().send(rest) :]
            except BlockingIOError:
                await self.wait_send_all_might_not_block()
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def wait_send_all_might_not_block(self) -> None:
        """Wait for room."""
        await trio.lowlevel.wait_writable(self._open())

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait, then read."""
        while True:
            await trio.lowlevel.wait_readable(self._open())
            try:
                return self._open().recv(max_bytes or 65536)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """Close it; who waits gets ClosedResourceError."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """As ``aclose``, at once."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    def _open(self) -> socket.socket:
        if self._socket.fileno() < 0:
            raise trio.ClosedResourceError
        return self._socket


class AgentStream(trio.abc.Stream):
    """The agent channel: the guest connects by itself, so whoever first uses the stream waits for it to come."""

    def __init__(self, listener: socket.socket, stream: UnixStream | None = None) -> None:
        self._listener = listener
        self._stream = stream
        self._lock = trio.Lock()
        self._closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, once the guest is there."""
        await (self._stream or await self._connected()).send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait for the guest, and for room."""
        await (self._stream or await self._connected()).wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Receive, once the guest is there."""
        return await (self._stream or await self._connected()).receive_some(max_bytes)

    async def aclose(self) -> None:
        """Close it; who waits for the guest gets ClosedResourceError."""
        self._closed = True
        if self._listener.fileno() >= 0:
            trio.lowlevel.notify_closing(self._listener)
            self._listener.close()
        if self._stream is not None:
            await self._stream.aclose()
        await trio.lowlevel.checkpoint()

    async def _connected(self) -> UnixStream:
        await take(self._lock)
        try:
            while self._stream is None:
                if self._closed:
                    raise trio.ClosedResourceError
                await trio.lowlevel.wait_readable(self._listener)
                try:
                    accepted, _ = self._listener.accept()
                except BlockingIOError:
                    continue  # it went away again
                except OSError as error:
                    raise trio.BrokenResourceError(str(error)) from error
                accepted.setblocking(False)
                self._stream = UnixStream(accepted)
                self._listener.close()  # one link a machine: a guest that connects again reaches nobody
            return self._stream
        finally:
            self._lock.release()


async def take(lock: trio.Lock) -> None:
    """Acquire a lock; one that is free costs no turn of the scheduler."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


def at_address(directory: Path, name: str, act: Callable[[str], None]) -> None:
    """Bind or connect by a path that fits into an address: through /proc it stays short however deep the slot is."""
    path = os.path.join(directory, name)
    if len(path) < MAX_ADDRESS:
        act(path)
        return
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)


def listen(directory: Path, name: str, uid: int | None) -> socket.socket:
    """Listen in ``directory`` under ``name``, for the user ``uid`` if that is another."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            at_address(directory, name, listener.bind)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            os.unlink(directory / name)  # an earlier owner's
            at_address(directory, name, listener.bind)
        listener.listen(1)
        if uid is not None:
            # The directory may be that user's: what has the name by now need not be our socket.
            os.chown(directory / name, uid, uid, follow_symlinks=False)
    except OSError:
        listener.close()
        raise
    return listener


async def dial_guest(root: Path) -> UnixStream | None:
    """Connect to a guest that has lost its host and waits on its own port; None if it does not (it will knock)."""
    try:
        stream = UnixStream(_connect(root, VSOCK))
    except ConnectionRefusedError:
        return None
    with trio.move_on_after(DIAL_TIMEOUT):
        try:
            await stream.send_all(f"CONNECT {AGENT_PORT}\n".encode())
            answer = b""
            while not answer.endswith(b"\n") and len(answer) < MAX_GREETING:
                if not (byte := await stream.receive_some(1)):
                    break
                answer += byte
            if answer.startswith(b"OK "):
                return stream
        except trio.BrokenResourceError:
            pass
    await trio.aclose_forcefully(stream)
    return None


async def reach(directory: Path, name: str, given_up: Callable[[], bool] = lambda: False) -> UnixStream:
    """Connect to a socket that is there: bound first, and listening an instant later.

    A file of a dead process refuses for ever: raises OSError then, once ``given_up`` says so or it has lasted long.
    """
    deadline = trio.current_time() + REACH_TIMEOUT
    while True:
        try:
            return UnixStream(_connect(directory, name))
        except (ConnectionRefusedError, BlockingIOError):
            if given_up() or trio.current_time() > deadline:
                raise
            await trio.sleep(0.0005)


def _connect(directory: Path, name: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        at_address(directory, name, client.connect)
        return client
    except BaseException:
        client.close()
        raise
