"""dist/forkd alone in an empty root that has QEMU and a kernel: no Python, no package manager, no distribution."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.sdk.controller import Controller
from tests.conftest import ROOT, parent_disk

BINARY = ROOT / "dist" / "forkd"
pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root"),
    pytest.mark.skipif(not BINARY.exists(), reason="no dist/forkd here: make binary"),
]
# QEMU, and the small tools forkd asks of a host: one makes disks, one ties a VMM to its owner, a shell guards programs.
PROGRAMS = ("qemu-system-x86_64", "mkfs.ext4", "setpriv", "sh")
FIRMWARE = ("bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin")
ENTER = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" /forkd "$@"'


class Cell:
    """An empty root; what is mounted in it is seen by the command that runs there and by nobody else."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def command(self, *args: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", ENTER, str(self.root), *args]

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*args), env=self.env(), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
        return done

    def env(self) -> dict[str, str]:
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "FORKD_DATA_DIR": "/data", "HOME": "/"}


def libraries(program: Path) -> set[Path]:
    """What the dynamic linker would load for it, the linker included."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    return {Path(word) for word in re.findall(r"(/\S+)", listed)}


def copy(source: Path, root: Path) -> None:
    target = root / source.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


@pytest.fixture(scope="module")
def cell(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    root = tmp_path_factory.mktemp("cell")
    for name in ("proc", "dev", "tmp", "data"):
        (root / name).mkdir()
    (root / "bin").symlink_to("usr/bin")
    wanted: set[Path] = libraries(BINARY)
    for name in PROGRAMS:
        program = Path(shutil.which(name) or "")
        copy(program, root)
        wanted |= libraries(program)
    for path in (*wanted, *Path("/usr/lib/x86_64-linux-gnu/qemu").glob("accel-*.so")):
        copy(path, root)
    for name in FIRMWARE:
        found = next(
            path for path in (Path("/usr/share/qemu") / name, Path("/usr/share/seabios") / name) if path.exists()
        )
        (root / "usr/share/qemu").mkdir(parents=True, exist_ok=True)
        shutil.copy(found, root / "usr/share/qemu" / name)
    shutil.copytree(data_dir / "kernels", root / "data/kernels", symlinks=True)
    shutil.copy(BINARY, root / "forkd")
    tree = root.parent / "tree"
    tree.mkdir(exist_ok=True)
    subprocess.run(["debugfs", "-R", f"rdump / {tree}", str(parent_disk(data_dir))], check=True, capture_output=True)
    subprocess.run(["tar", "-C", str(tree), "-cf", str(root / "image.tar"), "."], check=True)
    shutil.rmtree(tree)
    yield Cell(root)
    shutil.rmtree(root)


def test_everything_works_there(cell: Cell) -> None:
    assert not list(cell.root.rglob("python*"))
    doctor = json.loads(
        subprocess.run(cell.command("doctor", "--json"), env=cell.env(), capture_output=True, text=True).stdout
    )
    assert {row["name"]: row["status"] for row in doctor["checks"]}["qemu"] == "PASS"
    assert "kernel" in cell.run("setup").stdout
    made = cell.run("from-image", "/image.tar", "--tag", "py", "--mem-size-mib", "256", "--warmup", "import json")
    assert "py" in made.stdout
    forked = json.loads(cell.run("fork", "--tag", "py", "-n", "5", "--eval", "json.dumps(6 * 7)", "--json").stdout)
    assert json.dumps(forked).count("'42'") == 5, forked
    cell.run("snapshot-diff", "--from", "py", "--tag", "noted", "--exec", "sh -c 'echo hello > /root/note'")
    assert cell.run("exec", "--tag", "noted", "--", "cat", "/root/note").stdout == "hello\n"
    cell.run("pack", "--tag", "noted", "--out", "/tmp/noted.forkd")
    cell.run("unpack", "/tmp/noted.forkd", "--tag", "unpacked")
    assert cell.run("exec", "--tag", "unpacked", "--", "cat", "/root/note").stdout == "hello\n"
    assert list((cell.root / "tmp").glob("_MEI*")) == []


def test_a_daemon_there_serves_an_sdk_here(cell: Cell, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as out:
        daemon = subprocess.Popen(
            cell.command("daemon", "--bind", "127.0.0.1:0", "--end-sandboxes"), env=cell.env(), stderr=out
        )
    try:
        deadline = time.monotonic() + 120
        while "stop it with" not in (said := log.read_text()):
            assert daemon.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        url = next(word for word in said.split() if word.startswith("http"))
        with Controller(url) as controller:
            (sandbox,) = controller.spawn_sandboxes("py", 1)
            controller.eval_code(sandbox["id"], "x = 41")
            branched = controller.branch_sandbox(sandbox["id"], mode="live", tag="py-later")
            assert branched["status"] == "ready"
            children = controller.spawn_sandboxes("py-later", 2)
            assert [controller.eval_code(child["id"], "x + 1")["result"] for child in children] == ["42", "42"]
            listed = json.loads(cell.run("ls", "--json", "--daemon-url", url).stdout)
            assert {row["id"] for row in listed} == {sandbox["id"], *(child["id"] for child in children)}
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0, log.read_text()
