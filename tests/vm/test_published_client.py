"""The client people already have: the published package, unchanged, in its own environment, against our daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vm
ROOT = Path(__file__).parents[2]
VERSION = "0.5.3"


@pytest.fixture(scope="session")
def published() -> Path:
    """A Python that has the published client and nothing of ours."""
    venv = ROOT / ".work" / f"published-{VERSION}"
    done = venv / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", f"forkd=={VERSION}"]
        subprocess.run(pip, check=True)
        done.touch()
    return venv / "bin" / "python"


def test_the_published_client_drives_the_daemon(published: Path, daemon: Any) -> None:
    script = ROOT / "tests" / "third_party" / "published_client.py"
    environ = {"FORKD_URL": daemon.url, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(published), str(script)], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout + daemon.said()
    assert "published client ok" in done.stdout
