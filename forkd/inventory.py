"""The inventory: what the daemon runs, written down so that another daemon process can take it over."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from forkd.linux.process import start_time
from forkd.specs.errors import Conflict, HostNotReady, MachineGone, NoSpace
from forkd.specs.models import SandboxInfo, Snapshot, WorkspaceInfo
from forkd.specs.requests import CreateWorkspace

if TYPE_CHECKING:
    from forkd.sandbox import Sandbox

log = logging.getLogger("forkd")
VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, pid INTEGER NOT NULL, starttime INTEGER NOT NULL, source TEXT NOT NULL, info TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS workspaces (name TEXT PRIMARY KEY, made TEXT NOT NULL, info TEXT NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A sandbox as last written down: its VMM, the manifest of the snapshot it came from, what the API showed."""

    id: str
    pid: int
    starttime: int
    source: Snapshot
    info: SandboxInfo


@dataclass(slots=True)
class Workspace:
    """A workspace as written down: what the API shows, and what its sandbox was asked to be."""

    info: WorkspaceInfo
    made: CreateWorkspace


class Inventory(Protocol):
    """Where running sandboxes are written down."""

    def save(self, sandbox: Sandbox) -> None:
        """Write down a sandbox that is up, or whose ``info`` has changed. Quick enough to call from a task.

        Raises NoSpace, HostNotReady; MachineGone if its VMM has ended.
        """

    def remove(self, sandbox_id: str) -> None:
        """Forget a sandbox of which nothing is left. Never raises: a row too many is found out by who adopts."""

    def rows(self) -> list[Row]:
        """Every sandbox written down, oldest first; one whose row is damaged is left out.

        Raises Conflict, HostNotReady.
        """

    def workspaces(self) -> list[Workspace]:
        """Every workspace, by name; as ``rows`` otherwise."""

    def save_workspace(self, workspace: Workspace) -> None:
        """Write a workspace down for good: it is on the disk when this returns. Takes its time."""

    def remove_workspace(self, name: str) -> None:
        """Forget a workspace for good."""

    def close(self) -> None:
        """Let go of the file."""


class NoInventory:
    """For a process whose sandboxes end with it: there is nothing to remember."""

    def save(self, sandbox: Sandbox) -> None:
        """Nothing."""

    def remove(self, sandbox_id: str) -> None:
        """Nothing."""

    def rows(self) -> list[Row]:
        """None."""
        return []

    def workspaces(self) -> list[Workspace]:
        """None."""
        return []

    def save_workspace(self, workspace: Workspace) -> None:
        """Refused."""
        raise AssertionError("workspaces need a daemon")

    def remove_workspace(self, name: str) -> None:
        """Refused."""
        raise AssertionError("workspaces need a daemon")

    def close(self) -> None:
        """Nothing."""


class SqliteInventory:
    """One file, written ahead (WAL): a killed process loses nothing it has written, and never half a row.

    Sandboxes need not survive a power cut, which no machine survives either, so those writes wait for no disk;
    workspaces do, so theirs end with a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        """Open it, or make it. Raises Conflict for a file that is something else; NoSpace, HostNotReady."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._told():
            self._db = sqlite3.connect(path, isolation_level=None)
        # What is not UTF-8 fails when its row is understood, not when all of them are read.
        self._db.text_factory = lambda text: text.decode(errors="surrogateescape")
        try:
            with self._told():
                path.chmod(0o600)
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                found = self._db.execute("PRAGMA user_version").fetchone()[0]
                if found not in (0, VERSION):
                    raise Conflict(f"{path} has version {found}; this forkd reads {VERSION}", hint="use a newer forkd")
                self._db.executescript(_TABLES)
                self._db.execute(f"PRAGMA user_version={VERSION}")
        except BaseException:
            self._db.close()
            raise

    def save(self, sandbox: Sandbox) -> None:
        """Insert or replace its row; one without a snapshot (a parent being made) is nobody's to adopt."""
        if sandbox.source is None:
            return
        try:
            started = start_time(sandbox.machine.pid)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise MachineGone(f"the VMM of {sandbox.id} has ended") from error
        values = (
            sandbox.id,
            sandbox.machine.pid,
            started,
            msgspec.json.encode(sandbox.source.manifest).decode(),
            msgspec.json.encode(sandbox.info).decode(),
        )
        with self._told():
            self._db.execute("INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?, ?)", values)

    def remove(self, sandbox_id: str) -> None:
        """Delete its row."""
        try:
            self._db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))
        except sqlite3.Error as error:
            log.error("%s: sandbox %s has ended but stays written down: %s", self._path, sandbox_id, error)

    def rows(self) -> list[Row]:
        """Every sandbox written down, oldest first."""
        rows = []
        for sandbox_id, pid, starttime, source, info in self._read(
            "SELECT id, pid, starttime, source, info FROM sandboxes ORDER BY rowid"
        ):
            with self._readable(f"sandbox {sandbox_id}"):
                manifest = msgspec.json.decode(source, type=Snapshot)
                rows.append(Row(sandbox_id, pid, starttime, manifest, msgspec.json.decode(info, type=SandboxInfo)))
        return rows

    def workspaces(self) -> list[Workspace]:
        """Decode them all."""
        found = []
        for name, made, info in self._read("SELECT name, made, info FROM workspaces ORDER BY name"):
            with self._readable(f"workspace {name}"):
                request = msgspec.json.decode(made, type=CreateWorkspace)
                found.append(Workspace(msgspec.json.decode(info, type=WorkspaceInfo), request))
        return found

    def save_workspace(self, workspace: Workspace) -> None:
        """Insert or replace, then wait for the disk."""
        values = (
            workspace.info.name,
            msgspec.json.encode(workspace.made).decode(),
            msgspec.json.encode(workspace.info).decode(),
        )
        with self._told():
            self._db.execute("INSERT OR REPLACE INTO workspaces VALUES (?, ?, ?)", values)
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def remove_workspace(self, name: str) -> None:
        """Delete, then wait for the disk."""
        with self._told():
            self._db.execute("DELETE FROM workspaces WHERE name = ?", (name,))
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _read(self, query: str) -> list[tuple[Any, ...]]:
        with self._told():
            return self._db.execute(query).fetchall()

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """What cannot be understood is left out, so that one damaged row does not keep the others from their owner."""
        try:
            yield
        except (msgspec.MsgspecError, UnicodeError) as error:
            log.error("%s: %s is left out, as what is written about it is damaged: %s", self._path, what, error)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's errors as ours: nothing else may come out, as tasks that end the daemon if they fail write here."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                hint = "free some space: forkd prune, forkd rmi, forkd cleanup"
                raise NoSpace(f"no space left for {self._path}", hint=hint) from error
            raise HostNotReady(f"{self._path} cannot be read or written: {error}") from error
        except sqlite3.DatabaseError as error:
            hint = "move it away: workspaces in it are forgotten, their snapshots stay"
            raise Conflict(f"{self._path} is no inventory: {error}", hint=hint) from error
