"""Files of a sandbox: read and write them as streams, whole directories as tar, look, change, watch."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from forkd.guestlink import GuestStream, tree_done
from forkd.ops.awake import awake
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, GuestProtocolError
from forkd.specs.models import FileEntry, WatchEvent

MAX_PATH = 4096
MAX_DEPTH = 64
MAX_LISTED = 100_000
ASK_TIMEOUT = 60.0
MAX_LINE = 64 * 1024


def check_path(path: str) -> str:
    """An absolute path in a guest. Raises BadInput."""
    if not path.startswith("/"):
        raise BadInput(f"path {path[:80]!r} is not absolute", hint="it must start with /")
    if "\0" in path or len(path.encode(errors="surrogateescape")) > MAX_PATH:
        raise BadInput(f"a path has at most {MAX_PATH} bytes, and no NUL")
    return path


def check_mode(mode: int | None) -> int | None:
    """Permission bits. Raises BadInput."""
    if mode is not None and not 0 <= mode <= 0o7777:
        raise BadInput(f"mode {mode} is not possible", hint="for example 420, which is 0o644")
    return mode


@asynccontextmanager
async def read_file(
    runtime: Runtime, sandbox_id: str, path: str, offset: int = 0, length: int | None = None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """A file's bytes, or a part of them, as they come."""
    async with awake(runtime, sandbox_id) as sandbox:
        stream = sandbox.link.read_file(check_path(path), offset=offset, length=length)
        async with stream, aclosing(_output(stream)) as data:
            await stream.begun()
            yield data


@asynccontextmanager
async def read_tree(runtime: Runtime, sandbox_id: str, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
    """A directory as a tar stream."""
    async with awake(runtime, sandbox_id) as sandbox, sandbox.link.read_tree(check_path(path)) as stream:
        await stream.started()
        async with aclosing(_output(stream, tree=True)) as data:
            yield data


async def write_file(
    runtime: Runtime,
    sandbox_id: str,
    path: str,
    data: AsyncIterable[bytes],
    *,
    mode: int | None = None,
    append: bool = False,
    make_parents: bool = False,
    user: str | None = None,
) -> FileEntry:
    """Write a file, whole or not at all: it gets its name when all its bytes are there."""
    async with awake(runtime, sandbox_id) as sandbox:
        options = {"mode": check_mode(mode), "append": append, "make_parents": make_parents, "user": user}
        size = await sandbox.link.write_file(check_path(path), data, **options)  # type: ignore[arg-type]
        runtime.observe("file_written", id=sandbox_id, path=_shown(path), size=size)
        return _entry(await sandbox.link.stat(path, timeout=ASK_TIMEOUT), path)


async def write_tree(
    runtime: Runtime,
    sandbox_id: str,
    path: str,
    data: AsyncIterable[bytes],
    *,
    make_parents: bool = False,
    user: str | None = None,
) -> FileEntry:
    """A tar stream becomes a directory; one that was not there appears whole or not at all."""
    async with awake(runtime, sandbox_id) as sandbox:
        await sandbox.link.write_tree(check_path(path), data, make_parents=make_parents, user=user)
        runtime.observe("directory_written", id=sandbox_id, path=_shown(path))
        return _entry(await sandbox.link.stat(path, timeout=ASK_TIMEOUT), path)


async def stat(runtime: Runtime, sandbox_id: str, path: str, *, follow: bool = False) -> FileEntry:
    """What is at a path: a symbolic link itself, or with ``follow`` what it leads to."""
    async with awake(runtime, sandbox_id) as sandbox:
        return _entry(await sandbox.link.stat(check_path(path), follow=follow, timeout=ASK_TIMEOUT), path)


async def list_files(runtime: Runtime, sandbox_id: str, path: str, depth: int = 1) -> list[FileEntry]:
    """The entries of a directory, and of those below it down to ``depth``, by name."""
    if not 1 <= depth <= MAX_DEPTH:
        raise BadInput(f"a depth of {depth} is not possible", hint=f"give 1 to {MAX_DEPTH}")
    found: list[FileEntry] = []
    async with awake(runtime, sandbox_id) as sandbox:
        waiting = [(check_path(path), 1)]
        while waiting:
            folder, level = waiting.pop()
            rows = await sandbox.link.list_dir(folder, timeout=ASK_TIMEOUT)
            entries = [_entry(row, f"{folder.rstrip('/')}/{row.get('name', '')}") for row in rows]
            found += entries
            if len(found) > MAX_LISTED:
                raise BadInput(f"there are more than {MAX_LISTED} entries below {path!r}", hint="list less deep")
            if level < depth:
                waiting += [(each.path, level + 1) for each in entries if each.type == "dir" and not each.name_b64]
    return sorted(found, key=lambda entry: entry.path)


async def make_directory(runtime: Runtime, sandbox_id: str, path: str, mode: int, parents: bool) -> FileEntry:
    """Make a directory."""
    async with awake(runtime, sandbox_id) as sandbox:
        check_mode(mode)
        await sandbox.link.mkdir(check_path(path), mode=mode, parents=parents, timeout=ASK_TIMEOUT)
        return _entry(await sandbox.link.stat(path, timeout=ASK_TIMEOUT), path)


async def move(runtime: Runtime, sandbox_id: str, source: str, target: str) -> FileEntry:
    """Give a file or directory another name."""
    async with awake(runtime, sandbox_id) as sandbox:
        await sandbox.link.move(check_path(source), check_path(target), timeout=ASK_TIMEOUT)
        return _entry(await sandbox.link.stat(target, timeout=ASK_TIMEOUT), target)


async def change_mode(runtime: Runtime, sandbox_id: str, path: str, mode: int) -> FileEntry:
    """Change permission bits."""
    async with awake(runtime, sandbox_id) as sandbox:
        check_mode(mode)
        await sandbox.link.chmod(check_path(path), mode, timeout=ASK_TIMEOUT)
        return _entry(await sandbox.link.stat(path, timeout=ASK_TIMEOUT), path)


async def remove(runtime: Runtime, sandbox_id: str, path: str, *, recursive: bool = False) -> None:
    """Remove a file, or a directory: an empty one, or with ``recursive`` any."""
    async with awake(runtime, sandbox_id) as sandbox:
        await sandbox.link.remove(check_path(path), recursive=recursive, timeout=ASK_TIMEOUT)


@asynccontextmanager
async def watch(
    runtime: Runtime, sandbox_id: str, path: str, *, recursive: bool = False
) -> AsyncIterator[AsyncIterator[WatchEvent]]:
    """Changes below a directory from now on, until it is gone."""
    async with (
        awake(runtime, sandbox_id) as sandbox,
        sandbox.link.watch(check_path(path), recursive=recursive) as stream,
    ):
        await stream.started()
        async with aclosing(_events(stream)) as events:
            yield events


async def _events(stream: GuestStream) -> AsyncGenerator[WatchEvent, None]:
    held = b""
    async for _, data in stream:
        *lines, held = (held + data).split(b"\n")
        if len(held) > MAX_LINE:
            raise GuestProtocolError("the guest sent an event without end")
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=WatchEvent)
            except msgspec.MsgspecError as error:
                raise GuestProtocolError(f"the guest sent no event: {error}") from error


async def _output(stream: GuestStream, *, tree: bool = False) -> AsyncGenerator[bytes, None]:
    said = b""
    async for kind, data in stream:
        if kind == "stdout":
            yield data
        else:
            said = (said + data)[-MAX_LINE:]
    if tree:
        tree_done(stream, said)


def _entry(row: dict[str, Any], path: str) -> FileEntry:
    """A guest's description of a file, if it has the documented shape."""
    try:
        entry = msgspec.convert({**row, "path": _shown(path)}, FileEntry)
        if entry.name_b64 is not None:
            base64.b64decode(entry.name_b64, validate=True)
        return entry
    except (msgspec.ValidationError, ValueError) as error:
        raise GuestProtocolError(f"the guest's description of a file is malformed: {error}") from error


def _shown(path: str) -> str:
    """A path as JSON can say it."""
    return path.encode(errors="surrogateescape").decode(errors="replace")
