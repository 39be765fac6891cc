"""Makes a read-only root disk: a directory tree as an ext4 image, without mounting anything."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import trio

from forkd.linux.command import CommandFailed, run_command
from forkd.specs.errors import BadInput, BuildFailed, HostNotReady, NoSpace, ToolMissing

BLOCK = 4096
MAX_SIZE_MIB = 1 << 20

# Fixed, so that the same tree gives the same image where mkfs allows it. No two such disks meet in one machine.
_UUID = "f0a3c6d2-5b1e-4d7a-9c48-6b2f1e0d9a37"
_TIME = "1700000000"
# Nobody ever writes to the disk: a journal and room to grow are of no use, and checksums cost the guest time.
_FEATURES = "^has_journal,^metadata_csum,^resize_inode,^64bit"


@dataclass(frozen=True, slots=True)
class TreeSize:
    """What a tree takes on disk: inodes (a hard-linked file once) and blocks of contents."""

    inodes: int
    blocks: int

    @property
    def mib(self) -> int:
        """The size of the smallest image to hold it, from above: contents, inodes, and some for the file system."""
        return (self.blocks * BLOCK + self.inodes * 320) * 105 // 100 // (1 << 20) + 8


async def make_ext4(tree: Path, out: Path, size_mib: int, *, label: str = "forkd-root") -> None:
    """Write the tree as an ext4 image of ``size_mib`` MiB, sparse, to ``out``, which appears whole or not at all.

    Owners, modes, links and extended attributes are kept; without root, what we own becomes root's. Raises BadInput
    for an impossible size, BuildFailed (with the size to ask for) where the tree does not fit, NoSpace, HostNotReady,
    and ToolMissing. On cancellation nothing is left.
    """
    if not 8 <= size_mib <= MAX_SIZE_MIB:
        raise BadInput(f"a disk has 8 to {MAX_SIZE_MIB} MiB, not {size_mib}")
    needed = await trio.to_thread.run_sync(measure_tree, tree)
    if needed.mib > size_mib:
        raise _does_not_fit(needed, size_mib)
    staged = out.with_name(f".{out.name}.{secrets.token_hex(6)}")
    try:
        _make_sparse(staged, size_mib << 20)
        await _mkfs(tree, staged, needed, size_mib, label)
        await trio.to_thread.run_sync(_publish, staged, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_space(out) from error
        raise HostNotReady(f"cannot write the disk image {out}: {error.strerror}") from error
    finally:
        staged.unlink(missing_ok=True)


def measure_tree(tree: Path) -> TreeSize:
    """Count what the tree takes on disk. Blocks. Raises BuildFailed for a directory that cannot be read."""
    linked: set[tuple[int, int]] = set()
    inodes = blocks = 1

    def fail(error: OSError) -> None:
        raise BuildFailed(f"cannot read {error.filename}: {error.strerror}") from error

    for directory, names, files in os.walk(tree, onerror=fail):
        blocks += 1 + (len(names) + len(files)) // 64
        for name in (*names, *files):
            info = os.lstat(os.path.join(directory, name))
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                if (info.st_dev, info.st_ino) in linked:
                    continue
                linked.add((info.st_dev, info.st_ino))
            inodes += 1
            if stat.S_ISREG(info.st_mode):
                blocks += min(-(-info.st_size // BLOCK), -(-info.st_blocks * 512 // BLOCK) + 1)
    return TreeSize(inodes, blocks)


async def _mkfs(tree: Path, image: Path, needed: TreeSize, size_mib: int, label: str) -> None:
    argv = ["mkfs.ext4", "-q", "-F", "-b", str(BLOCK), "-I", "256", "-m", "0", "-O", _FEATURES]
    argv += ["-N", str(needed.inodes + 256), "-L", label, "-U", _UUID]
    argv += ["-E", f"root_owner=0:0,hash_seed={_UUID},lazy_itable_init=1", "-d", str(tree), str(image)]
    if os.geteuid() != 0:
        argv = ["unshare", "--map-root-user", *argv]
    # A plain user's PATH often lacks the directories where mkfs is.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    try:
        await run_command(argv, env={"E2FSPROGS_FAKE_TIME": _TIME, "PATH": path})
    except FileNotFoundError as error:
        hint = "apt-get install e2fsprogs util-linux"
        raise ToolMissing(f"{argv[0]} is not on PATH", hint=hint) from error
    except CommandFailed as error:
        said = "\n".join(error.tail)
        if "Could not allocate" in said or "No free space" in said:
            raise _does_not_fit(needed, size_mib) from error
        if "No space left" in said:
            raise _no_space(image) from error
        if said.startswith("unshare:"):
            hint = "run forkd as root, or allow unprivileged user namespaces"
            raise HostNotReady(f"cannot make a disk image without root here: {said}", hint=hint) from error
        raise BuildFailed(f"cannot make the disk image: {error}") from error


def _does_not_fit(needed: TreeSize, size_mib: int) -> BuildFailed:
    ask = -(-max(needed.mib * 11 // 10, size_mib + 64) // 64) * 64
    return BuildFailed(
        f"the image needs about {needed.mib} MiB and its disk has {size_mib}",
        hint=f"use --size-mib {ask}",
        needed_mib=needed.mib,
    )


def _no_space(path: Path) -> NoSpace:
    return NoSpace(f"no space left for a disk image in {path.parent}", path=str(path.parent))


def _make_sparse(path: Path, size: int) -> None:
    with path.open("xb") as out:
        out.truncate(size)


def _publish(staged: Path, out: Path) -> None:
    _sync(staged)
    staged.rename(out)
    _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
