"""`forkd plugin new` writes plugins that work, and `forkd plugin check` tells good ones from bad ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkd.testing.skeleton import KINDS
from tests.conftest import run_forkd


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_passes_its_own_test_and_the_check(kind: str, tmp_path: Path) -> None:
    os.umask(0o022)
    made = run_forkd(tmp_path, "plugin", "new", kind, "my_own", "--folder", str(tmp_path))
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "my_own"
    own = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, capture_output=True, text=True)
    assert own.returncode == 0, own.stdout
    assert "passed" in own.stdout
    checked = run_forkd(tmp_path, "plugin", "check", str(folder / "my_own.py"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.endswith("my_own: in order\n")
    assert "skeleton" not in (folder / "my_own.py").read_text().lower()


def test_a_name_that_cannot_be_one_or_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    for name in ("Not-a-name", "class", "_x", "../x"):
        done = run_forkd(tmp_path, "plugin", "new", "command", name, "--folder", str(tmp_path))
        assert (done.returncode, "cannot be a plugin's name" in done.stderr) == (2, True)
    (tmp_path / "taken").mkdir()
    assert run_forkd(tmp_path, "plugin", "new", "command", "taken", "--folder", str(tmp_path)).returncode == 2
    assert "no kind 'hat'" in run_forkd(tmp_path, "plugin", "new", "hat", "x", "--folder", str(tmp_path)).stderr


@pytest.mark.slow  # each case of the suite waits for a source that never runs again
def test_a_mode_that_does_not_resume_its_source_fails_the_check(tmp_path: Path) -> None:
    os.umask(0o022)
    run_forkd(tmp_path, "plugin", "new", "branch-mode", "stuck", "--folder", str(tmp_path))
    file = tmp_path / "stuck" / "stuck.py"
    file.write_text(file.read_text().replace("await machine.resume()", "pass"))
    checked = run_forkd(tmp_path, "plugin", "check", str(file))
    assert checked.returncode == 1
    assert "plugin stuck breaks its contract" in checked.stderr


def test_a_plugin_that_does_not_load_is_no_subject_for_a_check(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\n")
    (tmp_path / "bad.py").chmod(0o600)
    done = run_forkd(tmp_path, "plugin", "check", str(tmp_path / "bad.py"))
    assert (done.returncode, "implements no hook" in done.stderr) == (1, True)
    assert "no plugin 'nobody'" in run_forkd(tmp_path, "plugin", "check", "nobody").stderr
