"""A QMP client: one JSON object a line over a stream, commands answered in order, events kept for who waits."""

from __future__ import annotations

import json
import socket
from array import array
from collections import deque
from typing import Any

import trio

from forkd.specs.errors import EngineError, MachineGone

MAX_LINE = 4 << 20


class QmpClosed(MachineGone):
    """The VMM closed its control socket: it has ended, or is about to."""

    code = "qmp_closed"


class Qmp:
    """Reads on demand, so a machine nobody talks to costs nothing. Commands are serialised by a lock."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._events: deque[str] = deque(maxlen=64)
        self._lock = trio.Lock()
        self._next_id = 0

    async def negotiate(self) -> None:
        """Take the greeting and enter command mode."""
        await self.execute("qmp_capabilities")

    async def execute(self, command: str, **arguments: Any) -> Any:
        """Run one command and return its answer; raises EngineError with QEMU's own words, or QmpClosed."""
        return await self.execute_all((command, {key.replace("_", "-"): value for key, value in arguments.items()}))

    async def execute_all(self, *commands: tuple[str, dict[str, Any]], descriptor: int | None = None) -> Any:
        """Run commands that go in one message, with a descriptor for the one that takes it; the last one's answer.

        All are run, also behind one that fails; raises as ``execute`` does, for the first that failed.
        """
        async with self._lock:
            first = self._next_id + 1
            self._next_id += len(commands)
            requests = [
                {"execute": name, "id": ident, **({"arguments": arguments} if arguments else {})}
                for ident, (name, arguments) in enumerate(commands, first)
            ]
            await self._send("".join(json.dumps(request) + "\n" for request in requests).encode(), descriptor)
            answers: list[dict[str, Any]] = []
            while len(answers) < len(commands):
                message = await self._read()
                if message.get("id") == first + len(answers):
                    answers.append(message)
                else:
                    self._note(message)
            for (name, _), answer in zip(commands, answers, strict=True):
                if "error" in answer:
                    raise EngineError(f"QEMU refused {name}: {answer['error'].get('desc')}")
            return answers[-1].get("return")

    async def event(self, *names: str) -> str:
        """Return the first event among ``names`` that came, or comes, since it was last asked for."""
        async with self._lock:
            while True:
                while self._events:
                    name = self._events.popleft()
                    if name in names:
                        return name
                self._note(await self._read())

    def forget_events(self) -> None:
        """Drop events that came before now."""
        self._events.clear()

    async def aclose(self) -> None:
        """Close the control socket; the VMM goes on."""
        await self._stream.aclose()

    def _note(self, message: dict[str, Any]) -> None:
        if name := message.get("event"):
            self._events.append(name)

    async def _send(self, data: bytes, descriptor: int | None = None) -> None:
        try:
            if descriptor is not None:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
                data = data[await self._stream.socket.sendmsg([data], [rights]) :]
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            raise QmpClosed("the VMM closed its control socket") from error

    async def _read(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise EngineError("the VMM sent a control message without end")
            try:
                chunk = await self._stream.receive_some(65536)
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
                raise QmpClosed("the VMM closed its control socket") from error
            if not chunk:
                raise QmpClosed("the VMM closed its control socket")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message: dict[str, Any] = json.loads(line)
        return message
