"""A data directory that cannot be one is a sentence with a hint, whatever the verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_forkd


@pytest.mark.parametrize("verb", [["images"], ["ls"], ["cleanup"], ["doctor"], ["daemon", "--audit-log", "none"]])
def test_a_data_directory_that_cannot_be_made_is_said_in_a_sentence(verb: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (Path("/proc/nope"), tmp_path / "file"):
        done = run_forkd(where, *verb)
        assert done.returncode == 1
        assert f"{where} cannot be the data directory" in done.stderr and "FORKD_DATA_DIR" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_socket_that_cannot_be_made_ends_the_daemon_with_a_sentence(tmp_path: Path) -> None:
    done = run_forkd(tmp_path, "daemon", "--bind", "none", "--socket", "/proc/x/y.sock")
    assert (done.returncode, "cannot listen on /proc/x/y.sock" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr
