"""A client for Firecracker's API: HTTP/1.1 on a unix socket, one request at a time, one connection for all."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import trio

from forkd.plugins.engine_firecracker.sockets import take
from forkd.specs.errors import EngineError, MachineGone

MAX_ANSWER = 1 << 20
TIMEOUT = 30.0
STATUS = re.compile(rb"HTTP/1\.\d (\d{3})(?!\d)")
LENGTH = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*([^\r]*?)[ \t]*(?=\r|\Z)", re.IGNORECASE)
SIZE = re.compile(rb"[0-9]{1,9}")


class ApiClosed(MachineGone):
    """Firecracker closed its API socket: it has ended, or is about to."""

    code = "api_closed"


class ApiRefused(EngineError):
    """Firecracker answered a request with an error."""

    code = "api_refused"


class Api:
    """Requests are serialised by a lock; a cancelled one closes the connection, as its answer would be another's."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._lock = trio.Lock()
        self._buffer = bytearray()

    async def put(self, path: str, body: dict[str, Any], timeout: float = TIMEOUT) -> None:
        """Configure or do something. Raises ApiRefused with Firecracker's own words, ApiClosed, EngineError."""
        await self._request("PUT", path, body, timeout)

    async def patch(self, path: str, body: dict[str, Any], timeout: float = TIMEOUT) -> None:
        """Change something; raises as ``put`` does."""
        await self._request("PATCH", path, body, timeout)

    async def aclose(self) -> None:
        """Close the connection; Firecracker goes on."""
        await self._stream.aclose()

    async def _request(self, method: str, path: str, body: dict[str, Any], timeout: float) -> None:
        payload = msgspec.json.encode(body)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        await take(self._lock)
        try:
            answer = await self._exchange(head.encode() + payload, timeout)
        finally:
            self._lock.release()
        if answer is None:
            raise EngineError(f"Firecracker did not answer {method} {path} within {timeout:g} s")
        status, text = answer
        if not 200 <= status < 300:
            raise ApiRefused(f"Firecracker refused {method} {path}: {_fault(text)}", http=status)

    async def _exchange(self, request: bytes, timeout: float) -> tuple[int, bytes] | None:
        """Send and take the answer; None, and the connection is closed, if it does not come in time."""
        answer = None
        try:
            with trio.move_on_after(timeout):
                await self._send(request)
                answer = await self._answer()
        finally:
            if answer is None:
                await trio.aclose_forcefully(self._stream)
        return answer

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ApiClosed("Firecracker closed its API socket") from error

    async def _answer(self) -> tuple[int, bytes]:
        """Status and body; answers of class 1xx are passed over."""
        while True:
            while (end := self._buffer.find(b"\r\n\r\n")) < 0:
                await self._more()
            head = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            if (status := STATUS.match(head)) is None:
                raise EngineError(f"Firecracker answered {head[:80]!r}, which is not HTTP")
            size = _size(head)
            while len(self._buffer) < size:
                await self._more()
            body = bytes(self._buffer[:size])
            del self._buffer[:size]
            if int(status[1]) >= 200:
                return int(status[1]), body

    async def _more(self) -> None:
        if len(self._buffer) > MAX_ANSWER:
            raise EngineError("Firecracker sent an answer without end")
        try:
            chunk = await self._stream.receive_some(65536)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ApiClosed("Firecracker closed its API socket") from error
        if not chunk:
            raise ApiClosed("Firecracker closed its API socket")
        self._buffer += chunk


def _size(head: bytes) -> int:
    """How many bytes follow an answer's head."""
    length = LENGTH.search(head)
    if length is None:
        return 0
    if not SIZE.fullmatch(length[1]) or int(length[1]) > MAX_ANSWER:
        raise EngineError(f"Firecracker announced an answer of {length[1][:40].decode('latin-1')!r} bytes")
    return int(length[1])


def _fault(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["fault_message"])[:2000]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace") or "no reason given"
