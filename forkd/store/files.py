"""Durable file operations: everything that must survive a crash is synced before it is named."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkd.specs.errors import NoSpace


def sync_file(path: Path) -> None:
    """Flush a file's data to its device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to its device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` with ``data`` so that a crash leaves the old or the new content, never a mix."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(staged, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        staged.replace(path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and all below it; one that is gone already is fine."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except PermissionError:  # without root, a root file system's read-only directories keep their contents
        os.chmod(path, 0o700)
        for directory, names, _ in os.walk(path):
            for name in names:
                if not os.path.islink(full := os.path.join(directory, name)):
                    os.chmod(full, 0o700)
        shutil.rmtree(path)


@contextmanager
def disk_full_as_no_space(where: Path) -> Iterator[None]:
    """Turn the kernel's 'no space' errors into ours, naming the place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"no space left at {where}", hint="free some space: forkd prune, forkd rmi, forkd cleanup"
            ) from error
        raise


def check_low_water(where: Path, low_water: int | None) -> None:
    """Raise NoSpace if less than ``low_water`` bytes are free, or by default the smaller of 1 GiB and 2 % of the disk.

    So what runs has room to end well, and a snapshot is refused before it is half written.
    """
    free, least = shutil.disk_usage(where).free, kept_free(where, low_water)
    if free < least:
        raise NoSpace(
            f"only {free >> 20} MiB are free at {where}, and {least >> 20} MiB are kept free",
            hint="free some space: forkd prune, forkd rmi, forkd cleanup",
        )


def kept_free(where: Path, low_water: int | None) -> int:
    """How many bytes of the disk are not for snapshots."""
    return min(1 << 30, shutil.disk_usage(where).total // 50) if low_water is None else low_water


def tree_bytes(directory: Path) -> int:
    """The space the files of a directory take; those that go while we look take none."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def physical_bytes(path: Path) -> int:
    """The space a file takes on its device."""
    return path.stat().st_blocks * 512
