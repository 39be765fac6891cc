"""Helpers to talk to the real agent over a socket pair, and to play a guest's part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import trio

from forkd.guestframes import SYNC_MARK, FrameType, encode_frame, encode_object
from forkd.guestlink import GuestLink, ResumeInfo, fresh_identity

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "guest" / "agent.py"
SCHEMA = json.loads((ROOT / "specs/schemas/agent.json").read_text())


def check_shape(message: object, name: str) -> None:
    """Fail unless ``message`` has the shape the schema gives ``name``."""
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}).validate(message)


class AgentProcess:
    """A running agent that changes nothing of this machine; any number of sessions, one after the other."""

    def __init__(self, process: subprocess.Popen[bytes], host: socket.socket, sync: bytes) -> None:
        self.process = process
        self.host = host
        self.sync = sync

    def stream(self) -> trio.SocketStream:
        """The host's end, on a descriptor of its own: closing it does not end the agent."""
        return trio.SocketStream(trio.socket.from_stdlib_socket(self.host.dup()))

    @asynccontextmanager
    async def link(self, resume: ResumeInfo | None = None, *, locked: bool = False) -> AsyncIterator[GuestLink]:
        """A fresh session."""
        async with trio.open_nursery() as nursery:
            identity = None if locked else resume or fresh_identity("box")
            link = await GuestLink.open(self.stream(), self.sync, nursery, resume=identity)
            yield link
            await link.aclose()


@contextmanager
def running_agent(
    recipe: Path | None = None,
    env: Mapping[str, str] | None = None,
    umask: int = 0o022,
    image: Path | None = None,
) -> Iterator[AgentProcess]:
    host, guest = socket.socketpair()
    sync = os.urandom(16)
    command = [sys.executable, "-I", "-S", str(AGENT), "--fd", str(guest.fileno()), "--sync", sync.hex()]
    command += ["--no-host-effects", "--recipe", str(recipe or "/nonexistent")]
    command += ["--image", str(image or "/nonexistent")]
    process = subprocess.Popen(command, pass_fds=[guest.fileno()], env=dict(os.environ, **(env or {})))
    guest.close()
    try:
        with host:
            yield AgentProcess(process, host, sync)
            host.shutdown(socket.SHUT_RDWR)  # whatever descriptors of it sessions may still have
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class FakeGuest:
    """The guest's end of a link, byte by byte."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.received = bytearray()

    async def read(self, size: int) -> bytes:
        while len(self.received) < size:
            data = await self.stream.receive_some(65536)
            if not data:
                raise EOFError
            self.received += data
        data = bytes(self.received[:size])
        del self.received[:size]
        return data

    async def frame(self) -> tuple[int, int, bytes]:
        """The next frame of the host."""
        header = await self.read(9)
        return header[4], int.from_bytes(header[5:], "big"), await self.read(int.from_bytes(header[:4], "big"))

    async def sync(self) -> bytes:
        """Read token and nonce; returns the nonce."""
        return (await self.read(32))[16:]

    async def send(self, kind: FrameType, stream: int, payload: bytes | dict[str, Any] = b"") -> None:
        data = payload if isinstance(payload, bytes) else encode_object(payload)
        await self.stream.send_all(encode_frame(kind, stream, data))

    async def greet(self, **changes: Any) -> None:
        nonce = await self.sync()
        await self.stream.send_all(SYNC_MARK + nonce)
        await self.send(FrameType.HELLO, 0, hello(nonce) | changes)


def hello(nonce: bytes) -> dict[str, Any]:
    return {
        "nonce": nonce.hex(),
        "protocol": 1,
        "agent": "0",
        "python": "3",
        "numpy": "not-installed",
        "pid": 1,
        "lang": "python",
        "locked": True,
    }
