"""The host's parser of the agent link, fuzzed for a while: 30 seconds in the suite, ten minutes with `make fuzz`.

Streams are made as an agent would make them and then damaged: bits, lengths, types; pieces lost, doubled or moved.
Each is fed in pieces of any size. A case is a number: the one that fails is named, and FORKD_FUZZ_CASE runs it alone.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import count

import pytest

from forkd.guestframes import (
    FROM_AGENT,
    MAX_FRAME,
    NONCE_SIZE,
    SYNC_MARK,
    Frame,
    FrameReader,
    FrameType,
    Inbox,
    decode_credit,
    decode_object,
    encode_frame,
)
from forkd.specs.errors import GuestProtocolError

SECONDS = float(os.environ.get("FORKD_FUZZ_SECONDS", "30"))
CASE = os.environ.get("FORKD_FUZZ_CASE")
NONCE = bytes(range(NONCE_SIZE))
MARK = SYNC_MARK + NONCE
WINDOW = 4096
HEADER = 9
PAYLOADS = (b"", b"{}", b'{"id":1,"ok":true}', b"\0\0\1\0", b"[" * 2000, b'{"a":' * 500, b"\xff\xfe", b'"\\ud800"')


def a_stream(chance: random.Random) -> bytes:
    kinds = sorted(FROM_AGENT)
    frames = [
        encode_frame(
            chance.choice(kinds),
            chance.choice((0, 1, 2, 2**32 - 1)),
            chance.choice(PAYLOADS) if chance.random() < 0.8 else chance.randbytes(chance.randrange(3000)),
        )
        for _ in range(chance.randrange(12))
    ]
    before = chance.choice((b"", MARK[:-1], SYNC_MARK, chance.randbytes(30)))
    return before + MARK + b"".join(frames)


def damaged(data: bytes, chance: random.Random) -> bytes:
    stream = bytearray(data)
    for _ in range(chance.randrange(5)):
        at, other = chance.randrange(len(stream) + 1), chance.randrange(len(stream) + 1)
        low, high = sorted((at, other))
        match chance.randrange(6):
            case 0 if stream:
                stream[at % len(stream)] ^= 1 << chance.randrange(8)
            case 1:
                stream[at : at + 4] = chance.choice((0, 1, MAX_FRAME, MAX_FRAME + 1, 2**31, 2**32 - 1)).to_bytes(4)
            case 2:
                del stream[low:high]
            case 3:
                stream[at:at] = stream[low : min(high, low + 500)]
            case 4:
                stream[at:at] = chance.randbytes(chance.randrange(40))
            case _:
                stream[at:at] = MARK
    return bytes(stream)


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = chance.choice((1, 7, 64, 1000, 65536))
        yield data[at : at + size]
        at += size


def parse(parts: Iterator[bytes]) -> tuple[list[Frame], str | None]:
    """The frames, and the error that ended them; checks what is held on the way."""
    reader, found = FrameReader(NONCE), []
    try:
        for part in parts:
            for frame in reader.feed(part):
                assert frame.type in FROM_AGENT and len(frame.payload) <= MAX_FRAME
                found.append(frame)
            assert len(reader._buffer) <= HEADER + MAX_FRAME
    except GuestProtocolError as error:
        return found, error.message
    return found, None


def one_case(number: int) -> int:
    chance = random.Random(number)
    data = damaged(a_stream(chance), chance)
    frames, error = parse(iter([data]))
    assert parse(pieces(data, chance)) == (frames, error)
    inbox = Inbox(WINDOW)
    for frame in frames:
        for decode in (decode_object, decode_credit):
            try:
                decode(frame.payload)
            except GuestProtocolError:
                continue
        if frame.type in (FrameType.OUT, FrameType.ERR):
            try:
                inbox.put(frame.type, frame.payload, drop=chance.random() < 0.1)
            except GuestProtocolError:
                break
            assert len(inbox._pieces) <= WINDOW + 5 * len(frames)
            if chance.random() < 0.5:
                inbox.take()
                inbox.credit_due()
    return len(frames)


def test_no_damage_to_the_agents_stream_gives_more_than_frames_or_a_named_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin = int(CASE) if CASE else random.SystemRandom().randrange(1 << 48)
    until = time.monotonic() + (0 if CASE else SECONDS)
    frames = 0
    for number in count(begin):
        try:
            frames += one_case(number)
        except Exception as error:
            raise AssertionError(f"FORKD_FUZZ_CASE={number} fails: {error!r}") from error
        if time.monotonic() >= until:
            break
    with capsys.disabled():
        print(f" [{number - begin + 1} damaged streams, {frames} frames]", end="")
