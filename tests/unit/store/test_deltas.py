"""The delta format: what was written is read again, what was altered is refused, layers add up to the image."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.linux.mapping import address_of
from forkd.linux.sparse import PAGE, physical_bytes
from forkd.specs.errors import SnapshotBroken
from forkd.store.deltas import DATA, MAX_RUNS, ZERO, Delta, DeltaInfo, DeltaWriter, apply, materialise, pack_header
from forkd.store.digests import delta256_file

RAM = 24  # pages, of every machine here
HEADER = struct.Struct("<8sII5Q32s")
RUN = struct.Struct("<QII")
QUICK = settings(max_examples=60, deadline=None)

# For each page of RAM: as it was (None), become zero (0), or filled with a byte.
PAGES = st.lists(st.one_of(st.none(), st.integers(0, 255)), min_size=RAM, max_size=RAM)


def page(value: int) -> bytes:
    return bytes([value]) * PAGE


def write(path: Path, pages: list[int | None]) -> DeltaInfo:
    with open(path, "xb", buffering=0) as out:
        writer = DeltaWriter(out.fileno(), len(pages))
        for number, value in enumerate(pages):
            if value == 0:
                writer.add_zero(number, 1)
            elif value is not None:
                writer.add_data(number, page(value))
        return writer.finish()


def image(pages: list[int | None]) -> bytes:
    return b"".join(page(value or 0) for value in pages)


def laid_over(content: bytes, pages: list[int | None]) -> bytes:
    old = [content[start : start + PAGE] for start in range(0, len(content), PAGE)]
    return b"".join(before if value is None else page(value) for before, value in zip(old, pages, strict=True))


@contextmanager
def directory() -> Iterator[Path]:
    """One for each example; a fixture would be shared by all of a test."""
    with TemporaryDirectory() as made:
        yield Path(made)


def refused(path: Path, content: bytes) -> str:
    """Why this content is no delta; anything but SnapshotBroken fails the test."""
    path.write_bytes(content)
    with pytest.raises(SnapshotBroken) as caught:
        Delta(path)
    return caught.value.message


def built(runs: list[tuple[int, int, int]], data: int, zero: int, ram: int = RAM) -> bytes:
    """A delta whose seals are right, whatever its index says."""
    index = b"".join(RUN.pack(*run) for run in runs)
    return pack_header(ram, data, zero, PAGE + data * PAGE, index) + bytes(data * PAGE) + index


def sealed(*fields: object) -> bytes:
    """A delta of nothing but a header with these fields and a right seal."""
    body = HEADER.pack(*fields).ljust(PAGE - 32, b"\0")
    return body + hashlib.sha256(body).digest()


# -- writing and reading ---------------------------------------------------------------------------------------------


@QUICK
@given(PAGES)
def test_what_was_written_is_read_again(pages: list[int | None]) -> None:
    with directory() as scratch:
        info = write(scratch / "delta", pages)
        with Delta(scratch / "delta") as delta:
            found: list[int | None] = [None] * RAM
            position = PAGE
            for first, count, kind in delta.runs():
                for number in range(first, first + count):
                    content = os.pread(delta.fd, PAGE, position) if kind == DATA else bytes(PAGE)
                    position += PAGE if kind == DATA else 0
                    assert content == page(content[0])
                    found[number] = content[0]
            assert found == pages
            counts = (delta.ram_pages, delta.data_pages, delta.zero_pages)
        zeros, untouched = pages.count(0), pages.count(None)
        assert counts == (RAM, RAM - zeros - untouched, zeros)
        assert (info.data_pages, info.zero_pages) == counts[1:]
        assert info.size == (scratch / "delta").stat().st_size
        assert info.digest == delta256_file(scratch / "delta")


def test_the_bytes_are_those_of_the_specification(tmp_path: Path) -> None:
    write(tmp_path / "delta", [None, 7, 8, 0, 0, None, 9, None])
    content = (tmp_path / "delta").read_bytes()
    index = struct.pack("<QII", 1, 2, 0) + struct.pack("<QII", 3, 2, 1) + struct.pack("<QII", 6, 1, 0)
    fields = struct.pack("<IIQQQQQ", 1, 4096, 8, 3, 2, 4096 * 4, 48)
    header = (b"FORKDLT1" + fields + hashlib.sha256(index).digest()).ljust(4064, b"\0")
    assert content == header + hashlib.sha256(header).digest() + page(7) + page(8) + page(9) + index


def test_a_delta_of_nothing_is_valid(tmp_path: Path) -> None:
    assert write(tmp_path / "delta", [None] * RAM).size == PAGE
    with Delta(tmp_path / "delta") as delta:
        assert list(delta.runs()) == []


@pytest.mark.parametrize("cut", ["no page", "one page", "all pages"])
def test_a_delta_that_was_not_finished_is_none(tmp_path: Path, cut: str) -> None:
    with open(tmp_path / "delta", "xb", buffering=0) as out:
        writer = DeltaWriter(out.fileno(), RAM)
        for number in range({"no page": 0, "one page": 1, "all pages": RAM}[cut]):
            writer.add_data(number, page(1))
    with pytest.raises(SnapshotBroken, match=r"too short|never finished"):
        Delta(tmp_path / "delta")


def test_pages_must_come_whole_once_in_order_and_within_ram(tmp_path: Path) -> None:
    with open(tmp_path / "delta", "xb", buffering=0) as out:
        writer = DeltaWriter(out.fileno(), RAM)
        writer.add_data(3, page(1) * 2)
        for first in (0, 3, 4):
            with pytest.raises(ValueError, match="do not lie in"):
                writer.add_data(first, page(2))
            with pytest.raises(ValueError, match="do not lie in"):
                writer.add_zero(first, 1)
        with pytest.raises(ValueError, match="do not lie in"):
            writer.add_zero(5, RAM)
        with pytest.raises(ValueError, match="do not lie in"):
            writer.add_zero(6, -1)
        with pytest.raises(ValueError, match="not whole pages"):
            writer.add_data(5, b"short")
        writer.finish()
    with Delta(tmp_path / "delta") as delta:  # what was refused left nothing behind
        assert list(delta.runs()) == [(3, 2, DATA)]


@pytest.mark.parametrize("pages", [0, -1, (1 << 32) + 1])
def test_a_writer_needs_a_sensible_amount_of_ram(pages: int) -> None:
    with pytest.raises(ValueError, match="pages of RAM"):
        DeltaWriter(-1, pages)


def test_pages_of_a_process_are_told_apart_and_moved_to_their_place(tmp_path: Path) -> None:
    # 300 pages: more than one buffer, so a run of zeros and one of data go over its edge.
    expected = [0 if number % 200 > 150 else 1 + number % 7 for number in range(300)]
    with mmap.mmap(-1, 300 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area[:] = image(list(expected))
        with open("/proc/self/mem", "rb", buffering=0) as memory, open(tmp_path / "delta", "xb", buffering=0) as out:
            writer = DeltaWriter(out.fileno(), 400)
            runs = [(0, 2), (5, 290), (298, 1)]
            writer.add_from_process(memory.fileno(), address_of(area), 50, runs)
            info = writer.finish()
    (tmp_path / "base").write_bytes(page(255) * 400)
    materialise(tmp_path / "base", [tmp_path / "delta"], tmp_path / "out")
    pages: list[int | None] = [255] * 400
    for first, count in runs:
        pages[50 + first : 50 + first + count] = expected[first : first + count]
    assert (tmp_path / "out").read_bytes() == image(pages)
    assert info.digest == delta256_file(tmp_path / "delta")
    with Delta(tmp_path / "delta") as delta:  # joined across the buffer's edge
        kinds = [kind for _, _, kind in delta.runs()]
        assert kinds == [DATA, DATA, ZERO, DATA, DATA]
        assert (delta.data_pages, delta.zero_pages) == (293 - 49, 49)


def test_memory_that_is_not_there_is_an_error_of_reading(tmp_path: Path) -> None:
    with open("/proc/self/mem", "rb", buffering=0) as memory, open(tmp_path / "d", "xb", buffering=0) as out:
        writer = DeltaWriter(out.fileno(), RAM)
        with pytest.raises(OSError) as caught:
            writer.add_from_process(memory.fileno(), 0, 0, [(0, 1)])  # nothing is ever mapped at address 0
    assert caught.value.errno == errno.EIO


# -- what is not a delta ---------------------------------------------------------------------------------------------


@QUICK
@given(PAGES, st.data())
def test_any_byte_altered_in_header_or_index_is_refused(pages: list[int | None], data: st.DataObject) -> None:
    with directory() as scratch:
        info = write(scratch / "delta", pages)
        content = bytearray((scratch / "delta").read_bytes())
        index = PAGE + info.data_pages * PAGE
        places = st.integers(0, PAGE - 1) | st.integers(0, HEADER.size - 1)
        where = data.draw(places | st.integers(index, info.size - 1) if info.size > index else places)
        content[where] ^= data.draw(st.integers(1, 255))
        refused(scratch / "delta", content)


@QUICK
@given(PAGES, st.data())
def test_a_delta_cut_short_or_grown_is_refused(pages: list[int | None], data: st.DataObject) -> None:
    with directory() as scratch:
        info = write(scratch / "delta", pages)
        content = (scratch / "delta").read_bytes()
        refused(scratch / "delta", content[: data.draw(st.integers(0, info.size - 1))])
        refused(scratch / "delta", content + data.draw(st.binary(min_size=1, max_size=40)))


@QUICK
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_are_refused(content: bytes, padded: bool) -> None:
    with directory() as scratch:
        refused(scratch / "delta", content.ljust(PAGE * 2, b"\0") if padded else content)


U64 = st.integers(0, 40) | st.integers(0, 2**64 - 1)


@QUICK
@given(st.tuples(U64, U64, U64, U64, U64))
def test_a_sealed_header_with_arbitrary_numbers_is_refused(numbers: tuple[int, ...]) -> None:
    # No index and no pages follow, so only the numbers of an empty delta would be right.
    if 0 < numbers[0] <= 1 << 32 and numbers[1:] == (0, 0, PAGE, 0):
        return
    digest = hashlib.sha256(b"").digest()
    with directory() as scratch:
        refused(scratch / "delta", sealed(b"FORKDLT1", 1, PAGE, *numbers, digest))


U32 = st.integers(0, 2**32 - 1)


@QUICK
@given(st.lists(st.tuples(U64, st.integers(0, 6) | U32, st.integers(0, 2) | U32), max_size=4))
def test_a_sealed_index_of_arbitrary_runs_is_valid_or_refused(runs: list[tuple[int, int, int]]) -> None:
    following, good = 0, True
    for first, count, kind in runs:
        good = good and first >= following and count > 0 and kind in (DATA, ZERO) and first + count <= RAM
        following = first + count
    data = sum(count for _, count, kind in runs if kind == DATA)
    zero = sum(count for _, count, kind in runs if kind != DATA)
    # A file of that many pages is only written where it can be good.
    content = built(runs, data, zero) if data + zero <= RAM else built(runs, min(data, RAM), 0)
    with directory() as scratch:
        if good:
            (scratch / "delta").write_bytes(content)
            with Delta(scratch / "delta") as delta:
                assert list(delta.runs()) == runs
        else:
            refused(scratch / "delta", content)


NO_INDEX = hashlib.sha256(b"").digest()


@pytest.mark.parametrize(
    ("why", "content"),
    [
        ("too short", b""),
        ("too short", built([], 0, 0)[:-1]),
        ("not a delta", bytes(PAGE)),
        ("not a delta", sealed(b"FORKDLT2", 1, PAGE, RAM, 0, 0, PAGE, 0, NO_INDEX)),
        ("has format 2; this forkd reads 1", sealed(b"FORKDLT1", 2, PAGE, RAM, 0, 0, PAGE, 0, NO_INDEX)),
        ("altered header", built([], 0, 0)[:-1] + b"!"),
        ("pages of 16384 bytes", sealed(b"FORKDLT1", 1, 16384, RAM, 0, 0, PAGE, 0, NO_INDEX)),
        ("more pages than RAM", built([], 0, 0, ram=0)),
        ("more pages than RAM", built([], 0, 0, ram=(1 << 32) + 1)),
        ("more pages than RAM", built([(0, 2, ZERO)], 0, 2, ram=1)),
        ("index in the wrong place", sealed(b"FORKDLT1", 1, PAGE, RAM, 1, 0, PAGE, 0, NO_INDEX)),
        ("wrong length", sealed(b"FORKDLT1", 1, PAGE, RAM, 0, 4, PAGE, 17, NO_INDEX)),
        ("wrong length", sealed(b"FORKDLT1", 1, PAGE, RAM, 0, 0, PAGE, 16, NO_INDEX)),
        (
            "wrong length",
            sealed(b"FORKDLT1", 1, PAGE, 1 << 32, 0, 1 << 32, PAGE, 16 * (MAX_RUNS + 1), NO_INDEX),
        ),
        ("not as many as it says", built([], 0, 0) + b"!"),
        ("altered index", built([(0, 1, ZERO)], 0, 1)[:-16] + RUN.pack(1, 1, ZERO)),
        ("empty, overlap or are out of order", built([(0, 0, ZERO), (1, 2, ZERO)], 0, 2)),
        ("empty, overlap or are out of order", built([(0, 2, ZERO), (1, 1, ZERO)], 0, 3)),
        ("empty, overlap or are out of order", built([(4, 1, ZERO), (1, 1, ZERO)], 0, 2)),
        ("unknown kind 2", built([(0, 1, 2)], 0, 1)),
        ("past the end of RAM", built([(RAM - 1, 2, ZERO)], 0, 2)),
        ("does not fit its counts", built([(0, 1, ZERO)], 0, 2)),
        ("does not fit its counts", built([(0, 1, ZERO)], 1, 0)),
    ],
)
def test_each_fault_is_refused_for_its_own_reason(tmp_path: Path, why: str, content: bytes) -> None:
    assert why in refused(tmp_path / "delta", content)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody ever opens its other end
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        with pytest.raises(SnapshotBroken):
            Delta(path)


def test_a_refused_delta_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    refused(tmp_path / "delta", bytes(PAGE))
    assert os.listdir("/proc/self/fd") == before


# -- laying over -----------------------------------------------------------------------------------------------------


@QUICK
@given(PAGES, st.lists(PAGES, max_size=4))
def test_layers_over_a_base_are_the_image_made_by_hand(base: list[int | None], layers: list[list[int | None]]) -> None:
    with directory() as scratch:
        expected = image(base)
        (scratch / "base").write_bytes(expected)
        paths = []
        for number, pages in enumerate(layers):
            paths.append(scratch / f"{number}.delta")
            write(paths[-1], pages)
            expected = laid_over(expected, pages)
        materialise(scratch / "base", paths, scratch / "out")
        assert (scratch / "out").read_bytes() == expected
        assert (scratch / "base").read_bytes() == image(base)


def test_a_zero_run_gives_its_room_back(tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(page(1) * RAM)
    write(tmp_path / "delta", [0] * RAM)
    materialise(tmp_path / "base", [tmp_path / "delta"], tmp_path / "out")
    assert (tmp_path / "out").stat().st_size == RAM * PAGE
    assert physical_bytes(tmp_path / "out") < RAM * PAGE


def test_a_delta_of_other_ram_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(page(1) * RAM)
    write(tmp_path / "good", [2] + [None] * (RAM - 1))
    write(tmp_path / "longer", [2] + [None] * RAM)
    with pytest.raises(SnapshotBroken, match="bytes of RAM"):
        materialise(tmp_path / "base", [tmp_path / "good", tmp_path / "longer"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with (
        Delta(tmp_path / "longer") as delta,
        open(tmp_path / "base", "r+b") as base,
        pytest.raises(SnapshotBroken, match="bytes of RAM"),
    ):
        apply(delta, base.fileno())
    assert (tmp_path / "base").read_bytes() == page(1) * RAM


def test_a_missing_or_damaged_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(page(1) * RAM)
    write(tmp_path / "good", [2] * RAM)
    (tmp_path / "bad").write_bytes(bytes(PAGE))
    for base, deltas in (("gone", ["good"]), ("base", ["good", "gone"]), ("base", ["bad"])):
        with pytest.raises(SnapshotBroken):
            materialise(tmp_path / base, [tmp_path / name for name in deltas], tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_file_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "base").write_bytes(page(1) * RAM)
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        materialise(tmp_path / "base", [], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"mine"
