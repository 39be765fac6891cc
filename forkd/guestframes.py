"""The agent protocol's bytes without any I/O: frames, the sync mark, and a stream's bounded inbox."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from forkd.specs.errors import GuestProtocolError

PROTOCOL = 1
SYNC_MARK = b"FORKDSYN"
TOKEN_SIZE = NONCE_SIZE = 16
MAX_FRAME = 256 * 1024
MAX_RESPONSE = 8 * 1024 * 1024
MAX_VALUES = 700_000
"""Values a decoded object may have: as many as fit into the 1 MiB that an eval may answer."""
WINDOW = 256 * 1024
MAX_WINDOW = 1 << 31

_HEADER = struct.Struct(">IBI")
_CREDIT = struct.Struct(">I")
_PIECE = struct.Struct(">BI")


class FrameType(IntEnum):
    """What a frame is; see specs/formats/agent.md."""

    HELLO = 0
    REQUEST = 1
    RESPONSE = 2
    DATA_IN = 3
    OUT = 4
    ERR = 5
    CONTROL = 6
    CREDIT = 7
    CANCEL = 8
    NOOP = 9
    STARTED = 10
    MORE = 11


FROM_AGENT = frozenset(
    {
        FrameType.HELLO,
        FrameType.RESPONSE,
        FrameType.OUT,
        FrameType.ERR,
        FrameType.CREDIT,
        FrameType.NOOP,
        FrameType.STARTED,
        FrameType.MORE,
    }
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame from the agent."""

    type: FrameType
    stream: int
    payload: bytes


def encode_frame(kind: FrameType, stream: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), kind, stream) + payload


def encode_credit(stream: int, count: int) -> bytes:
    return encode_frame(FrameType.CREDIT, stream, _CREDIT.pack(count))


def decode_credit(payload: bytes) -> int:
    if len(payload) != _CREDIT.size:
        raise GuestProtocolError(f"the guest gave a credit of {len(payload)} bytes")
    count: int = _CREDIT.unpack(payload)[0]
    return count


def encode_object(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode_object(payload: bytes) -> dict[str, Any]:
    """A JSON object the guest sent; anything else is a GuestProtocolError."""
    if len(payload) > MAX_VALUES and _count_values(payload) > MAX_VALUES:
        raise GuestProtocolError(f"the guest sent an object of more than {MAX_VALUES} values")
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise GuestProtocolError(f"the guest sent what is no JSON object: {error}") from error


def _count_values(payload: bytes) -> int:
    """At least how many values JSON has, told by what stands outside of its strings: decoded, 3 bytes can take 60."""
    plain = payload.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = inside = 0
    for start in range(0, len(plain), MAX_FRAME):
        parts = plain[start : start + MAX_FRAME].split(b'"')
        outside = b"".join(parts[inside::2])
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        inside ^= (len(parts) - 1) & 1
    return count


class FrameReader:
    """Turns the agent's bytes into frames: drops all up to the sync mark with our nonce, then is strict.

    Holds at most one unfinished frame beside the bytes it was just fed.
    """

    def __init__(self, nonce: bytes) -> None:
        self._mark = SYNC_MARK + nonce
        self._buffer = bytearray()
        self._synced = False

    def feed(self, data: bytes | bytearray) -> Iterator[Frame]:
        """Yield the frames that are complete now; raises GuestProtocolError where the bytes break the rules."""
        self._buffer += data
        if not self._synced and not self._find_mark():
            return
        while len(self._buffer) >= _HEADER.size:
            length, kind, stream = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise GuestProtocolError(f"the guest sent a frame of {length} bytes")
            if kind not in FROM_AGENT:
                raise GuestProtocolError(f"the guest sent a frame of type {kind}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Frame(FrameType(kind), stream, payload)

    def _find_mark(self) -> bool:
        at = self._buffer.find(self._mark)
        if at < 0:
            del self._buffer[: -(len(self._mark) - 1)]
            return False
        del self._buffer[: at + len(self._mark)]
        self._synced = True
        return True


class Inbox:
    """Output of a stream that nobody has taken yet: never more bytes than were granted, nor many more to hold them.

    Pieces are kept in one buffer, five bytes of header each, so that a guest that sends them singly cannot multiply
    what they cost.
    """

    def __init__(self, window: int) -> None:
        self._granted = window
        self._step = max(1, window // 4)
        self._taken = 0
        self._pieces = bytearray()
        self._ended = False

    def put(self, kind: FrameType, data: bytes, *, drop: bool) -> None:
        """Count a piece against the window and keep it (unless ``drop``). Raises GuestProtocolError beyond it."""
        if self._ended:
            raise GuestProtocolError("the guest sent output after its end")
        self._ended = not data
        if len(data) > self._granted:
            raise GuestProtocolError(f"the guest sent {len(data) - self._granted} bytes more than were granted")
        self._granted -= len(data)
        if not drop:
            self._pieces += _PIECE.pack(kind, len(data))
            self._pieces += data

    def take(self) -> tuple[FrameType, bytes] | None:
        """The next piece, or None if there is none now."""
        if not self._pieces:
            return None
        kind, size = _PIECE.unpack_from(self._pieces)
        end = _PIECE.size + size
        data = bytes(self._pieces[_PIECE.size : end])
        del self._pieces[:end]
        self._taken += size
        return FrameType(kind), data

    def credit_due(self) -> int:
        """How many bytes to grant anew; 0 while it is not worth a frame."""
        if self._taken < self._step:
            return 0
        count, self._taken = self._taken, 0
        self._granted += count
        return count

    def clear(self) -> None:
        self._pieces.clear()

    def __bool__(self) -> bool:
        return bool(self._pieces)
