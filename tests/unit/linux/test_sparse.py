"""Sparse files and pages: copies keep holes, zeros take no room, a process's memory is read as it is."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.linux import sparse
from forkd.linux.mapping import address_of
from forkd.linux.sparse import BUFFER, PAGE

QUICK = settings(max_examples=60, deadline=None)
PAGES = st.lists(st.sampled_from([0, 0, 1, 2]), max_size=12)


def page(value: int) -> bytes:
    return bytes([value]) * PAGE


def write_sparse(path: Path, content: bytes) -> None:
    with open(path, "xb", buffering=0) as out:
        os.ftruncate(out.fileno(), len(content))
        for offset in range(0, len(content), PAGE):
            if any(content[offset : offset + PAGE]):
                os.pwrite(out.fileno(), content[offset : offset + PAGE], offset)


def extents(path: Path) -> list[tuple[int, int]]:
    with open(path, "rb", buffering=0) as source:
        return list(sparse.data_extents(source.fileno()))


# -- files -----------------------------------------------------------------------------------------------------------


def test_extents_are_the_parts_that_are_no_holes(tmp_path: Path) -> None:
    write_sparse(tmp_path / "file", page(0) * 2 + page(1) * 3 + page(0) * 4 + page(2) + page(0))
    assert extents(tmp_path / "file") == [(2 * PAGE, 3 * PAGE), (9 * PAGE, PAGE)]
    write_sparse(tmp_path / "hole", page(0) * 4)
    assert extents(tmp_path / "hole") == []
    write_sparse(tmp_path / "empty", b"")
    assert extents(tmp_path / "empty") == []


@QUICK
@given(PAGES, st.binary(max_size=9))
def test_a_clone_has_the_same_content_and_holes(values: list[int], tail: bytes) -> None:
    content = b"".join(map(page, values)) + tail
    with TemporaryDirectory() as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        write_sparse(source, content)
        sparse.clone_file(source, target)
        assert target.read_bytes() == content
        assert extents(target) == extents(source)


def test_a_file_can_be_cloned_to_another_file_system(tmp_path: Path) -> None:
    content = page(1) + page(0) * 20 + page(2) + b"end"
    write_sparse(tmp_path / "source", content)
    with TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is not a file system of its own")
        target = Path(other, "target")
        assert not sparse.clone_file(tmp_path / "source", target)
        assert target.read_bytes() == content
        assert sparse.physical_bytes(target) < 10 * PAGE


def test_a_clone_never_replaces_a_file_and_leaves_none_half_made(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"new")
    (tmp_path / "target").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        sparse.clone_file(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"old"
    with pytest.raises(FileNotFoundError):
        sparse.clone_file(tmp_path / "missing", tmp_path / "other")
    with pytest.raises(OSError):
        sparse.clone_file(tmp_path, tmp_path / "other")  # a directory has no content to copy
    assert not (tmp_path / "other").exists()


def test_a_range_is_copied_to_its_place_and_a_short_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"0123456789")
    (tmp_path / "target").write_bytes(b"abcdefghij")
    with open(tmp_path / "source", "rb", buffering=0) as source, open(tmp_path / "target", "r+b", buffering=0) as out:
        sparse.copy_range(source.fileno(), 2, out.fileno(), 5, 3)
        assert (tmp_path / "target").read_bytes() == b"abcde234ij"
        with pytest.raises(OSError) as caught:
            sparse.copy_range(source.fileno(), 8, out.fileno(), 0, 3)
    assert caught.value.errno == errno.EIO


def test_a_punched_hole_reads_as_zeros_and_keeps_the_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(page(1) * 8)
    with open(path, "r+b", buffering=0) as file:
        sparse.punch_hole(file.fileno(), 2 * PAGE, 4 * PAGE)
        assert path.read_bytes() == page(1) * 2 + page(0) * 4 + page(1) * 2
        sparse.punch_hole(file.fileno(), 6 * PAGE, 100 * PAGE)  # past the end
    assert path.read_bytes() == page(1) * 2 + page(0) * 6


def test_a_hole_that_cannot_be_punched_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(page(1))
    with open(tmp_path / "file", "rb", buffering=0) as file, pytest.raises(OSError) as caught:
        sparse.punch_hole(file.fileno(), 0, PAGE)
    assert caught.value.errno == errno.EBADF


def test_more_views_than_one_call_takes_are_all_written(tmp_path: Path) -> None:
    views = [memoryview(b"%d," % number) for number in range(3000)]
    with open(tmp_path / "file", "xb", buffering=0) as file:
        assert sparse.write_all(file.fileno(), views, 7) == sum(map(len, views))
        assert sparse.write_all(file.fileno(), [], 0) == 0
    assert (tmp_path / "file").read_bytes() == bytes(7) + b"".join(views)


def test_reading_gives_fewer_bytes_only_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    target = bytearray(b"......")
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert sparse.read_into(file.fileno(), memoryview(target), 2) == 6
        assert target == b"234567"
        assert sparse.read_into(file.fileno(), memoryview(target), 8) == 2
        assert sparse.read_into(file.fileno(), memoryview(target), 20) == 0


def test_room_is_counted_in_blocks_not_in_length(tmp_path: Path) -> None:
    write_sparse(tmp_path / "file", page(0) * 100 + page(1))
    assert PAGE <= sparse.physical_bytes(tmp_path / "file") < 50 * PAGE
    assert sparse.disk_free(tmp_path) > 0


# -- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PAGE, 1 << 16, (1 << 16) + 1, 300_000])
def test_one_byte_anywhere_makes_content_not_zero(size: int) -> None:
    assert sparse.is_zero(bytes(size))
    assert sparse.is_zero(memoryview(bytearray(size)))
    for where in {0, size // 2, size - 1} if size else ():
        content = bytearray(size)
        content[where] = 1
        assert not sparse.is_zero(content)


@QUICK
@given(PAGES, st.integers(0, 100))
def test_pieces_are_the_longest_there_are_and_miss_nothing(values: list[int], first: int) -> None:
    content = b"".join(map(page, values))
    pieces = list(sparse.split_zero(first, memoryview(content)))
    assert b"".join(view for _, view, _ in pieces) == content
    following = first
    for number, view, zero in pieces:
        assert number == following
        assert sparse.is_zero(view) == zero
        assert zero or all(any(view[start : start + PAGE]) for start in range(0, len(view), PAGE))
        following += len(view) // PAGE
    kinds = [zero for _, _, zero in pieces]
    assert all(one != other for one, other in itertools.pairwise(kinds))


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=6)


@QUICK
@given(RUNS, st.lists(st.sampled_from([0, 1, 2]), min_size=80, max_size=80), st.sampled_from([[1], [2, 3], [4, 4]]))
def test_runs_of_a_process_are_read_whatever_the_buffers(
    steps: list[tuple[int, int]], values: list[int], buffers: list[int]
) -> None:
    runs, position = [], 0
    for gap, count in steps:
        runs.append((position + gap, count))
        position += gap + count
    expected = {number: page(values[number]) for first, count in runs for number in range(first, first + count)}
    found: dict[int, bytes] = {}
    with (
        mmap.mmap(-1, 80 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area,
        open("/proc/self/mem", "rb", buffering=0) as memory,
    ):
        area[:] = b"".join(map(page, values))
        for batch in sparse.read_runs(memory.fileno(), address_of(area), runs, [bytearray(n * PAGE) for n in buffers]):
            not_zero = b""
            for number, view, zero in batch.pieces(1000):
                assert zero == sparse.is_zero(view)
                not_zero += b"" if zero else view
                for index in range(len(view) // PAGE):
                    assert number + index - 1000 not in found
                    found[number + index - 1000] = bytes(view[index * PAGE : (index + 1) * PAGE])
            assert b"".join(batch.data()) == not_zero
    assert found == expected


def test_pages_of_a_process_go_to_their_places_and_zeros_stay_holes(tmp_path: Path) -> None:
    pages = BUFFER // PAGE + 20
    content = page(1) * 10 + page(0) * 30 + page(2) * (pages - 40)
    with (
        mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area,
        open("/proc/self/mem", "rb", buffering=0) as memory,
        open(tmp_path / "image", "xb", buffering=0) as out,
    ):
        area[:] = content
        os.ftruncate(out.fileno(), (pages + 8) * PAGE)
        written = sparse.write_pages_from_process(
            memory.fileno(), address_of(area), [(0, 5), (8, pages - 8)], out.fileno(), first_page=8
        )
    assert written == 5 + 2 + pages - 40
    expected = page(0) * 8 + page(1) * 5 + page(0) * 3 + content[8 * PAGE :]
    assert (tmp_path / "image").read_bytes() == expected
    assert extents(tmp_path / "image")[:2] == [(8 * PAGE, 5 * PAGE), (16 * PAGE, 2 * PAGE)]


def test_a_process_that_is_gone_and_a_page_that_is_not_mapped_are_told_apart(target: Callable[[str], Any]) -> None:
    child = target("print('ready', flush=True); input()")
    with open(f"/proc/{child.pid}/mem", "rb", buffering=0) as memory:
        with pytest.raises(OSError) as caught:
            list(sparse.read_runs(memory.fileno(), 0, [(0, 1)], [bytearray(PAGE)]))
        assert caught.value.errno == errno.EIO
        child.process.kill()
        child.process.wait()
        with pytest.raises(ProcessLookupError):
            list(sparse.read_runs(memory.fileno(), 0, [(0, 1)], [bytearray(PAGE)]))
