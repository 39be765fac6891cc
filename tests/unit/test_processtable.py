"""Buffers of output: bounded, resumable, lossless for those who listen."""

from __future__ import annotations

import tracemalloc

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.processtable import ATTACH_SECS, MAX_ENDED, Output, Process, ProcessTable


async def test_without_listeners_the_oldest_goes_and_it_is_counted() -> None:
    output = Output(limit=10)
    for data in (b"aaaa", b"bbbb", b"cccc"):
        await output.put("stdout", data)
    assert (output.begin, output.end) == (4, 12)
    assert output.kept() == [("stdout", b"bbbb"), ("stdout", b"cccc")]
    output.close()
    with output.listen(1) as late:
        assert late.lost == 3
        assert [data async for _, data in late] == [b"bbbb", b"cccc"]
    with output.listen(6) as middle:
        assert middle.lost == 0
        assert [data async for _, data in middle] == [b"bb", b"cccc"]
    with output.listen(999) as beyond:
        assert [data async for _, data in beyond] == []


async def test_a_slow_listener_holds_the_writer_up_and_a_leaving_one_lets_it_go(autojump_clock: object) -> None:
    output = Output(limit=10)
    async with trio.open_nursery() as nursery:
        with output.listen() as slow:
            await output.put("stdout", b"12345678")
            nursery.start_soon(output.put, "stderr", b"abcdefgh")
            await trio.sleep(1)
            assert output.end == 8
            assert await anext(slow) == ("stdout", b"12345678")
            await trio.sleep(1)
            assert output.end == 16
            nursery.start_soon(output.put, "stdout", b"xxxxxxxx")
            await trio.sleep(1)
            assert output.end == 16
    assert output.end == 24


async def test_a_listener_that_was_promised_loses_nothing_and_one_that_never_comes_is_not_waited_for_for_ever(
    autojump_clock: object,
) -> None:
    output, abandoned = Output(limit=10, attach=True), Output(limit=10, attach=True)
    async with trio.open_nursery() as nursery:
        for each in (output, abandoned):
            await each.put("stdout", b"12345678")
            nursery.start_soon(each.put, "stdout", b"abcdefgh")
        await trio.sleep(ATTACH_SECS - 1)
        with output.listen() as listener:
            assert listener.lost == 0
            assert await anext(listener) == ("stdout", b"12345678")
            assert await anext(listener) == ("stdout", b"abcdefgh")
        assert abandoned.end == 8
        await trio.sleep(2)
        assert (abandoned.begin, abandoned.end) == (8, 16)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=12), max_size=30),
    st.integers(0, 80),
    st.one_of(st.integers(1, 40), st.integers(64, 64 * 40)),
)
def test_a_listener_gets_every_byte_from_its_position_on(pieces: list[bytes], position: int, limit: int) -> None:
    async def main() -> None:
        output, heard = Output(limit), b""
        whole = b"".join(pieces)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                with output.listen() as listener:

                    async def write() -> None:
                        for piece in pieces:
                            await output.put("stdout" if piece[0] % 3 else "stderr", piece)
                            if piece[-1] % 2:
                                await trio.lowlevel.checkpoint()
                        output.close()

                    nursery.start_soon(write)
                    async for _, data in listener:
                        heard += data
                        assert output.end - output.begin <= max(limit, 12)
            assert heard == whole
            with output.listen(position) as again:
                rest = b"".join([data async for _, data in again])
                assert rest == whole[max(position, output.begin) :]

    trio.run(main)


async def test_the_table_forgets_the_oldest_that_ended() -> None:
    table = ProcessTable()
    for pid in range(1, MAX_ENDED + 11):
        table.add(Process(["true"], pid=pid, answer={"exit_code": 0} if pid != 3 else None))
    assert table.find("3") is not None
    assert table.find("1") is None
    assert sum(not process.running for process in table) == MAX_ENDED
    newest = Process(["x"], tag="job", pid=900)
    table.add(Process(["x"], tag="job", pid=800))
    table.add(newest)
    assert table.find("job") is newest


async def test_small_pieces_cost_not_much_more_than_what_they_hold() -> None:
    limit = 64 * 1024
    output = Output(limit)
    tracemalloc.start()
    try:
        for number in range(limit // 2):
            await output.put("stdout", b"%d" % number)
        one = tracemalloc.get_traced_memory()[0]
        for number in range(limit // 2):  # the worst a guest can do
            await output.put(("stdout", "stderr")[number % 2], b"%d" % number)
        mixed = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert max(one, mixed) < 12 * limit


async def test_what_is_kept_is_given_from_a_position_on() -> None:
    output = Output(limit=10)
    for data in (b"aaaa", b"bbbb", b"cccc"):
        await output.put("stdout", data)
    assert output.kept(6) == [("stdout", b"bb"), ("stdout", b"cccc")]
    assert output.kept(8) == [("stdout", b"cccc")]
    assert output.kept(12) == output.kept(99) == []


async def test_a_process_is_found_by_pid_and_by_tag_whatever_digits_they_are() -> None:
    table = ProcessTable()
    table.add(Process(["a"], tag="2026", pid=7))
    assert table.find("7") is table.find("2026")
    assert table.find("9" * 5000) is None
