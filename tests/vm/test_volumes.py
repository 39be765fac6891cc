"""Volumes: disks besides the rootfs, the same for all children, written to by none; and a parent with a network."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkd.sdk.async_controller import AsyncController
from tests.conftest import parent_disk, run_forkd

pytestmark = pytest.mark.vm
Tags = Callable[[str], str]


def image(work: Path, name: str, **contents: str) -> Path:
    """An ext4 image with some files."""
    tree = work / name
    tree.mkdir()
    for file, text in contents.items():
        (tree / file).write_text(text)
    path = work / f"{name}.ext4"
    subprocess.run(["mkfs.ext4", "-q", "-d", str(tree), str(path), "8M"], check=True, capture_output=True)
    return path


async def shell(controller: AsyncController, child: dict[str, Any], line: str) -> str:
    done = await controller.exec_command(child["id"], ["sh", "-c", line])
    return str(done["stdout"] + done["stderr"])


async def test_children_have_their_volumes_and_keep_what_they_write_to_themselves(
    controller: AsyncController, fresh_tag: Tags, data_dir: Path, tmp_path: Path
) -> None:
    notes, tables = image(tmp_path, "notes", file="alpha\n"), image(tmp_path, "tables", file="beta\n")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (notes, tables)]
    tag, later, packed = fresh_tag("volumes"), fresh_tag("later"), tmp_path / "later.forkd-snapshot.tar.zst"
    made = run_forkd(
        *(
            data_dir,
            "snapshot",
            "--tag",
            tag,
            "--rootfs",
            str(parent_disk(data_dir)),
            "--mem-size-mib",
            "256",
            "--json",
        ),
        *("--volume", f"{tables}:/data/deep:ro", "--volume", f"{notes}:/data"),
    )
    assert made.returncode == 0, made.stderr
    volumes = json.loads(made.stdout)["volumes"]
    assert [(one["guest_path"], one["read_only"]) for one in volumes] == [("/data/deep", True), ("/data", False)]
    before = {path: path.stat().st_mtime_ns for path in (data_dir / "rootfs").glob("*.ext4")}

    for spawn in ("restore", "template"):
        first, second = await controller.spawn_sandboxes(tag, 2, spawn=spawn)
        assert await shell(controller, first, "cat /data/file /data/deep/file") == "alpha\nbeta\n"
        assert await shell(controller, first, "echo mine >> /data/file; rm -r /data/lost+found; cat /data/file") == (
            "alpha\nmine\n"
        )
        assert "Read-only" in await shell(controller, first, "touch /data/deep/new")
        assert await shell(controller, second, "cat /data/file; ls -d /data/lost+found") == "alpha\n/data/lost+found\n"
        if spawn == "template":
            await controller.branch_sandbox(first["id"], tag=later, mode="live")
        for child in (first, second):
            await controller.kill_sandbox(child["id"])

    (child,) = await controller.spawn_sandboxes(later, 1)
    assert await shell(controller, child, "cat /data/file /data/deep/file") == "alpha\nmine\nbeta\n"
    await controller.kill_sandbox(child["id"])

    done = run_forkd(data_dir, "pack", "--tag", later, "--out", str(packed), "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["beside"]) == 3
    there = tmp_path / "there"
    assert run_forkd(there, "unpack", str(packed)).returncode == 0
    told = run_forkd(there, "exec", "--tag", later, "--", "cat", "/data/file", "/data/deep/file")
    assert told.stdout == "alpha\nmine\nbeta\n", told.stderr

    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in (notes, tables)] == digests
    assert {path: path.stat().st_mtime_ns for path in before} == before


async def test_as_many_volumes_as_there_may_be(
    controller: AsyncController, fresh_tag: Tags, data_dir: Path, tmp_path: Path
) -> None:
    disk = image(tmp_path, "disk", file="x")
    wanted = [{"host_path": str(disk), "guest_path": f"/v/{index:02}", "read_only": True} for index in range(21)]
    tag = fresh_tag("many")
    await controller.create_snapshot(tag, rootfs=str(parent_disk(data_dir)), mem_size_mib=256, volumes=wanted)
    (child,) = await controller.spawn_sandboxes(tag, 1, spawn="restore")
    assert await shell(controller, child, "cat /v/*/file") == "x" * 21


def test_volumes_that_cannot_be_had_are_refused(data_dir: Path, tmp_path: Path) -> None:
    good = image(tmp_path, "good")
    dirty, other = tmp_path / "dirty.ext4", tmp_path / "other.ext4"
    dirty.write_bytes(good.read_bytes())
    subprocess.run(["debugfs", "-w", "-R", "feature needs_recovery", str(dirty)], check=True, capture_output=True)
    other.write_bytes(bytes(1 << 20))
    for spec, word in (
        (f"{good}", "HOST:GUEST"),
        (f"{tmp_path}/none:/data", "cannot be read"),
        (f"{tmp_path}:/data", "mkfs.ext4 -d"),
        (f"{other}:/data", "not an ext4 image"),
        (f"{dirty}:/data", "not unmounted"),
        (f"{good}:data", "cannot be at 'data'"),
        (f"{good}:/a/../b", "cannot be at"),
        (f"{good}:/proc/x", "cannot be at"),
        (f"{good}:/a b", "cannot be at"),
    ):
        done = run_forkd(
            data_dir, "snapshot", "--tag", "never", "--rootfs", str(parent_disk(data_dir)), "--volume", spec
        )
        assert (done.returncode, word in done.stderr) == (2, True), (spec, done.stderr)
    twice = ("--volume", f"{good}:/a", "--volume", f"{good}:/a:ro")
    assert "same path" in run_forkd(data_dir, "snapshot", "--tag", "never", "--rootfs", str(good), *twice).stderr
    many = [word for index in range(22) for word in ("--volume", f"{good}:/v{index}")]
    assert "at most 21" in run_forkd(data_dir, "snapshot", "--tag", "never", "--rootfs", str(good), *many).stderr


@pytest.fixture
def tap() -> Iterator[str]:
    name = f"ft{secrets.token_hex(4)}"
    subprocess.run(["ip", "tuntap", "add", name, "mode", "tap"], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    try:
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", name], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="taps need root")
async def test_a_parent_is_on_the_hosts_tap_while_it_warms_up_and_its_children_are_not(
    controller: AsyncController, fresh_tag: Tags, data_dir: Path, tap: str
) -> None:
    refused = run_forkd(
        *(data_dir, "snapshot", "--tag", "never", "--rootfs", str(parent_disk(data_dir)), "--tap", "no-such-tap")
    )
    assert (refused.returncode, "--network nat" in refused.stderr) == (2, True)
    tag = fresh_tag("tapped")
    told = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('10.42.0.1', 9))"
    await controller.create_snapshot(
        tag,
        rootfs=str(parent_disk(data_dir)),
        mem_size_mib=256,
        tap=tap,
        warmup=[told, "seen = s.getsockname()[0]; s.send(b'x')"],
    )
    received = Path(f"/sys/class/net/{tap}/statistics/rx_packets")
    packets = int(received.read_text())
    assert packets > 0
    (child,) = await controller.spawn_sandboxes(tag, 1)
    answer = await controller.eval_code(child["id"], "[seen, s.send(b'y')]")
    assert answer["result"] == "['10.42.0.2', 1]"
    assert int(received.read_text()) == packets  # its device leads nowhere
