"""Copies a directory tree, or unpacks a tar file nobody has to trust, into a new root file system."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio
import zstandard

from forkd.linux.command import CommandFailed, run_command
from forkd.specs.errors import BadInput, BuildFailed
from forkd.specs.rootfs import ImageConfig, ImageRequest, Progress

MAX_MEMBERS = 2_000_000
MAX_BYTES = 64 << 30


class DirBuilder:
    """References that are paths (``/…``, ``./…``, ``../…``) or say so (``dir:…``, ``tar:…``)."""

    name = "dir"

    def accepts(self, reference: str) -> bool:
        """By its form alone."""
        return reference.startswith(("/", "./", "../", "dir:", "tar:"))

    async def content_key(self, request: ImageRequest) -> str:
        """A digest of the tar file, or of every entry's name, kind, size and times."""
        path = _path(request)
        return await trio.to_thread.run_sync(_tree_key if path.is_dir() else _file_key, path)

    async def build(self, request: ImageRequest, target: Path, progress: Progress) -> ImageConfig:
        """Copy or unpack."""
        path = _path(request)
        if path.is_dir():
            progress(f"copying {path}", None)
            try:
                await run_command(["cp", "-a", "--reflink=auto", f"{path}/.", str(target)])
            except CommandFailed as error:
                raise BuildFailed(f"{path} could not be copied: {error}") from error
        else:
            progress(f"unpacking {path}", None)
            await trio.to_thread.run_sync(_unpack, path, target)
        return ImageConfig()


def _path(request: ImageRequest) -> Path:
    if request.extras:
        raise BadInput("a directory or tar image takes no extra packages", hint="install them in the tree itself")
    path = Path(request.reference.removeprefix("dir:").removeprefix("tar:"))
    if not path.exists():
        raise BadInput(f"image {path} does not exist")
    return path.absolute()


def _file_key(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _tree_key(path: Path) -> str:
    digest = hashlib.sha256()
    for directory, names, files in os.walk(path):
        names.sort()
        for name in sorted([*names, *files]):
            full = os.path.join(directory, name)
            status = os.lstat(full)
            fact = (os.path.relpath(full, path), status.st_mode, status.st_size, status.st_mtime_ns, status.st_uid)
            digest.update(repr(fact).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _unpack(path: Path, target: Path) -> None:
    try:
        with _opened(path) as archive:
            archive.extractall(target, members=_checked(archive, target), filter=_filter)
    except (tarfile.TarError, zstandard.ZstdError, EOFError, OSError) as error:
        raise BuildFailed(f"{path} could not be unpacked: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    if path.name.endswith((".tar.zst", ".tzst")):
        with (
            open(path, "rb") as packed,
            zstandard.ZstdDecompressor().stream_reader(packed) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            yield archive
    else:
        with tarfile.open(path, mode="r|*") as archive:
            yield archive


def _checked(archive: tarfile.TarFile, target: Path) -> Iterator[tarfile.TarInfo]:
    """Members one by one, as long as there are not too many of them and not too much in them."""
    total = 0
    for count, member in enumerate(archive, 1):
        total += member.size
        if count > MAX_MEMBERS or total > MAX_BYTES:
            raise BuildFailed(f"the archive has more than {MAX_MEMBERS} members or {MAX_BYTES >> 30} GiB")
        yield member


def _filter(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    """Refuse what leaves the tree; leave out devices, which a guest makes itself; keep owners, modes and setuid."""
    if member.isdev():
        return None
    checked = tarfile.tar_filter(member, target)
    if member.islnk() or member.issym():
        # An absolute symbolic link is ordinary in a root file system and harmless: it is resolved in the guest, and
        # nothing is ever written through it here, because members below a link are refused by the check of real paths.
        if member.islnk():
            tarfile.data_filter(member.replace(deep=False), target)
        return checked.replace(mode=member.mode, deep=False)
    return checked.replace(mode=member.mode, deep=False)
