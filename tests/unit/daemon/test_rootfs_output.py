"""A built disk copied to a file of the host: what hinders it is said, and a file that is there stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.daemon.routes.snapshots import _copy
from forkd.specs.errors import BadInput, Conflict


async def test_the_copy_is_made_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"disk")
    await _copy(tmp_path / "disk", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"disk"


async def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"disk")
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(Conflict, match="exists already"):
        await _copy(tmp_path / "disk", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"mine"


async def test_a_directory_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"disk")
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        await _copy(tmp_path / "disk", tmp_path / "nowhere" / "out")
