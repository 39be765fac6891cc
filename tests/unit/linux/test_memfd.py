"""Sealed memfds: the right content, nobody can change it, holes stay holes, short pools are told as such."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from forkd.linux import memfd
from forkd.linux.memfd import HUGE_PAGE, HugePagePool, HugePagesUnavailable, create_sealed, huge_page_pool

SIZE = 1 << 20


def test_a_file_is_copied_and_its_holes_stay(tmp_path: Path) -> None:
    path = tmp_path / "image"
    with open(path, "xb") as out:
        out.truncate(SIZE)
        out.seek(SIZE // 2)
        out.write(b"content")
    fd = create_sealed("image", SIZE, path)
    try:
        assert os.pread(fd, SIZE, 0) == path.read_bytes()
        assert os.fstat(fd).st_blocks * 512 <= 8192
    finally:
        os.close(fd)


def test_nobody_can_write_grow_or_shrink_it_but_private_copies_can_be_written() -> None:
    fd = create_sealed("image", SIZE, lambda memory: memory.__setitem__(0, 7))
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for size in (0, SIZE * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(again, SIZE, flags=mmap.MAP_SHARED)
        with mmap.mmap(again, SIZE, flags=mmap.MAP_PRIVATE) as private:
            private[0] = 1
        os.close(again)
        assert os.pread(fd, 1, 0) == b"\7"
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_refused_and_no_descriptor_is_left(tmp_path: Path, size: int) -> None:
    (tmp_path / "image").write_bytes(b"x" * SIZE)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=str(SIZE)):
        create_sealed("image", size, tmp_path / "image")
    assert os.listdir("/proc/self/fd") == before


def test_an_empty_one_and_one_of_nothing_are_fine() -> None:
    for size in (0, SIZE):
        fd = create_sealed("nothing", size, None)
        assert os.pread(fd, 10, 0) == bytes(min(size, 10))
        os.close(fd)


def test_sizes_that_are_not_whole_huge_pages_are_told_as_such() -> None:
    with pytest.raises(HugePagesUnavailable, match="whole huge pages"):
        create_sealed("image", HUGE_PAGE + 4096, None, hugepages=True)


def test_a_pool_that_is_too_small_is_told_with_its_numbers() -> None:
    wanted = huge_page_pool().available + 1000
    with pytest.raises(HugePagesUnavailable, match=rf"{wanted} huge pages are needed|no 2 MiB huge pages"):
        create_sealed("image", wanted * HUGE_PAGE, None, hugepages=True)


def test_reserved_pages_are_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("nr_hugepages", 10), ("free_hugepages", 6), ("resv_hugepages", 4)):
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(memfd, "_POOL", tmp_path)
    assert huge_page_pool() == HugePagePool(10, 6, 4)
    assert huge_page_pool().available == 2
    monkeypatch.setattr(memfd, "_POOL", tmp_path / "nowhere")
    assert huge_page_pool().available == 0
