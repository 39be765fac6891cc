"""The inventory on a disk that is full, or a file that is none: errors of ours, and never one from a task that ends."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forkd.inventory import SqliteInventory, Workspace
from forkd.specs.errors import Conflict, MachineGone, NoSpace
from forkd.specs.models import WorkspaceInfo
from forkd.specs.requests import CreateWorkspace


class FullDisk:
    """A connection whose every write fails as SQLite's does on a full disk."""

    def execute(self, *_: Any) -> Any:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteInventory:
    inventory = SqliteInventory(tmp_path / "inventory.db")
    inventory.close()
    monkeypatch.setattr(inventory, "_db", FullDisk())
    return inventory


def workspace() -> Workspace:
    times = {"created_at_unix": 1, "last_active_unix": 1}
    info = WorkspaceInfo(id="ws-1", name="w", source_snapshot_tag="t", **times)
    return Workspace(info, CreateWorkspace(name="w", snapshot_tag="t"))


def test_a_full_disk_is_said_in_our_words(full: SqliteInventory) -> None:
    with pytest.raises(NoSpace):
        full.save_workspace(workspace())
    with pytest.raises(NoSpace):
        full.remove_workspace("w")


def test_a_sandbox_ends_on_a_full_disk_too(full: SqliteInventory, caplog: pytest.LogCaptureFixture) -> None:
    full.remove("sb-1")
    assert "sb-1 has ended but stays written down" in caplog.text


def test_a_file_that_is_no_inventory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "inventory.db"
    path.write_bytes(b"something else" * 100)
    with pytest.raises(Conflict, match="is no inventory"):
        SqliteInventory(path)
    assert path.read_bytes() == b"something else" * 100


def test_a_vmm_that_has_just_ended_is_a_machine_gone(tmp_path: Path) -> None:
    inventory = SqliteInventory(tmp_path / "inventory.db")
    gone = os.spawnlp(os.P_WAIT, "true", "true") or 2**22 + 1  # above any pid there can be
    sandbox = SimpleNamespace(id="sb-1", source=object(), machine=SimpleNamespace(pid=gone))
    with pytest.raises(MachineGone):
        inventory.save(cast(Any, sandbox))
    inventory.close()


def damage(path: Path, statement: str) -> SqliteInventory:
    """An inventory with two workspaces, changed behind its back."""
    inventory = SqliteInventory(path)
    for name in ("a", "b"):
        info = WorkspaceInfo(id=name, name=name, source_snapshot_tag="t", created_at_unix=1, last_active_unix=1)
        inventory.save_workspace(Workspace(info, CreateWorkspace(name=name, snapshot_tag="t")))
    inventory.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(statement)
    return SqliteInventory(path)


@pytest.mark.parametrize("text", ["'{'", "CAST(x'ff' AS TEXT)"])
def test_a_row_that_cannot_be_understood_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    inventory = damage(tmp_path / "inventory.db", f"UPDATE workspaces SET info = {text} WHERE name = 'a'")
    inventory._db.execute(f"INSERT INTO sandboxes VALUES ('sb-1', 1, 1, {text}, '{{}}')")
    assert [each.info.name for each in inventory.workspaces()] == ["b"]
    assert inventory.rows() == []
    assert "workspace a is left out" in caplog.text and "sandbox sb-1 is left out" in caplog.text
    inventory.close()


def test_a_damaged_page_is_said_in_our_words(tmp_path: Path) -> None:
    path = tmp_path / "inventory.db"
    damage(path, "PRAGMA wal_checkpoint(TRUNCATE)").close()
    with closing(sqlite3.connect(path)) as db:
        size = db.execute("PRAGMA page_size").fetchone()[0]
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'workspaces'").fetchone()[0]
    with open(path, "r+b") as out:
        out.seek((page - 1) * size)
        out.write(b"\xff" * size)
    inventory = SqliteInventory(path)
    with pytest.raises(Conflict, match="is no inventory"):
        inventory.workspaces()
    inventory.close()
