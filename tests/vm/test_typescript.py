"""The TypeScript SDK: its own tests against a real daemon, what npm would publish, and parity with Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SDK = ROOT / "sdk/typescript"
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node 18 and npm: apt-get install npm")


def npm(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["npm", "--silent", "--no-audit", "--no-fund", *args]
    env = {**os.environ, **environ, "npm_config_update_notifier": "false"}
    return subprocess.run(command, cwd=SDK, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built() -> Path:
    """The SDK compiled, under ``strict``."""
    if not (SDK / "node_modules/typescript").exists():
        done = npm("install", "--no-package-lock")
        assert done.returncode == 0, done.stderr + done.stdout
    done = npm("run", "build")
    assert done.returncode == 0, done.stderr + done.stdout
    return SDK / "dist"


@pytest.mark.vm
def test_its_own_tests_pass_against_a_real_daemon(built: Path, daemon: Any) -> None:
    done = npm("test", FORKD_URL=daemon.url, FORKD_TAG="python-numpy")
    assert done.returncode == 0, done.stdout + done.stderr + daemon.said()
    assert "# fail 0" in done.stdout or "fail 0" in done.stdout


def test_what_npm_would_publish_is_the_library_and_nothing_else(built: Path) -> None:
    listed = npm("pack", "--dry-run", "--json")
    assert listed.returncode == 0, listed.stderr
    (package,) = json.loads(listed.stdout)
    names = {row["path"] for row in package["files"]}
    assert {"dist/index.js", "dist/index.d.ts", "README.md", "package.json"} <= names
    assert not any(name.startswith(("src/", "test/")) for name in names)
    assert "dependencies" not in json.loads((SDK / "package.json").read_text())


def test_both_sdks_have_every_operation_of_the_api(built: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "build/parity.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
