"""The contract of memory backends."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.linux import sparse
from forkd.specs.engine import MemoryImage
from forkd.specs.memory import MemoryBackend, MemoryLease

SIZE = 4 << 20  # whole huge pages
MARK = b"forkd"
MARKED = 3 << 20


def make_image(path: Path, mark: bytes = MARK) -> Path:
    """A mostly empty image with a mark in it."""
    with open(path, "xb") as out:
        out.truncate(SIZE)
        out.seek(MARKED)
        out.write(mark)
    return path


def mapped(image: MemoryImage) -> mmap.mmap:
    """The image as a VMM maps it: opened for writing, mapped privately."""
    descriptor = os.open(image.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, image.size, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)


def mark_of(lease: MemoryLease) -> bytes:
    """What stands where the mark was put."""
    with mapped(lease.image) as memory:
        return bytes(memory[MARKED : MARKED + len(MARK)])


class MemoryBackendContract:
    """Subclass it and give the fixture ``backend``: a new MemoryBackend, not used before."""

    @pytest.fixture
    def image(self, tmp_path: Path) -> Path:
        """An image file of a snapshot."""
        return make_image(tmp_path / "memory.bin")

    @pytest.fixture
    def closing(self, backend: MemoryBackend) -> Iterator[MemoryBackend]:
        """The backend, closed after the test."""
        yield backend
        backend.close()

    def test_it_has_a_name(self, backend: MemoryBackend) -> None:
        assert backend.name.isidentifier()

    @pytest.mark.parametrize("hugepages", [False, True])
    async def test_a_lease_has_the_images_content(self, closing: MemoryBackend, image: Path, hugepages: bool) -> None:
        lease = await closing.lease(image, SIZE, hugepages=hugepages)
        assert lease.image.size == SIZE
        with mapped(lease.image) as memory, open(image, "rb") as source:
            assert memory[:] == source.read()

    @pytest.mark.parametrize("hugepages", [False, True])
    async def test_what_a_machine_writes_nobody_else_sees(
        self, closing: MemoryBackend, image: Path, hugepages: bool
    ) -> None:
        lease = await closing.lease(image, SIZE, hugepages=hugepages)
        with mapped(lease.image) as one, mapped(lease.image) as other:
            one[MARKED : MARKED + 5] = b"dirty"
            assert other[MARKED : MARKED + 5] == MARK
        assert mark_of(await closing.lease(image, SIZE, hugepages=hugepages)) == MARK
        assert image.read_bytes()[MARKED : MARKED + 5] == MARK

    async def test_a_second_lease_shares_what_the_first_made(self, closing: MemoryBackend, image: Path) -> None:
        first = await closing.lease(image, SIZE, hugepages=False)
        second = await closing.lease(image, SIZE, hugepages=False)
        assert os.stat(first.image.path).st_ino == os.stat(second.image.path).st_ino

    async def test_a_file_that_was_replaced_is_not_taken_for_the_old_one(
        self, closing: MemoryBackend, image: Path, tmp_path: Path
    ) -> None:
        old = await closing.lease(image, SIZE, hugepages=False)
        with mapped(old.image) as running:
            make_image(tmp_path / "new", b"other").replace(image)
            assert mark_of(await closing.lease(image, SIZE, hugepages=False)) == b"other"
            assert running[MARKED : MARKED + 5] == MARK  # a machine that runs is not disturbed

    async def test_a_lease_that_is_held_stays_valid_however_many_others_come(
        self, closing: MemoryBackend, image: Path, tmp_path: Path
    ) -> None:
        held = await closing.lease(image, SIZE, hugepages=False)
        for turn in range(12):
            other = make_image(tmp_path / f"other-{turn}", b"%05d" % turn)
            assert mark_of(await closing.lease(other, SIZE, hugepages=False)) == b"%05d" % turn
        gc.collect()
        assert mark_of(held) == MARK

    async def test_a_mapping_outlives_the_backend(self, backend: MemoryBackend, image: Path) -> None:
        lease = await backend.lease(image, SIZE, hugepages=False)
        with mapped(lease.image) as memory:
            backend.close()
            assert memory[MARKED : MARKED + 5] == MARK

    async def test_huge_pages_are_given_or_their_absence_is_said(self, closing: MemoryBackend, image: Path) -> None:
        lease = await closing.lease(image, SIZE, hugepages=True)
        assert lease.image.hugepages or lease.warnings
        plain = await closing.lease(image, SIZE, hugepages=False)
        assert not plain.image.hugepages
        assert not plain.warnings

    async def test_holes_of_the_image_cost_nothing(self, closing: MemoryBackend, image: Path) -> None:
        lease = await closing.lease(image, SIZE, hugepages=False)
        with open(lease.image.path, "rb") as source:
            kept = sum(length for _, length in sparse.data_extents(source.fileno()))
        assert kept <= 64 << 10

    async def test_closing_lets_go_of_everything_and_may_be_done_twice(
        self, backend: MemoryBackend, image: Path
    ) -> None:
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await backend.lease(image, SIZE, hugepages=False)
        backend.close()
        backend.close()
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == before
