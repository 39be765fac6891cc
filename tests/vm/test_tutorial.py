"""The tutorial's commands, run in order as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import FORKD, ROOT, run_forkd

pytestmark = pytest.mark.vm
TAGS = ("from-afar", "crossroads", "noted")


def run_script(data_dir: Path, tmp_path: Path, blocks: list[str]) -> str:
    """Run shell commands in which ``forkd`` is the one under test; what they print."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "forkd"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(FORKD)} "$@"\n')
    program.chmod(0o755)
    script = "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + "\n".join(blocks)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FORKD_")}
    environ |= {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "FORKD_DATA_DIR": str(data_dir),
        "PYTHONPATH": str(ROOT),
    }
    for tag in TAGS:  # what a failed run may have left
        run_forkd(data_dir, "rmi", "--force", tag)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    daemon = tmp_path / "daemon.log"
    assert done.returncode == 0, done.stdout + done.stderr + (daemon.read_text() if daemon.exists() else "")
    return done.stdout


def test_the_readmes_first_commands_work(data_dir: Path, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().partition("## After `make demo`")[2]
    block = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    assert "forkd fork" in block
    assert "hello\n" in run_script(data_dir, tmp_path, [block])


def test_the_tutorial_works(data_dir: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/TUTORIAL.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 7
    said = run_script(data_dir, tmp_path, blocks)
    for words in ("45.0", "hello from", "remember", "half way there"):
        assert words in said, words
    assert said.count("half way there") == 5
