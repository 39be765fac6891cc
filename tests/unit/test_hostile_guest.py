"""A hostile guest on the agent link: whatever it sends, the parser gives frames or a named error, and holds little."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.guestframes import (
    FROM_AGENT,
    MAX_FRAME,
    MAX_RESPONSE,
    NONCE_SIZE,
    SYNC_MARK,
    FrameReader,
    FrameType,
    Inbox,
    decode_credit,
    decode_object,
    encode_frame,
    encode_object,
)
from forkd.guestlink import GuestLink, ResumeInfo
from forkd.specs.errors import GuestError, GuestProtocolError, GuestUnreachable
from tests.unit.guest_support import FakeGuest

NONCE = bytes(range(NONCE_SIZE))
MARK = SYNC_MARK + NONCE
frames = st.builds(
    encode_frame, st.sampled_from(sorted(FROM_AGENT)), st.integers(0, 2**32 - 1), st.binary(max_size=200)
)
noise = st.lists(st.one_of(frames, st.binary(max_size=40), st.just(MARK), st.just(b"\xff" * 9)), max_size=12)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@settings(max_examples=400, deadline=None)
@given(noise, st.lists(st.integers(0, 10_000), max_size=8))
def test_any_bytes_in_any_pieces_are_frames_or_a_named_error_and_little_is_held(
    parts: list[bytes], cuts: list[int]
) -> None:
    reader = FrameReader(NONCE)
    try:
        for piece in pieces(b"".join(parts), cuts):
            for frame in reader.feed(piece):
                assert frame.type in FROM_AGENT and len(frame.payload) <= MAX_FRAME
            assert len(reader._buffer) <= 9 + MAX_FRAME
    except GuestProtocolError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100), st.lists(frames, max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
def test_good_frames_are_the_same_however_they_are_cut(before: bytes, good: list[bytes], cuts: list[int]) -> None:
    whole = list(FrameReader(NONCE).feed(before + MARK + b"".join(good)))
    reader = FrameReader(NONCE)
    cut = [frame for piece in pieces(before + MARK + b"".join(good), cuts) for frame in reader.feed(piece)]
    assert cut == whole
    if MARK not in before + MARK[:-1]:
        assert len(whole) == len(good)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.binary(max_size=300), st.recursive(st.just(b"[]"), lambda inner: inner.map(lambda b: b"[" + b + b"]")))
)
def test_objects_and_credits_are_decoded_or_refused(payload: bytes) -> None:
    for decode in (decode_object, decode_credit):
        try:
            decode(payload)  # type: ignore[operator]
        except GuestProtocolError:
            continue


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    with pytest.raises(GuestProtocolError):
        decode_object(b'{"a":' * 100_000)


@pytest.mark.parametrize("value", [b"[]", b"{}", b'{"a":1}', b"1", b'""', b'"\\\\"'])
def test_an_answer_of_small_values_cannot_multiply_what_it_costs(value: bytes) -> None:
    room = MAX_RESPONSE - 20
    bomb = b'{"a":[' + (value + b",") * (room // (len(value) + 1)) + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(GuestProtocolError, match="values"):
            decode_object(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_RESPONSE
    finally:
        tracemalloc.stop()


def test_a_text_of_any_marks_is_one_value_and_what_an_eval_may_answer_is_decoded() -> None:
    for text in ("[" * 3_000_000, '"[' * 1_000_000, "\\,{" * 1_000_000, "\\" * 3_000_000):
        assert decode_object(json.dumps({"stdout": text, "ok": True}).encode())["stdout"] == text
    values: list[list[object]] = [[]] * (2**20 // 3)
    assert decode_object(encode_object({"result_json": values})) == {"result_json": values}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([FrameType.OUT, FrameType.ERR]), st.binary(max_size=64)), max_size=40))
def test_an_inbox_never_holds_more_than_was_granted(sent: list[tuple[FrameType, bytes]]) -> None:
    inbox = Inbox(256)
    try:
        for kind, data in sent:
            inbox.put(kind, data, drop=False)
            assert len(inbox._pieces) <= 256 + 5 * len(sent)
    except GuestProtocolError:
        return


BAD: list[tuple[str, Callable[[], bytes]]] = [
    ("a huge frame", lambda: struct.pack(">IBI", 1 << 31, FrameType.OUT, 1)),
    ("an unknown type", lambda: struct.pack(">IBI", 0, 99, 1)),
    ("a stream nobody opened", lambda: encode_frame(FrameType.OUT, 4711, b"x")),
    ("a hello that is no object", lambda: encode_frame(FrameType.HELLO, 0, b"[1")),
    ("credit of three bytes", lambda: encode_frame(FrameType.CREDIT, 1, b"abc")),
]


@pytest.mark.parametrize(("what", "make"), BAD, ids=[what for what, _ in BAD])
async def test_a_guest_that_breaks_the_rules_loses_its_link_with_a_named_error(
    what: str, make: Callable[[], bytes], autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        link = await GuestLink.open(ours, bytes(16), nursery, resume=ResumeInfo.fresh("sb-1"))
        greeting = await theirs.receive_some(4096)
        await theirs.send_all(SYNC_MARK + greeting[16:32] + make())
        with trio.fail_after(60), pytest.raises(GuestError) as caught:
            await link.ready()
        assert isinstance(caught.value, GuestProtocolError | GuestUnreachable), caught.value
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "frame",
    [
        (FrameType.NOOP, 7, b""),
        (FrameType.CREDIT, 2, bytes(4)),
        (FrameType.CREDIT, 2, b"\0\0\0\1"),
        (FrameType.MORE, 2, b""),
        (FrameType.MORE, 2, b"{"),
    ],
    ids=["nothing", "no credit", "little credit", "no answer", "little answer"],
)
async def test_a_guest_that_says_nothing_without_end_loses_its_link(frame: tuple[FrameType, int, bytes]) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        link = await GuestLink.open(ours, bytes(16), nursery, resume=ResumeInfo())
        guest = FakeGuest(theirs)
        await guest.greet()
        await guest.send(FrameType.RESPONSE, 1, {"ok": True})
        await link.ready()
        async with link.open_stream({"op": "ping"}):
            await theirs.send_all(encode_frame(*frame) * 1000)
            await trio.testing.wait_all_tasks_blocked()
            assert link.reason is None
            await theirs.send_all(encode_frame(*frame) * 30_000)
            await link.closed.wait()
        assert isinstance(link.reason, GuestProtocolError) and "say nothing" in link.reason.message
        nursery.cancel_scope.cancel()


async def test_answers_that_come_too_late_are_not_kept() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    piece = b" " * MAX_FRAME
    async with trio.open_nursery() as nursery:
        link = await GuestLink.open(ours, bytes(16), nursery, resume=ResumeInfo())
        guest = FakeGuest(theirs)
        await guest.greet()
        await guest.send(FrameType.RESPONSE, 1, {"ok": True})
        await link.ready()
        tracemalloc.start()
        try:
            for number in range(20):
                async with link.open_stream({"op": "ping"}):
                    await guest.send(FrameType.MORE, number + 2, piece)
                    await trio.testing.wait_all_tasks_blocked()
                for _ in range(20):
                    await guest.send(FrameType.MORE, number + 2, piece)
                await trio.testing.wait_all_tasks_blocked()
            assert tracemalloc.get_traced_memory()[0] < 8 * MAX_FRAME
        finally:
            tracemalloc.stop()
        await guest.send(FrameType.RESPONSE, 2, b"whatever")
        await trio.testing.wait_all_tasks_blocked()
        assert link.reason is None
        for _ in range(20):
            await guest.send(FrameType.MORE, 3, piece)
        await link.closed.wait()
        assert link.reason is not None and "more than" in link.reason.message
        nursery.cancel_scope.cancel()


async def test_a_guest_that_sends_noise_for_ever_never_gets_ready_and_is_not_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        link = await GuestLink.open(ours, bytes(16), nursery, resume=ResumeInfo.fresh("sb-1"))

        async def shout() -> None:
            for _ in range(200):
                await theirs.send_all(b"\xaa" * 65536)

        nursery.start_soon(shout)
        with trio.move_on_after(30) as scope:
            await link.ready()
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
