"""Write protection by userfaultfd: a snapshot of one instant while others write, and no writer left waiting."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from forkd.cli.wp_bench import command
from forkd.linux.mapping import address_of
from forkd.linux.userfaultfd import UserFaultFd, WpSnapshot, wp_bench

PAGE = 4096
SIZE = 4 << 20


@pytest.fixture(autouse=True)
def allowed() -> None:
    try:
        UserFaultFd().close()
    except OSError as error:
        pytest.skip(f"userfaultfd is not to be had here: {error}")


@pytest.fixture
def region() -> Iterator[mmap.mmap]:
    fd = os.memfd_create("region")
    os.ftruncate(fd, SIZE)
    memory = mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED)
    os.close(fd)
    memory[:] = b"\x11" * SIZE
    yield memory
    memory.close()


def write_page(region: mmap.mmap, page: int) -> None:
    """Write without holding the interpreter's lock, which the handler needs."""
    libc = ctypes.CDLL(None)
    libc.memset.argtypes, libc.memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    libc.memset(address_of(region) + page * PAGE, 0x99, PAGE)


def test_a_write_waits_until_its_page_is_released(region: mmap.mmap) -> None:
    with UserFaultFd() as uffd:
        start = address_of(region)
        uffd.register(start, SIZE)
        uffd.protect(start, SIZE)
        writer = threading.Thread(target=write_page, args=(region, 5))
        writer.start()
        faults: list[int] = []
        while not faults:
            faults = uffd.read_faults()
        assert [(address - start) // PAGE for address in faults] == [5]
        assert region[5 * PAGE] == 0x11
        uffd.release(start + 5 * PAGE, PAGE)
        writer.join(20)
        assert not writer.is_alive()
        assert region[5 * PAGE] == 0x99


def test_closing_lets_every_writer_go_on(region: mmap.mmap) -> None:
    uffd = UserFaultFd()
    uffd.register(address_of(region), SIZE)
    uffd.protect(address_of(region), SIZE)
    writer = threading.Thread(target=write_page, args=(region, 0))
    writer.start()
    while not uffd.read_faults():
        pass
    uffd.close()
    writer.join(20)
    assert not writer.is_alive()


def test_the_snapshot_is_of_the_moment_it_was_armed(region: mmap.mmap, tmp_path: Path) -> None:
    out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    os.ftruncate(out, SIZE)
    with UserFaultFd() as uffd:
        snapshot = WpSnapshot(uffd, region, out)
        snapshot.arm()
        writers = [
            threading.Thread(target=lambda first=first: [write_page(region, page) for page in range(first, 1024, 4)])
            for first in range(4)
        ]
        for writer in writers:
            writer.start()
        snapshot.copy_clean()
        for writer in writers:
            writer.join(20)
            assert not writer.is_alive()
        snapshot.finish()
    os.close(out)
    assert (tmp_path / "out").read_bytes() == b"\x11" * SIZE
    assert region[:] == b"\x99" * SIZE
    assert snapshot.by_fault + snapshot.by_bulk == SIZE // PAGE


def test_a_disk_that_fails_is_told_and_holds_no_writer_up(region: mmap.mmap, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    out = os.open(tmp_path / "out", os.O_RDONLY)
    with UserFaultFd() as uffd:
        snapshot = WpSnapshot(uffd, region, out)
        snapshot.arm()
        writer = threading.Thread(target=write_page, args=(region, 1))
        writer.start()
        writer.join(20)
        assert not writer.is_alive()
        with pytest.raises(OSError):
            snapshot.finish()
    os.close(out)


def test_the_bench_is_consistent_and_leaves_no_file(tmp_path: Path) -> None:
    result = wp_bench(8, tmp_path / "snapshot")
    assert result.consistent
    assert result.pages == result.pages_captured_by_bulk + result.pages_captured_by_fault == 2048
    assert result.pages_captured_by_fault > 0
    assert list(tmp_path.iterdir()) == []
    assert wp_bench(1, tmp_path / "kept", keep=True).consistent
    assert (tmp_path / "kept").read_bytes() == b"\x42" * (1 << 20)
    with pytest.raises(ValueError, match="1 MiB"):
        wp_bench(0, tmp_path / "none")


def test_the_verb_prints_json_and_a_table_and_refuses_with_a_sentence(tmp_path: Path) -> None:
    options = ["--region-mib", "4", "--snapshot", str(tmp_path / "out")]
    done = CliRunner().invoke(command, [*options, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["consistent"] is True
    plain = CliRunner().invoke(command, options)
    for word in ("arm_ms", "bulk_ms", "finalize_ms", "pages_captured_by_fault", "consistent"):
        assert word in plain.output
    refused = CliRunner().invoke(command, ["--snapshot", str(tmp_path / "no" / "such" / "dir")])
    assert refused.exit_code == 2 and "cannot be written" in refused.output
    assert "Traceback" not in refused.output
    assert CliRunner().invoke(command, ["--region-mib", "0"]).exit_code == 2
