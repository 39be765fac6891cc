"""How a sandbox or a snapshot differs from another one: files, processes, listening ports, memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from forkd.ops.awake import awake
from forkd.ops.files import MAX_DEPTH, list_files, read_file
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.stats import stats
from forkd.runtime import Runtime
from forkd.sandbox import end_sandbox
from forkd.specs.errors import BadInput, ForkdError, GuestDenied, GuestFileNotFound, SandboxNotFound
from forkd.specs.models import FileEntry, GuestProcess, SandboxDiff
from forkd.store.chain import resolve

NOT_FILES = {"/proc", "/sys", "/dev"}
MAX_CHANGES = 10_000
MAX_FOLDERS = 50_000
MAX_READ = 1 << 20
AT_ONCE = 16
LISTENING = "0A"
_Folder = dict[str, FileEntry]


async def diff(runtime: Runtime, reference: str, against: str | None = None) -> SandboxDiff:
    """What ``reference`` has, or has otherwise, than ``against``: sandboxes or snapshots; the one it came from if not
    given.

    A snapshot is looked at in a child that ends then. Files count as changed if type, owner, permissions, size or time
    of change of contents differ; nothing is read. Of a directory that only one side has, only itself is named.
    """
    async with _side(runtime, reference) as one, _side(runtime, against or _origin(runtime, reference)) as other:
        others = None if one.lasts and not other.lasts else await _memory(runtime, other, one)
        found = SandboxDiff(
            id=one.name,
            against=other.name,
            changed_memory_bytes=await _memory(runtime, one, other),
            against_changed_memory_bytes=others,
        )
        now, then = await _processes(runtime, one.id), await _processes(runtime, other.id)
        found.processes_started = [each for each in now if each not in then]
        found.processes_ended = [each for each in then if each not in now]
        ports, before = await _ports(runtime, one.id), await _ports(runtime, other.id)
        found.ports_opened, found.ports_closed = sorted(ports - before), sorted(before - ports)
        await _Walk(runtime, one.id, other.id, found).run()
    return found


@dataclass(frozen=True, slots=True)
class _Side:
    """A sandbox to look at, how it is called, the snapshot it came from, and whether it lasts."""

    id: str
    name: str
    tag: str
    lasts: bool


def _origin(runtime: Runtime, reference: str) -> str:
    """The snapshot a sandbox was forked from, or another snapshot builds on."""
    try:
        return runtime.sandbox(reference).info.snapshot_tag
    except SandboxNotFound:
        if not runtime.snapshots.path(reference).exists():
            raise
    parent = runtime.snapshots.load(reference).manifest.parent
    if parent is None:
        raise BadInput(f"snapshot {reference!r} builds on no other", hint="say with what to compare it")
    return parent.tag


async def _memory(runtime: Runtime, side: _Side, other: _Side) -> int:
    """Bytes a sandbox has written since it was forked; of a snapshot, those in layers the other does not build on."""
    if side.lasts:
        written: int = (await stats(runtime, side.id))["guest_private_bytes"]
        return written
    shared = {layer.manifest.content for layer in resolve(runtime.snapshots, other.tag)}
    own = (layer.manifest for layer in resolve(runtime.snapshots, side.tag))
    return sum(layer.memory.size for layer in own if layer.content not in shared)


@asynccontextmanager
async def _side(runtime: Runtime, reference: str) -> AsyncIterator[_Side]:
    """A sandbox, awake, or a child of a snapshot, which is ended on leaving."""
    try:
        known = runtime.sandbox(reference)
    except SandboxNotFound:
        if not runtime.snapshots.path(reference).exists():
            raise
    else:
        async with awake(runtime, known.id):
            yield _Side(known.id, known.id, known.info.snapshot_tag, lasts=True)
        return
    row = (await fork(runtime, reference, 1, ForkOptions()))[0]
    if row.sandbox is None:
        assert row.error is not None
        raise row.error
    try:
        yield _Side(row.sandbox.id, reference, reference, lasts=False)
    finally:
        with trio.CancelScope(shield=True):
            await end_sandbox(row.sandbox)


class _Walk:
    """Both trees side by side, directory by directory, some at once."""

    def __init__(self, runtime: Runtime, one: str, other: str, found: SandboxDiff) -> None:
        self._runtime = runtime
        self._sides = one, other
        self._found = found
        self._waiting = [("/", 1)]
        self._folders = 0

    async def run(self) -> None:
        """Fill in the files."""
        while self._waiting and not self._found.truncated:
            batch, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            rows = await self._look([path for path, _ in batch])
            for path, depth in batch:
                mine, theirs = (rows[side, path] for side in self._sides)
                if mine is None or theirs is None:
                    self._found.unread.append(path)
                else:
                    self._compare(mine, theirs, depth)
            changes = len(self._found.added) + len(self._found.changed) + len(self._found.removed)
            self._folders += len(batch)
            self._found.truncated = changes > MAX_CHANGES or self._folders > MAX_FOLDERS
        for paths in (self._found.added, self._found.changed, self._found.removed, self._found.unread):
            paths.sort()
            del paths[MAX_CHANGES:]

    async def _look(self, paths: list[str]) -> dict[tuple[str, str], _Folder | None]:
        """What is in each directory on each side; None for one that is too large, or gone meanwhile."""
        rows: dict[tuple[str, str], _Folder | None] = {}
        failed: list[ForkdError] = []

        async def look(side: str, path: str) -> None:
            try:
                entries = await list_files(self._runtime, side, path)
                rows[side, path] = {row.name_b64 or row.name: row for row in entries if row.path not in NOT_FILES}
            except (BadInput, GuestDenied, GuestFileNotFound):
                rows[side, path] = None
            except ForkdError as error:  # raised below as it is, not as a group
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for path in paths:
                for side in self._sides:
                    nursery.start_soon(look, side, path)
        if failed:
            raise failed[0]
        return rows

    def _compare(self, mine: _Folder, theirs: _Folder, depth: int) -> None:
        self._found.added += [mine[name].path for name in mine.keys() - theirs.keys()]
        self._found.removed += [theirs[name].path for name in theirs.keys() - mine.keys()]
        for name in mine.keys() & theirs.keys():
            entry = mine[name]
            if _traits(entry) != _traits(theirs[name]):
                self._found.changed.append(entry.path)
            if entry.type == theirs[name].type == "dir":
                if depth < MAX_DEPTH and not entry.name_b64:
                    self._waiting.append((entry.path, depth + 1))
                else:
                    self._found.unread.append(entry.path)


def _traits(entry: FileEntry) -> tuple[object, ...]:
    """What makes a file another one; of a directory not its size and time, which its entries explain."""
    common = entry.type, entry.mode, entry.uid, entry.gid, entry.target
    return common if entry.type == "dir" else (*common, entry.size, entry.mtime)


async def _processes(runtime: Runtime, sandbox_id: str) -> list[GuestProcess]:
    """All processes of a guest but its kernel's own, which have no command line."""
    found = []
    for row in await list_files(runtime, sandbox_id, "/proc"):
        if row.name.isdigit():
            command = await _read(runtime, sandbox_id, f"/proc/{row.name}/cmdline")
            if command:
                args = command.decode(errors="replace").removesuffix("\0").split("\0")
                found.append(GuestProcess(pid=int(row.name), args=args))
    return sorted(found, key=lambda process: process.pid)


async def _ports(runtime: Runtime, sandbox_id: str) -> set[int]:
    """TCP ports somebody listens on in a guest."""
    text = b""
    for name in ("tcp", "tcp6"):
        text += await _read(runtime, sandbox_id, f"/proc/net/{name}")
    rows = [line.split() for line in text.decode(errors="replace").splitlines()]
    found = {row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[3] == LISTENING}
    return {int(port, 16) for port in found if len(port) == 4 and port.isalnum()}


async def _read(runtime: Runtime, sandbox_id: str, path: str) -> bytes:
    """A small file; one that is gone is empty."""
    data = b""
    try:
        async with read_file(runtime, sandbox_id, path) as pieces:
            async for piece in pieces:
                data += piece
                if len(data) > MAX_READ:
                    break
    except GuestFileNotFound:
        return b""
    return data[:MAX_READ]
