"""A directory as a registry: good for a disk, a stick or NFS, and any web server can serve it."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import trio

from forkd.linux.filelock import file_lock
from forkd.specs.errors import BadInput, NotFound, TransferError, Unauthorized
from forkd.specs.tags import check_tag
from forkd.specs.transport import Body, Login, Place, UpdateIndex

INDEX = "registry.json"
CHUNK = 1 << 20
MAX_INDEX = 16 << 20


class FileTransport:
    """URLs are ``file:PATH`` or ``file:///PATH``. Files appear by a rename, so nobody sees half of one."""

    schemes: tuple[str, ...] = ("file",)

    async def index(self, base: str, login: Login | None) -> bytes | None:
        """``registry.json``."""
        try:
            return await trio.to_thread.run_sync(_read_small, _root(base) / INDEX, MAX_INDEX)
        except NotFound:
            if not _root(base).is_dir():
                raise NotFound(f"there is no registry at {_root(base)}") from None
            return None

    async def manifest(self, place: Place, version: str, limit: int) -> bytes:
        """The manifest's file."""
        return await trio.to_thread.run_sync(_read_small, _manifest(place, version), limit)

    async def blob_size(self, place: Place, sha256: str) -> int | None:
        """The file's size."""
        try:
            return _blob(place, sha256).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _translated(_blob(place, sha256), error) from error

    async def mount_blob(self, place: Place, sha256: str, other: str) -> bool:
        """All packages share their blobs."""
        return False

    async def read_blob(self, place: Place, sha256: str, size: int, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The file's bytes."""
        path = _blob(place, sha256)
        left = size - offset
        async with aclosing(_read(path, offset)) as chunks:
            async for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    raise TransferError(f"{path} has more than the {size} bytes it should have")
                yield chunk
        if left:
            raise TransferError(f"{path} has {size - left} bytes; {size} are right")

    async def write_blob(self, place: Place, sha256: str, size: int, body: Body) -> None:
        """A new file."""
        await _write(_blob(place, sha256), size, body)

    async def publish(
        self, place: Place, version: str, manifest: bytes, blobs: dict[str, int], update: UpdateIndex
    ) -> None:
        """The manifest's file, then the index, under a lock."""
        root = _root(place.base)
        await _write_bytes(_manifest(place, version), manifest)
        try:
            async with file_lock(root / ".lock"):
                new = update(await self.index(place.base, place.login))
                await _write_bytes(root / INDEX, new)
        except OSError as error:
            raise _translated(root, error) from error

    async def read_file(self, url: str, login: Login | None, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """A pack's bytes."""
        async with aclosing(_read(_root(url), offset)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write_file(self, url: str, login: Login | None, size: int, body: Body) -> None:
        """A new pack."""
        await _write(_root(url), size, body)


def _root(url: str) -> Path:
    path = url.removeprefix("file:")
    if path.startswith("//"):
        path = path[2:]
    if not path.startswith("/"):
        raise BadInput(f"{url!r} is not an absolute path", hint="write file:/PATH")
    return Path(path)


def _manifest(place: Place, version: str) -> Path:
    owner, _, name = place.package.partition("/")
    directory = _root(place.base) / "manifests" / check_tag(owner) / check_tag(name)
    return directory / f"{check_tag(version)}.toml"


def _blob(place: Place, sha256: str) -> Path:
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ValueError(f"{sha256!r} is not a SHA-256")
    return _root(place.base) / "blobs" / "sha256" / sha256


def _read_small(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as source:
            data = source.read(limit + 1)
    except OSError as error:
        raise _translated(path, error) from error
    if len(data) > limit:
        raise TransferError(f"{path} has more than {limit} bytes")
    return data


async def _read(path: Path, offset: int) -> AsyncGenerator[bytes, None]:
    try:
        source = open(path, "rb")  # noqa: ASYNC230, SIM115
    except OSError as error:
        raise _translated(path, error) from error
    with source:
        source.seek(offset)
        try:
            while chunk := await trio.to_thread.run_sync(source.read, CHUNK):
                yield chunk
        except OSError as error:
            raise _translated(path, error) from error


async def _write_bytes(path: Path, data: bytes) -> None:
    async def body(offset: int) -> AsyncGenerator[bytes, None]:
        yield data[offset:]

    await _write(path, len(data), body)


async def _write(path: Path, size: int, body: Callable[[int], AsyncGenerator[bytes, None]]) -> None:
    staged = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}.part")
    written = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(staged, "xb") as out:  # noqa: ASYNC230
            try:
                async with aclosing(body(0)) as chunks:
                    async for chunk in chunks:
                        written += await trio.to_thread.run_sync(out.write, chunk)
                if written != size:
                    raise TransferError(f"{path} got {written} bytes; {size} were announced")
                await trio.to_thread.run_sync(_sync, out)
                staged.replace(path)
            except BaseException:
                staged.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _translated(path, error) from error


def _sync(out: object) -> None:
    out.flush()  # type: ignore[attr-defined]
    os.fsync(out.fileno())  # type: ignore[attr-defined]


def _translated(path: Path, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound(f"{path} is not there")
    if isinstance(error, PermissionError):
        return Unauthorized(f"{path}: {error.strerror}")
    return TransferError(f"{path}: {error.strerror or error}")
