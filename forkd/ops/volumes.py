"""Volumes: disks a parent is given besides its rootfs, taken into the store by content and shared by all children."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from forkd.config import MAX_VOLUMES
from forkd.runtime import Progress, Runtime
from forkd.specs.engine import VOLUMES, Engine, VolumeDisk
from forkd.specs.errors import BadInput, CapabilityMissing
from forkd.specs.models import Volume
from forkd.specs.requests import VolumeRequest

MAX_PATHS = 1000
"""Bytes of all paths together: they reach the guest on its kernel's command line."""
RESERVED = ("/proc", "/sys", "/dev", "/run", "/usr/lib/forkd", "/.forkd")
_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*|/\.[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
_SUPERBLOCK = 1024
_MAGIC = (0x38, b"\x53\xef")
_INCOMPATIBLE = 0x60
_NEEDS_RECOVERY = 4


def check_volumes(requests: Sequence[VolumeRequest]) -> None:
    """Refuse what cannot be had, before any work. Raises BadInput."""
    if len(requests) > MAX_VOLUMES:
        raise BadInput(f"{len(requests)} volumes are not possible", hint=f"give at most {MAX_VOLUMES}")
    paths = [one.guest_path for one in requests]
    for path in paths:
        if not _PATH.fullmatch(path) or any(path == one or path.startswith(f"{one}/") for one in RESERVED):
            raise BadInput(
                f"a volume cannot be at {path[:80]!r} in the guest",
                hint="give an absolute path of letters, digits, '.', '_' and '-', such as /data",
            )
    if len(set(paths)) < len(paths):
        raise BadInput("two volumes are to be at the same path of the guest")
    if sum(map(len, paths)) > MAX_PATHS:
        raise BadInput(f"the volumes' paths in the guest have more than {MAX_PATHS} letters together")
    for one in requests:
        check_ext4(Path(one.host_path), "volume", "mkfs.ext4 -d DIR volume.ext4 256M makes one")


async def take_in(runtime: Runtime, requests: Sequence[VolumeRequest], progress: Progress) -> tuple[Volume, ...]:
    """The volumes with their disks in the store."""
    found = []
    for one in requests:
        progress(f"taking in {one.host_path}", None)
        disk = await runtime.disks.add(Path(one.host_path))
        found.append(Volume(disk=disk, guest_path=one.guest_path, read_only=one.read_only))
    return tuple(found)


async def volume_disks(runtime: Runtime, engine: Engine, volumes: Sequence[Volume]) -> tuple[VolumeDisk, ...]:
    """What an engine is told of volumes. Raises SnapshotBroken, or CapabilityMissing where it has none."""
    if volumes and VOLUMES not in (await engine.describe()).capabilities:
        raise CapabilityMissing(f"engine {engine.name!r} has no volumes", hint="set FORKD_ENGINE=qemu")
    return tuple(VolumeDisk(runtime.disks.find(one.disk), one.guest_path, one.read_only) for one in volumes)


def check_ext4(path: Path, what: str, hint: str) -> None:
    """Raise BadInput, with ``hint``, for what no guest could mount."""
    try:
        with open(path, "rb") as image:
            head = image.read(_SUPERBLOCK + 1024)[_SUPERBLOCK:]
    except OSError as error:
        hint = f"a {what} is a file: {hint}" if path.is_dir() else ""
        raise BadInput(f"{what} {path} cannot be read: {os.strerror(error.errno or 0)}", hint=hint or None) from error
    where, magic = _MAGIC
    if head[where : where + 2] != magic:
        raise BadInput(f"{what} {path} is not an ext4 image", hint=hint)
    if int.from_bytes(head[_INCOMPATIBLE : _INCOMPATIBLE + 4], "little") & _NEEDS_RECOVERY:
        raise BadInput(
            f"{what} {path} is in use, or was not unmounted", hint=f"unmount it, or repair it: fsck.ext4 -p {path}"
        )
