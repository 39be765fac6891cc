"""A QMP client: one JSON object a line over a stream, commands answered in order, events kept for who waits."""

from __future__ import annotations

import json
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
        async with self._lock:
            self._next_id += 1
            ident = self._next_id
            request: dict[str, Any] = {"execute": command, "id": ident}
            if arguments:
                request["arguments"] = {key.replace("_", "-"): value for key, value in arguments.items()}
            await self._send(json.dumps(request).encode() + b"\n")
            while True:
                message = await self._read()
                if message.get("id") == ident:
                    if "error" in message:
                        raise EngineError(f"QEMU refused {command}: {message['error'].get('desc')}")
                    return message.get("return")
                self._note(message)

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

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, OSError) as error:
            raise QmpClosed("the VMM closed its control socket") from error

    async def _read(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise EngineError("the VMM sent a control message without end")
            try:
                chunk = await self._stream.receive_some(65536)
            except (trio.BrokenResourceError, OSError) as error:
                raise QmpClosed("the VMM closed its control socket") from error
            if not chunk:
                raise QmpClosed("the VMM closed its control socket")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message: dict[str, Any] = json.loads(line)
        return message
