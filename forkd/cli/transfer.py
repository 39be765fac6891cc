"""Copying between this host and a sandbox: streams both ways, and nothing half-written under its final name."""

from __future__ import annotations

import os
import secrets
import shutil
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import trio

from forkd.cli.cp import Count
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.specs.errors import BadInput, ForkdError

CHUNK = 256 * 1024
Bar = Callable[[str, int | None], AbstractContextManager[Count]]


@contextmanager
def told() -> Iterator[None]:
    """What this host's files refuse is told as a sentence."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename or 'this host'}: {error.strerror or error}") from error


async def upload(controller: AsyncController, source: str, sandbox_id: str, target: str, bar: Bar) -> dict[str, Any]:
    """Copy a file or directory of this host into a sandbox."""
    path = Path(source)
    if not path.exists():
        raise BadInput(f"{source}: no such file or directory")
    if target.endswith("/") or await _is_directory(controller, sandbox_id, target):
        target = f"{target.rstrip('/')}/{path.resolve().name}"
    if path.is_dir():
        send, receive = trio.open_memory_channel[bytes](1)
        with bar(source, None) as count:
            pieces = _Counted(receive, count)
            writing = controller.write_tree(sandbox_id, target, pieces, make_parents=True)
            await _alongside(_pack(path, send), writing, path)
    else:
        mode = path.stat().st_mode & 0o777
        with bar(source, path.stat().st_size) as count:
            pieces = _Counted(_read(path), count)
            await controller.write_file(sandbox_id, target, pieces, make_parents=True, mode=mode)
    return {"target": f"{sandbox_id}:{target}", "bytes": pieces.total}


async def download(controller: AsyncController, sandbox_id: str, source: str, target: str, bar: Bar) -> dict[str, Any]:
    """Copy a file or directory of a sandbox to this host."""
    entry = await controller.stat_file(sandbox_id, source, follow=True)
    path = Path(target)
    if path.is_dir():
        path /= entry["name"] if entry["name"] != "/" else "root"
    if not path.parent.is_dir():
        raise BadInput(f"{path.parent}: no such directory")
    if entry["type"] == "dir" and path.exists():
        raise BadInput(f"{path} exists already", hint="give the directory it shall be in, or remove it")
    temporary = path.parent / f".forkd-{secrets.token_hex(6)}"
    skipped: list[str] = []
    try:
        if entry["type"] == "dir":
            with bar(source, None) as count:
                send, receive = trio.open_memory_channel[bytes](1)
                async with controller.open_tree(sandbox_id, source) as data:
                    pieces = _Counted(data, count)
                    unpacking = trio.to_thread.run_sync(_unpack, receive, temporary, skipped)
                    await _alongside(_feed(pieces, send), unpacking, path)
        else:
            with bar(source, entry["size"]) as count:
                async with controller.open_file(sandbox_id, source) as data:
                    pieces = _Counted(data, count)
                    await _write(pieces, temporary, entry["mode"] & 0o777)
        await trio.to_thread.run_sync(os.replace, temporary, path)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_discard, temporary)
    return {"target": str(path), "bytes": pieces.total, "skipped": skipped}


class _Counted:
    """Pieces on their way, told to a progress bar."""

    def __init__(self, pieces: AsyncIterator[bytes], count: Count) -> None:
        self._pieces = pieces
        self._count = count
        self.total = 0

    def __aiter__(self) -> _Counted:
        return self

    async def __anext__(self) -> bytes:
        piece = await anext(self._pieces)
        self.total += len(piece)
        self._count(len(piece))
        return piece


async def _is_directory(controller: AsyncController, sandbox_id: str, path: str) -> bool:
    try:
        return bool((await controller.stat_file(sandbox_id, path, follow=True))["type"] == "dir")
    except ControllerError as error:
        if error.code == "guest_file_not_found":
            return False
        raise


async def _read(path: Path) -> AsyncIterator[bytes]:
    async with await trio.open_file(path, "rb") as file:
        while data := await file.read(CHUNK):
            yield data


async def _write(pieces: AsyncIterator[bytes], path: Path, mode: int) -> None:
    async with await trio.open_file(path, "xb") as file:
        async for piece in pieces:
            await file.write(piece)
        await trio.to_thread.run_sync(os.fchmod, file.fileno(), mode)
        await file.flush()
        await trio.to_thread.run_sync(os.fsync, file.fileno())


async def _pack(path: Path, send: trio.MemorySendChannel[bytes]) -> None:
    """A directory as a tar stream, made in a thread that waits while the pieces are not taken."""

    def work() -> None:
        out: Any = _Outlet(send)
        with tarfile.open(fileobj=out, mode="w|", bufsize=CHUNK) as tar:
            tar.add(path, ".")

    async with send:
        await trio.to_thread.run_sync(work)


async def _alongside(work: Awaitable[Any], main: Awaitable[Any], what: Path) -> None:
    """Run both; if either fails the other is cancelled, and the failure is one sentence."""
    failure: list[Exception] = []

    async def one(part: Awaitable[Any]) -> None:
        try:
            await part
        except (OSError, tarfile.TarError) as error:
            failure.append(BadInput(f"{what}: {error}"))
        except (ForkdError, ControllerError) as error:
            failure.append(error)
        except trio.BrokenResourceError:
            return  # the other one has failed
        if failure:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, work)
        await one(main)
    if failure:
        raise failure[0]


class _Outlet:
    def __init__(self, send: trio.MemorySendChannel[bytes]) -> None:
        self._send = send

    def write(self, data: bytes) -> int:
        trio.from_thread.run(self._send.send, bytes(data))
        return len(data)


class _Inlet:
    """The file a thread reads while pieces arrive."""

    def __init__(self, receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self._receive = receive
        self._held = b""

    def read(self, size: int) -> bytes:
        while len(self._held) < size:
            try:
                self._held += trio.from_thread.run(self._receive.receive)
            except trio.EndOfChannel:
                break
        data, self._held = self._held[:size], self._held[size:]
        return data


def _unpack(receive: trio.MemoryReceiveChannel[bytes], path: Path, skipped: list[str]) -> None:
    """Unpack what a guest sent, maybe hostile: nothing leaves ``path``; devices and foreign links are skipped."""
    source: Any = _Inlet(receive)
    path.mkdir()
    with tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK) as tar:
        for member in tar:
            try:
                tar.extract(member, path, filter="data")
            except tarfile.FilterError:
                skipped.append(member.name)
    while source.read(CHUNK):
        pass  # padding


async def _feed(pieces: AsyncIterator[bytes], send: trio.MemorySendChannel[bytes]) -> None:
    async with send:
        async for piece in pieces:
            await send.send(piece)


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
