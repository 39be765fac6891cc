"""Rootfs builder: root file systems in zip files, as ``skeleton_rootfs_builder:/path/to/file.zip``."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import trio

from forkd.specs.errors import BadInput, BuildFailed
from forkd.specs.hookspecs import hookimpl
from forkd.specs.rootfs import ImageConfig, ImageRequest, Progress, RootfsBuilder

forkd_contract = 1
MAX_BYTES = 16 << 30


class SkeletonRootfsBuilder:
    """Unpacks files, directories and symbolic links; nothing leaves the target."""

    name = "skeleton_rootfs_builder"

    def accepts(self, reference: str) -> bool:
        """By its form alone."""
        return reference.startswith(f"{self.name}:")

    async def content_key(self, request: ImageRequest) -> str:
        """The archive's digest."""
        return await trio.to_thread.run_sync(_digest, self._path(request))

    async def build(self, request: ImageRequest, target: Path, progress: Progress) -> ImageConfig:
        """Unpack it."""
        path = self._path(request)
        progress(f"unpacking {path}", None)
        await trio.to_thread.run_sync(_unpack, path, target)
        return ImageConfig()

    def _path(self, request: ImageRequest) -> Path:
        path = Path(request.reference.partition(":")[2])
        if request.extras:
            raise BadInput("a zip image takes no extra packages", hint="put them into the archive")
        if not path.is_file() or not zipfile.is_zipfile(path):
            raise BadInput(f"{path} is not a zip file")
        return path


def _digest(path: Path) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _unpack(path: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            _extract(archive, target)
    except (zipfile.BadZipFile, OSError) as error:
        raise BuildFailed(f"{path} could not be unpacked: {error}") from error


def _extract(archive: zipfile.ZipFile, target: Path) -> None:
    if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
        raise BuildFailed(f"the archive holds more than {MAX_BYTES >> 30} GiB")
    links = []
    for member in archive.infolist():
        mode = member.external_attr >> 16
        if stat.S_ISLNK(mode):
            links.append(member)
            continue
        made = archive.extract(member, target)  # zipfile itself drops "..", drive letters and leading slashes
        os.chmod(made, stat.S_IMODE(mode) or 0o755)
    for member in links:  # last, so that nothing is ever written through one
        place = Path(archive.extract(member, target))
        destination = place.read_bytes()
        place.unlink()
        os.symlink(destination, place)


@hookimpl
def forkd_register_rootfs_builders(register: Callable[[RootfsBuilder], None]) -> None:
    """Called once at start."""
    register(SkeletonRootfsBuilder())
