"""Bad input gets a sentence, the documented exit code, no traceback, and leaves nothing half-made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkd.store.snapshots import content_id, decode, encode
from tests.conftest import parent_disk

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
Forkd = Callable[..., "subprocess.CompletedProcess[str]"]


def assert_refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def broken(data_dir: Path) -> Iterator[Callable[[str], Path]]:
    """Copies of the parent to be damaged, by tag; removed after the test."""
    made: list[Path] = []

    def copy(tag: str) -> Path:
        source, target = data_dir / "snapshots" / PARENT, data_dir / "snapshots" / tag
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        made.append(target)
        shutil.copy(source / "vmstate", target / "vmstate")
        os.link(source / "memory.bin", target / "memory.bin")
        rewrite(target, source, tag=tag)
        return target

    yield copy
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


def rewrite(target: Path, source: Path, *, tag: str, **platform: object) -> None:
    """The source's manifest, changed but consistent."""
    fields = json.loads((source / "snapshot.json").read_text())
    fields["tag"] = tag
    fields["platform"].update(platform)
    import msgspec

    from forkd.specs.models import Snapshot

    manifest = msgspec.convert(fields, Snapshot)
    (target / "snapshot.json").write_bytes(encode(msgspec.structs.replace(manifest, content=content_id(manifest))))


def test_the_damaged_copy_itself_is_fine_until_damaged(forkd: Forkd, broken: Callable[[str], Path]) -> None:
    target = broken("copy")
    decode("copy", (target / "snapshot.json").read_bytes())
    assert forkd("eval", "--tag", "copy", "--", "1+1").stdout == "2\n"


@pytest.mark.parametrize(
    ("args", "status", "word"),
    [
        (["fork", "--tag", "nothing-here", "-n", "1"], 1, "no snapshot 'nothing-here'"),
        (["fork", "--tag", "../etc", "-n", "1"], 2, "not allowed"),
        (["fork", "--tag", PARENT, "-n", "0"], 2, "-n"),
        (["fork", "--tag", PARENT, "-n", "100000"], 2, "-n"),
        (["fork", "--tag", PARENT, "-n", "2", "--hugepages"], 2, "--live-fork"),
        (["snapshot", "--tag", "new", "--rootfs", "/no/such/file"], 2, "/no/such/file"),
        (["snapshot", "--tag", "new", "--rootfs", "/etc/hostname", "--vcpus", "99"], 2, "99 virtual CPUs"),
        (["snapshot", "--tag", "new", "--rootfs", "/etc/hostname", "--mem-size-mib", "1"], 2, "1 MiB"),
        (["snapshot", "--tag", "new", "--rootfs", "/etc"], 2, "a rootfs is a file"),
        (["snapshot", "--tag", "new", "--rootfs", "/etc/hostname"], 2, "rootfs /etc/hostname is not an ext4 image"),
        (["from-image", "debian:bookworm", "--tag", "new", "--kernel", "/no/kernel"], 2, "/no/kernel"),
        (["snapshot", "--tag", PARENT, "--rootfs", "/etc/hostname"], 1, "exists already"),
        (["from-image", "Not:An:Image!", "--tag", "new"], 2, "no rootfs builder"),
        (["rmi", "nothing-here"], 1, "no snapshot"),
        (["exec", "--", "true"], 2, "--tag"),
    ],
)
def test_bad_arguments(forkd: Forkd, data_dir: Path, args: list[str], status: int, word: str) -> None:
    before = sorted(os.listdir(data_dir / "snapshots"))
    assert_refused(forkd(*args), status, word)
    assert sorted(os.listdir(data_dir / "snapshots")) == before


def test_exec_passes_on_how_the_command_ended(forkd: Forkd) -> None:
    assert forkd("exec", "--tag", PARENT, "--", "sh", "-c", "echo hi; exit 7").returncode == 7
    missing = forkd("exec", "--tag", PARENT, "--", "no-such-program")
    assert_refused(missing, 127, "no-such-program")
    assert forkd("exec", "--tag", PARENT, "--timeout-secs", "1", "--", "sleep", "9").returncode == 124


def test_a_corrupt_manifest(forkd: Forkd, broken: Callable[[str], Path]) -> None:
    (broken("corrupt") / "snapshot.json").write_text("{ not json")
    assert_refused(forkd("fork", "--tag", "corrupt", "-n", "1"), 1, "corrupt", "snapshot.json")
    listing = json.loads(forkd("images", "--json").stdout)
    row = next(row for row in listing if row["tag"] == "corrupt")
    assert (row["status"], row["bootable"]) == ("failed", False)


def test_an_altered_manifest(forkd: Forkd, broken: Callable[[str], Path]) -> None:
    path = broken("altered") / "snapshot.json"
    path.write_text(path.read_text().replace('"vcpus": 1', '"vcpus": 2'))
    assert_refused(forkd("fork", "--tag", "altered", "-n", "1"), 1, "altered")


def test_a_truncated_memory_image(forkd: Forkd, broken: Callable[[str], Path]) -> None:
    image = broken("short") / "memory.bin"
    image.unlink()
    image.write_bytes(b"x" * 4096)
    assert_refused(forkd("fork", "--tag", "short", "-n", "1"), 1, "memory.bin", "4096 bytes")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"cpu": "host:Another CPU"}, "CPU"),
        ({"engine_version": "9.1.0"}, "QEMU version"),
        ({"accelerator": "kvm"}, "accelerator"),
        ({"tsc_khz": 1}, "TSC"),
        ({"engine": "vmware"}, "no engine"),
    ],
)
def test_a_snapshot_from_another_host(
    forkd: Forkd, data_dir: Path, broken: Callable[[str], Path], fields: dict[str, object], word: str
) -> None:
    target = broken("foreign")
    rewrite(target, data_dir / "snapshots" / PARENT, tag="foreign", **fields)
    done = forkd("fork", "--tag", "foreign", "-n", "1")
    assert done.returncode in (1, 2)
    assert_refused(done, done.returncode, word)


def test_no_qemu_on_path(forkd: Forkd, tmp_path: Path) -> None:
    done = forkd("fork", "--tag", PARENT, "-n", "1", env={"PATH": str(tmp_path)})
    assert_refused(done, 1, "qemu-system-x86_64 is not on PATH", "apt-get install qemu-system-x86")


@pytest.mark.root
def test_a_full_disk_leaves_no_snapshot(data_dir: Path, tmp_path: Path, forkd: Forkd) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", small], check=True)
    try:
        for name in ("kernels", "rootfs", "cache"):
            (small / name).symlink_to(data_dir / name)
        rootfs = parent_disk(data_dir)
        env = {"FORKD_DATA_DIR": str(small)}
        done = forkd("snapshot", "--tag", "full", "--rootfs", str(rootfs), "--mem-size-mib", "256", env=env)
        assert_refused(done, 1, "no space left")
        assert json.loads(forkd("images", "--json", env=env).stdout) == []
        forkd("cleanup", "--yes", env=env)
        assert [path.name for path in (small / "snapshots").iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", small], check=True)
