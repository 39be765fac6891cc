"""Networking with root: run inside a network namespace of the tests' own, so that the real host is never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [name for name in ("ip", "nft", "unshare", "nsenter") if shutil.which(name) is None]


pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


def run_inside(data_dir: Path, marks: str) -> str:
    pytest_inside = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [
            "unshare",
            "--net",
            "--mount",
            "--propagation",
            "private",
            *pytest_inside,
            str(HERE / "in_namespace/scenarios.py"),
        ],
        env={**os.environ, "FORKD_DATA_DIR": str(data_dir)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    return done.stdout


def test_the_scenarios_hold_on_a_host_that_is_a_namespace(data_dir: Path) -> None:
    assert "11 passed" in run_inside(data_dir, "not slow")


@pytest.mark.slow
def test_three_hundred_namespaces_come_and_go_on_a_host_that_is_a_namespace(data_dir: Path) -> None:
    assert "1 passed" in run_inside(data_dir, "slow")
