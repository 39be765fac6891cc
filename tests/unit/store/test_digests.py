"""Digests of the store's files: as specified, whatever the holes, and the same when made on the way."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.linux.mapping import address_of
from forkd.linux.sparse import BUFFER, PAGE, physical_bytes, punch_hole, split_zero
from forkd.specs.errors import SnapshotBroken
from forkd.store.digests import (
    Alongside,
    Sparse256,
    capture_image,
    delta256_file,
    sha256_file,
    sparse256_file,
    verify_file,
)

QUICK = settings(max_examples=60, deadline=None)
PAGES = st.lists(st.sampled_from([0, 0, 1, 2]), max_size=12)


def by_hand(content: bytes) -> str:
    """sparse256 word for word from the specification."""
    whole = content + bytes(-len(content) % PAGE)
    pages = [whole[start : start + PAGE] for start in range(0, len(whole), PAGE)]
    text = b""
    number = 0
    while number < len(pages):
        begin = number
        while number < len(pages) and any(pages[number]):
            number += 1
        if number > begin:
            text += struct.pack(">Q", begin * PAGE) + b"".join(pages[begin:number])
            text += struct.pack(">Q", (number - begin) * PAGE)
        number += 1
    return "sparse256:" + hashlib.sha256(text + struct.pack(">Q", len(content))).hexdigest()


def page(value: int) -> bytes:
    return bytes([value]) * PAGE


def write_sparse(path: Path, content: bytes) -> None:
    """Zero pages become holes."""
    with open(path, "xb", buffering=0) as out:
        os.ftruncate(out.fileno(), len(content))
        for offset in range(0, len(content), PAGE):
            if any(content[offset : offset + PAGE]):
                os.pwrite(out.fileno(), content[offset : offset + PAGE], offset)


# -- of files --------------------------------------------------------------------------------------------------------


@QUICK
@given(PAGES, st.binary(max_size=30))
def test_sparse256_is_the_same_with_and_without_holes(values: list[int], tail: bytes) -> None:
    content = b"".join(map(page, values)) + tail
    with TemporaryDirectory() as scratch:
        stored, holes = Path(scratch, "stored"), Path(scratch, "holes")
        stored.write_bytes(content)
        write_sparse(holes, content)
        assert sparse256_file(stored) == sparse256_file(holes) == by_hand(content)


def test_sparse256_joins_rows_that_are_longer_than_a_buffer(tmp_path: Path) -> None:
    content = bytes(PAGE) + b"\1" * (2 * BUFFER) + bytes(BUFFER) + page(3) + b"end"
    (tmp_path / "image").write_bytes(content)
    assert sparse256_file(tmp_path / "image") == by_hand(content)


def test_sparse256_tells_a_moved_page_and_another_size(tmp_path: Path) -> None:
    contents = [page(1) + page(0), page(0) + page(1), page(1), page(1) + page(0) * 2, b"", page(0)]
    found = set()
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
        found.add(sparse256_file(tmp_path / str(number)))
    assert len(found) == len(contents)


def test_sparse256_of_a_punched_image_does_not_change(tmp_path: Path) -> None:
    content = page(1) + page(0) * 8 + page(2)
    (tmp_path / "image").write_bytes(content)
    before, room = sparse256_file(tmp_path / "image"), physical_bytes(tmp_path / "image")
    with open(tmp_path / "image", "r+b", buffering=0) as image:
        punch_hole(image.fileno(), PAGE, 8 * PAGE)
    assert physical_bytes(tmp_path / "image") < room
    assert sparse256_file(tmp_path / "image") == before


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, BUFFER + PAGE + 5])
def test_sha256_and_delta256_are_those_of_the_specification(tmp_path: Path, size: int) -> None:
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    assert sha256_file(tmp_path / "file") == f"sha256:{hashlib.sha256(content).hexdigest()}"
    turned = content[PAGE:] + content[:PAGE]
    assert delta256_file(tmp_path / "file") == f"delta256:{hashlib.sha256(turned).hexdigest()}"


@pytest.mark.parametrize("digest_of", [sha256_file, delta256_file, sparse256_file])
def test_a_file_with_its_own_digest_is_verified_and_an_altered_one_is_refused(
    tmp_path: Path, digest_of: Callable[[Path], str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(page(1) + page(0) + page(2))
    digest = digest_of(path)
    verify_file(path, digest)
    path.write_bytes(page(1) + page(0) + page(3))
    with pytest.raises(SnapshotBroken, match="was altered"):
        verify_file(path, digest)
    path.unlink()
    with pytest.raises(SnapshotBroken, match="cannot be read"):
        verify_file(path, digest)


@pytest.mark.parametrize("digest", ["md5:00", "", "sha256", ":", "SHA256:00"])
def test_a_digest_that_is_none_of_ours_is_refused(tmp_path: Path, digest: str) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(SnapshotBroken, match=r"unknown kind|was altered"):
        verify_file(tmp_path / "file", digest)


# -- made on the way -------------------------------------------------------------------------------------------------


@QUICK
@given(PAGES, st.lists(st.integers(0, 12)), st.booleans())
def test_a_digest_fed_in_any_pieces_is_the_same(values: list[int], cuts: list[int], leave_out: bool) -> None:
    content = b"".join(map(page, values))
    digest = Sparse256()
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    for begin, end in pairwise(edges):
        pieces = split_zero(begin, memoryview(content)[begin * PAGE : end * PAGE])
        digest.feed(piece for piece in pieces if not (leave_out and piece[2]))
    assert digest.finish(len(content)) == by_hand(content)


def test_pages_fed_twice_or_out_of_order_are_an_error() -> None:
    digest = Sparse256()
    digest.feed([(4, memoryview(page(1)), False)])
    for number in (0, 4):
        with pytest.raises(ValueError, match="comes after"):
            digest.feed([(number, memoryview(page(1)), False)])


def test_a_captured_image_is_the_memory_and_its_digest_that_of_the_file(tmp_path: Path) -> None:
    content = page(1) * 300 + page(0) * 10 + page(2) + page(0) * 3
    with mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area[:] = content
        # RAM in two regions that lie the other way round in memory, with nothing at all between them in the image.
        half, rest = 100 * PAGE, len(content) - 100 * PAGE
        regions = [(address_of(area) + half, rest, 0), (address_of(area), half, rest + 5 * PAGE)]
        with open("/proc/self/mem", "rb", buffering=0) as memory, open(tmp_path / "image", "xb", buffering=0) as out:
            digest, pages = capture_image(memory.fileno(), regions, out.fileno())
    expected = content[half:] + bytes(5 * PAGE) + content[:half]
    assert (tmp_path / "image").read_bytes() == expected
    assert digest == sparse256_file(tmp_path / "image") == by_hand(expected)
    assert pages == 301
    assert physical_bytes(tmp_path / "image") < len(expected)


# -- alongside -------------------------------------------------------------------------------------------------------


def test_calls_alongside_run_one_at_a_time_and_in_order() -> None:
    done: list[int] = []
    first_may_end = threading.Event()

    def call(number: int) -> None:
        if number == 0:
            assert first_may_end.wait(10)
        done.append(number)

    with Alongside() as side:
        side.start(call, 0)
        assert done == []  # it runs beside us
        first_may_end.set()
        side.start(call, 1)
        assert done[0] == 0  # the second began after the first had ended
        side.wait()
        side.start(call, 2)
    assert done == [0, 1, 2]


def test_what_a_call_alongside_raises_is_raised_here() -> None:
    def fail(number: int) -> None:
        raise OSError(number, "no")

    with Alongside() as side:
        side.start(fail, 1)
        with pytest.raises(OSError, match="no"):
            side.start(fail, 2)
    with pytest.raises(OSError, match="no"), Alongside() as side:
        side.start(fail, 3)


def test_an_error_of_ours_is_not_hidden_by_one_alongside() -> None:
    def fail(number: int) -> None:
        raise OSError(number, "no")

    with pytest.raises(KeyError), Alongside() as side:
        side.start(fail, 1)
        raise KeyError
