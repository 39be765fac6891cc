"""Routes of files: bytes and tar streams both ways, look, change, watch."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import IN_SANDBOX, Errors, route
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import (
    ByteStream,
    Emit,
    EventStream,
    Opened,
    body_pieces,
    query_flag,
    query_number,
    read_body,
    reply,
    stream_media,
)
from forkd.ops import files
from forkd.specs.errors import (
    BadInput,
    Conflict,
    GuestDenied,
    GuestFileNotFound,
    NoSpace,
    RangeNotPossible,
    UploadBroken,
)
from forkd.specs.models import FileEntry, WatchEvent
from forkd.specs.requests import ChangeMode, MakeDirectory, MoveFile

TAR = "tar"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def download(request: Request) -> Response:
    """A file's bytes, all or the ``Range`` asked for; with ``format=tar`` a directory as a tar stream."""
    runtime, sandbox_id, path = runtime_of(request), request.path_params["id"], _path(request)

    @asynccontextmanager
    async def tree() -> AsyncIterator[Opened]:
        async with files.read_tree(runtime, sandbox_id, path) as data:
            yield Opened(200, {"content-type": "application/x-tar"}, data)

    @asynccontextmanager
    async def file() -> AsyncIterator[Opened]:
        entry = await files.stat(runtime, sandbox_id, path, follow=True)
        status, offset, length = _part(request.headers.get("range"), entry)
        headers = {"content-type": "application/octet-stream", "accept-ranges": "bytes"}
        headers["content-disposition"] = f"attachment; filename*=UTF-8''{quote(entry.name, safe='')}"
        if length is not None:
            headers["content-length"] = str(length)
        if status == 206 and length is not None:
            headers["content-range"] = f"bytes {offset}-{offset + length - 1}/{entry.size}"
        async with files.read_file(runtime, sandbox_id, path, offset, length) as data:
            yield Opened(status, headers, data)

    return ByteStream(tree if _is_tar(request) else file)


async def upload(request: Request) -> Response:
    """Write the body to a file, whole or not at all; with ``format=tar`` it is a directory."""
    runtime, sandbox_id, path = runtime_of(request), request.path_params["id"], _path(request)
    parents, user = query_flag(request, "make_parents"), request.query_params.get("user")
    mode = query_number(request, "mode") if "mode" in request.query_params else None
    append, tar = query_flag(request, "append"), _is_tar(request)
    async with body_pieces(request) as data:
        if tar:
            entry = await files.write_tree(runtime, sandbox_id, path, data, make_parents=parents, user=user)
        else:
            entry = await files.write_file(
                runtime, sandbox_id, path, data, mode=mode, append=append, make_parents=parents, user=user
            )
    return reply(entry, 201)


async def remove(request: Request) -> Response:
    """Remove a file, or a directory: an empty one, or with ``recursive`` any."""
    recursive = query_flag(request, "recursive")
    await files.remove(runtime_of(request), request.path_params["id"], _path(request), recursive=recursive)
    return Response(status_code=204)


async def stat(request: Request) -> Response:
    """What is at a path; a symbolic link itself unless ``follow``."""
    follow = query_flag(request, "follow")
    return reply(await files.stat(runtime_of(request), request.path_params["id"], _path(request), follow=follow))


async def index(request: Request) -> Response:
    """The entries of a directory, down to ``depth`` (1)."""
    depth = query_number(request, "depth", 1)
    return reply(await files.list_files(runtime_of(request), request.path_params["id"], _path(request), depth))


async def make(request: Request) -> Response:
    """Make a directory."""
    body = await read_body(request, MakeDirectory)
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]
    return reply(await files.make_directory(runtime, sandbox_id, body.path, body.mode, body.parents), 201)


async def move(request: Request) -> Response:
    """Give a file or directory another name."""
    body = await read_body(request, MoveFile)
    return reply(await files.move(runtime_of(request), request.path_params["id"], body.source, body.target))


async def chmod(request: Request) -> Response:
    """Change permission bits."""
    body = await read_body(request, ChangeMode)
    return reply(await files.change_mode(runtime_of(request), request.path_params["id"], body.path, body.mode))


async def watch(request: Request) -> Response:
    """Changes below a directory, as events, until it is gone or the client leaves. The first one says ``watching``."""
    runtime, sandbox_id, path = runtime_of(request), request.path_params["id"], _path(request)
    recursive = query_flag(request, "recursive")

    async def work(emit: Emit) -> Any:
        async with files.watch(runtime, sandbox_id, path, recursive=recursive) as events:
            await emit({"event": "watching"})
            async for event in events:
                await emit({"event": "change", "change": event})
        return None

    return EventStream(work, stream_media(request))


def _path(request: Request) -> str:
    """The path in the query; bytes that are not UTF-8 stay what they are."""
    text: str = request.scope["query_string"].decode("ascii", "replace")
    query = parse_qs(text, errors="surrogateescape")
    if "path" not in query:
        raise BadInput("path is missing", hint="add ?path=/… to the address")
    return query["path"][-1]


def _is_tar(request: Request) -> bool:
    wanted = request.query_params.get("format")
    if wanted not in (None, TAR):
        raise BadInput(f"there is no format {wanted[:40]!r}", hint="tar, or none")
    return wanted == TAR


def _part(header: str | None, entry: FileEntry) -> tuple[int, int, int | None]:
    """Status, offset and length of what is to be sent; None if only the end of the file can tell (as in /proc)."""
    if entry.size == 0:
        return 200, 0, None
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if match is None or match.groups() == ("", ""):
        return 200, 0, entry.size
    first, last = match.groups()
    if first == "":
        offset, end = max(0, entry.size - int(last)), entry.size
    else:
        offset, end = int(first), min(int(last) + 1, entry.size) if last else entry.size
    if offset >= end:
        raise RangeNotPossible(f"the file has {entry.size} bytes, so there is no {header[:60]!r}" if header else "")
    return 206, offset, end - offset


BASE = "/v1/sandboxes/{id}/files"
PATH = {"path": str}
ERRORS: Errors = (BadInput, GuestFileNotFound, GuestDenied, Conflict, NoSpace, *IN_SANDBOX)
WRITTEN = {**PATH, "format": str, "mode": int, "append": bool, "make_parents": bool, "user": str}
routes = [
    route(
        "GET",
        BASE,
        download,
        {200: bytes, 206: bytes},
        query={**PATH, "format": str},
        errors=(RangeNotPossible, *ERRORS),
    ),
    route("PUT", BASE, upload, {201: FileEntry}, query=WRITTEN, upload=True, errors=(UploadBroken, *ERRORS)),
    route("DELETE", BASE, remove, {204: None}, query={**PATH, "recursive": bool}, errors=ERRORS),
    route("GET", f"{BASE}/stat", stat, {200: FileEntry}, query={**PATH, "follow": bool}, errors=ERRORS),
    route("GET", f"{BASE}/list", index, {200: list[FileEntry]}, query={**PATH, "depth": int}, errors=ERRORS),
    route("POST", f"{BASE}/mkdir", make, {201: FileEntry}, body=MakeDirectory, errors=ERRORS),
    route("POST", f"{BASE}/move", move, {200: FileEntry}, body=MoveFile, errors=ERRORS),
    route("POST", f"{BASE}/chmod", chmod, {200: FileEntry}, body=ChangeMode, errors=ERRORS),
    route(
        "GET",
        f"{BASE}/watch",
        watch,
        {200: WatchEvent},
        query={**PATH, "recursive": bool},
        events="only",
        errors=ERRORS,
    ),
]
