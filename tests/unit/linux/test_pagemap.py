"""Which pages a process changed: the kernel's two answers agree, and both are right."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkd.linux import pagemap
from forkd.linux.mapping import address_of
from forkd.linux.memfd import create_sealed, huge_page_pool

PAGE = 4096
PAGES = 64


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with open(path, "r+b") as source, mmap.mmap(source.fileno(), 0, flags=mmap.MAP_PRIVATE) as memory:
        yield memory


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(b"x" * PAGE * PAGES)
    return path


def pages(runs: list[tuple[int, int]]) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


def both(memory: mmap.mmap, *, changed: bool) -> list[tuple[int, int]]:
    """The answer, after making sure that either way of asking gives it."""
    fd = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        start, length = address_of(memory), len(memory)
        entries = pagemap.by_entries(fd, start, length, changed=changed)
        try:
            assert pagemap.by_scan(fd, start, length, changed=changed) == entries
        except OSError as error:
            assert error.errno in (errno.ENOTTY, errno.EINVAL)  # before Linux 6.7
        return entries
    finally:
        os.close(fd)


@given(st.sets(st.integers(0, PAGES - 1)))
@settings(max_examples=50, deadline=None)
def test_exactly_the_pages_written_to_are_changed(written: set[int]) -> None:
    fd = os.memfd_create("image")
    try:
        os.ftruncate(fd, PAGE * PAGES)
        with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE) as memory:
            for page in range(0, PAGES, 3):
                memory[page * PAGE]  # reading changes nothing
            for page in written:
                memory[page * PAGE + 7] = 1
            runs = both(memory, changed=True)
    finally:
        os.close(fd)
    assert pages(runs) == sorted(written)
    assert all(a + count < b for (a, count), (b, _) in itertools.pairwise(runs)), "neighbours are one run"


def test_a_page_set_to_zero_is_changed(image: Path) -> None:
    with mapped(image) as memory:
        memory[3 * PAGE : 4 * PAGE] = bytes(PAGE)
        assert both(memory, changed=True) == [(3, 1)]


def test_what_fork_shares_is_still_changed(image: Path) -> None:
    with mapped(image) as memory:
        memory[5 * PAGE] = 1
        child = os.fork()
        if child == 0:
            os._exit(0 if both(memory, changed=True) == [(5, 1)] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_fork_shares_is_not_the_processs_own(image: Path) -> None:
    with mapped(image) as memory:
        start, length = address_of(memory), len(memory)
        memory[5 * PAGE] = memory[6 * PAGE] = 1
        assert pagemap.own_bytes(os.getpid(), start, length) == 2 * PAGE
        child = os.fork()
        if child == 0:
            before = pagemap.own_bytes(os.getpid(), start, length)
            memory[5 * PAGE] = memory[9 * PAGE] = 2
            os._exit(0 if (before, pagemap.own_bytes(os.getpid(), start, length)) == (0, 2 * PAGE) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_more_runs_than_one_question_takes(tmp_path: Path) -> None:
    count = 40_000
    path = tmp_path / "large"
    with open(path, "xb") as out:
        out.truncate(2 * count * PAGE)
    with mapped(path) as memory:
        for page in range(0, 2 * count, 2):
            memory[page * PAGE] = 1
        assert both(memory, changed=True) == [(page, 1) for page in range(0, 2 * count, 2)]


def test_of_anonymous_memory_the_pages_with_content_are_populated() -> None:
    with mmap.mmap(-1, PAGE * PAGES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[2 * PAGE] = 1
        memory[9 * PAGE]  # maps the zero page
        assert pages(both(memory, changed=False)) == [2]


def test_another_process_can_be_asked(target: Callable[[str], Any], image: Path) -> None:
    code = f"""
        import mmap, sys
        from forkd.linux.mapping import address_of
        source = open({str(image)!r}, "r+b")
        memory = mmap.mmap(source.fileno(), 0, flags=mmap.MAP_PRIVATE)
        memory[7 * 4096] = 1
        print("ready", flush=True)
        print(address_of(memory), flush=True)
        sys.stdin.readline()
    """
    process = target(code)
    assert pagemap.changed_pages(process.pid, int(process.line()), PAGE * PAGES) == [(7, 1)]
    process.end()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        pagemap.changed_pages(process.pid, 0x10000, PAGE)


def test_a_kernel_without_the_scan_is_asked_the_old_way(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> list[tuple[int, int]]:
        raise OSError(errno.ENOTTY, "no such ioctl")

    monkeypatch.setattr(pagemap, "by_scan", missing)
    with mapped(image) as memory:
        memory[1 * PAGE] = 1
        assert pagemap.changed_pages(os.getpid(), address_of(memory), len(memory)) == [(1, 1)]


def test_a_range_that_is_not_whole_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="aligned"):
        pagemap.changed_pages(os.getpid(), 4097, PAGE)


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Eight huge pages, where the host lets us reserve them."""
    knob = Path("/proc/sys/vm/nr_hugepages")
    before = knob.read_text()
    try:
        knob.write_text(str(int(before) + 8))
    except OSError:
        pytest.skip("huge pages cannot be reserved here")
    yield
    knob.write_text(before)


@pytest.mark.root
@pytest.mark.usefixtures("huge_pages")
def test_of_huge_pages_whole_ones_are_changed() -> None:
    if huge_page_pool().available < 6:
        pytest.skip("the host gave no huge pages")
    size = 4 << 20
    fd = create_sealed("image", size, lambda memory: memory.__setitem__(slice(0, 3), b"abc"), hugepages=True)
    try:
        with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE) as memory:
            memory[0]
            assert both(memory, changed=True) == []
            memory[(2 << 20) + 5] = 1
            assert both(memory, changed=True) == [(512, 512)]
            assert memory[:3] == b"abc"
    finally:
        os.close(fd)
