"""`forkd run`: the first run makes the parent, once for all who ask; a changed image is not answered by the old one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm
Forkd = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def image(tmp_path: Path, data_dir: Path, forkd: Forkd) -> Iterator[Path]:
    """A root file system of one static program; the parents made of it are removed."""
    root = tmp_path / "image"
    for name in ("bin", "etc", "root", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "bin/busybox").write_bytes((data_dir / "kernels/default/busybox").read_bytes())
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat"):
        (root / "bin" / name).symlink_to("busybox")
    before = tags(forkd)
    yield root
    forkd("rmi", *(tags(forkd) - before))


def tags(forkd: Forkd) -> set[str]:
    return {row["tag"] for row in json.loads(forkd("images", "--json").stdout)}


def test_two_first_runs_at_once_share_a_parent_and_a_changed_image_gets_its_own(image: Path, forkd: Forkd) -> None:
    before = tags(forkd)

    def word() -> str:
        done = forkd("run", "--image", str(image), "--", "cat", "/etc/word")
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    (image / "etc/word").write_text("one\n")
    with ThreadPoolExecutor(2) as pool:
        assert [each.result() for each in [pool.submit(word) for _ in range(2)]] == ["one\n", "one\n"]
    assert len(made := tags(forkd) - before) == 1
    (image / "etc/word").write_text("two, and longer\n")
    assert (word(), word()) == ("two, and longer\n", "two, and longer\n")
    assert len(tags(forkd) - before - made) == 1


def test_what_is_no_kernel_is_refused_although_the_image_has_a_parent(
    image: Path, forkd: Forkd, tmp_path: Path
) -> None:
    (tmp_path / "no-kernel").write_text("not one")
    run = ("run", "--image", str(image))
    assert forkd(*run, "--", "cat", "/etc/hostname").stderr.count("booting") == 1
    refused = forkd(*run, "--kernel", str(tmp_path / "no-kernel"), "--", "true")
    assert (refused.returncode, "no Linux kernel" in refused.stderr) == (2, True)
