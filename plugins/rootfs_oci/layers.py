"""Applies an image's layers to a directory: a tar archive nobody has to trust, with deletions, one upon another."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import zstandard

from forkd.linux.intree import Tree
from forkd.specs.errors import BuildFailed, NoSpace

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
CHUNK = 1 << 20
_KEPT_ATTRIBUTES = ("security.capability", "user.")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a whole image may take."""

    members: int = 2_000_000
    unpacked: int = 64 << 30
    path: int = 4096
    header: int = 1 << 20


@dataclass(slots=True)
class Unpacker:
    """A root file system in the making. Blocks: to be used from a worker thread, one layer after another."""

    target: Path
    limits: Limits = field(default_factory=Limits)
    members: int = 0
    unpacked: int = 0
    folders: dict[str, tuple[int, float]] = field(default_factory=dict)

    def apply(self, blob: IO[bytes], packing: str, diff_id: str, name: str) -> None:
        """Add one layer. Raises BuildFailed for what no image has a right to contain, NoSpace for a full disk."""
        source = _Counted(_opened(blob, packing), self)
        try:
            with Tree(self.target) as tree, _Layer(self, tree) as layer, self._archive(source) as archive:
                while (member := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]  # it would remember them all
                    layer.add(member, archive)
            while source.read(CHUNK):
                pass  # behind the archive's end; belongs to the digest
        except (tarfile.TarError, zlib.error, zstandard.ZstdError, EOFError, RecursionError, ValueError) as error:
            raise BuildFailed(f"layer {name} is damaged: {error}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(f"no space left for the image in {self.target.parent}") from error
            raise BuildFailed(f"layer {name} cannot be unpacked: {error}") from error
        if f"sha256:{source.sha.hexdigest()}" != diff_id:
            raise BuildFailed(f"layer {name} does not contain what the image's configuration says")

    def _archive(self, source: _Counted) -> tarfile.TarFile:
        return tarfile.open(fileobj=source, mode="r|", tarinfo=_member(self))  # type: ignore[call-overload,no-any-return]

    def finish(self) -> None:
        """Give directories their modes and times, now that nothing is added to them any more."""
        with Tree(self.target) as tree:
            for path in sorted(self.folders, reverse=True):
                mode, mtime = self.folders[path]
                try:
                    folder, real = tree.directory(path.split("/"))
                except OSError:
                    continue  # a later layer took it away
                try:
                    if "/".join(real) == path:  # or put a link in its place
                        os.fchmod(folder, mode)
                        os.utime(folder, (mtime, mtime))
                finally:
                    os.close(folder)


class _Layer:
    """One layer on its way into the tree; remembers what it wrote, for deletions are about the layers below."""

    def __init__(self, unpacker: Unpacker, tree: Tree) -> None:
        self.unpacker = unpacker
        self.tree = tree
        self.written: set[str] = set()
        self.near: tuple[str, int, tuple[str, ...]] | None = None  # the directory used last
        self.moved = False  # something was taken away since, perhaps that directory

    def __enter__(self) -> _Layer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.near is not None:
            os.close(self.near[1])

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        parts = self.parts_of(member.name)
        self.unpacker.members += 1
        if self.unpacker.members > self.unpacker.limits.members:
            raise BuildFailed(f"the image has more than {self.unpacker.limits.members} files")
        if not parts:
            if member.isdir():
                self.unpacker.folders[""] = (member.mode & 0o7777, _time(member))
            return
        folder, real = self.enter(parts[:-1])
        name = parts[-1]
        path = "/".join((*real, name))
        if name == OPAQUE:
            self.remove_below(folder, real)
        elif name.startswith(WHITEOUT + WHITEOUT):
            return  # bookkeeping of an old storage driver
        elif name.startswith(WHITEOUT):
            self.remove(folder, name.removeprefix(WHITEOUT), real)
        elif member.isdir():
            self.make_folder(folder, name, path, member)
        elif not (member.isdev() and not member.isfifo()):  # a guest makes its devices itself
            self.clear(folder, name)
            self.make(folder, name, member, archive)
            self.wrote(path)

    def parts_of(self, name: str) -> list[str]:
        if "\0" in name or len(os.fsencode(name)) > self.unpacker.limits.path:
            raise BuildFailed(f"the image has a file with an impossible name: {name[:80]!r}")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise BuildFailed(f"the image has a file that would leave the tree: {name[:200]!r}")
        return parts

    def enter(self, parts: list[str]) -> tuple[int, tuple[str, ...]]:
        """The directory, made if need be; links in its path are followed as the guest would follow them."""
        wanted = "/".join(parts)
        if self.near is None or self.near[0] != wanted or self.moved:
            found = (wanted, *self.tree.directory(parts, make=True))
            if self.near is not None:
                os.close(self.near[1])
            self.near, self.moved = found, False
        return self.near[1], self.near[2]

    def wrote(self, path: str) -> None:
        """Remember a path and the directories above it, which are this layer's too."""
        while path and path not in self.written:
            self.written.add(path)
            path = path.rpartition("/")[0]

    def make_folder(self, folder: int, name: str, path: str, member: tarfile.TarInfo) -> None:
        try:
            is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
        except FileNotFoundError:
            is_folder = False
        if not is_folder:
            self.clear(folder, name)
            os.mkdir(name, 0o755, dir_fd=folder)
        if os.geteuid() == 0:
            os.chown(name, *_owner(member), dir_fd=folder, follow_symlinks=False)
        self.unpacker.folders[path] = (member.mode & 0o7777, _time(member))
        self.wrote(path)

    def make(self, folder: int, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        root = os.geteuid() == 0
        if member.islnk():
            self.link(folder, name, member)
            return
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=folder)
            if root:
                os.chown(name, *_owner(member), dir_fd=folder, follow_symlinks=False)
        elif member.isfifo():
            os.mkfifo(name, member.mode & 0o7777, dir_fd=folder)
            if root:
                os.chown(name, *_owner(member), dir_fd=folder, follow_symlinks=False)
        elif member.isreg():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as out:
                contents = archive.extractfile(member)
                assert contents is not None
                shutil.copyfileobj(contents, out, CHUNK)
                if root:
                    os.fchown(out.fileno(), *_owner(member))
                    _set_attributes(out.fileno(), member)
                os.fchmod(out.fileno(), member.mode & 0o7777)
        else:
            raise BuildFailed(f"the image has a file of an unknown kind: {member.name[:200]!r}")
        os.utime(name, (_time(member), _time(member)), dir_fd=folder, follow_symlinks=False)

    def link(self, folder: int, name: str, member: tarfile.TarInfo) -> None:
        """Another name for a file of the tree: the target's directory is found as the guest would find it."""
        parts = self.parts_of(member.linkname)
        if not parts:
            raise BuildFailed(f"the image has a hard link to nothing: {member.name[:200]!r}")
        there, _ = self.tree.directory(parts[:-1])
        try:
            if stat.S_ISDIR(os.lstat(parts[-1], dir_fd=there).st_mode):
                raise BuildFailed(f"the image has a hard link to a directory: {member.name[:200]!r}")
            os.link(parts[-1], name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(there)

    def clear(self, folder: int, name: str) -> None:
        """Make room for a new file: what has its name goes, whatever it is, and never what it points at."""
        try:
            status = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            return
        self.moved = self.moved or not stat.S_ISREG(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)

    def remove(self, folder: int, name: str, real: tuple[str, ...]) -> None:
        """A deletion: takes away what layers below have there."""
        if name in ("", ".", ".."):
            raise BuildFailed(f"the image deletes something that is no file: {name!r}")
        path = "/".join((*real, name))
        if path not in self.written:
            self.clear(folder, name)
        elif stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            below, inside = self.tree.directory([*real, name])
            try:
                self.remove_below(below, inside)
            finally:
                os.close(below)

    def remove_below(self, folder: int, real: tuple[str, ...]) -> None:
        """An opaque directory: nothing of layers below shows through; what this layer wrote stays."""
        for name in os.listdir(folder):
            self.remove(folder, name, real)


class _Counted:
    """Bytes of a layer as they leave the decompressor: hashed, and never more than an image may have."""

    def __init__(self, source: IO[bytes], unpacker: Unpacker) -> None:
        self._source, self._unpacker = source, unpacker
        self.sha = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._source.read(min(size, CHUNK))
        self._unpacker.unpacked += len(data)
        if self._unpacker.unpacked > self._unpacker.limits.unpacked:
            raise BuildFailed(f"the image unpacks to more than {self._unpacker.limits.unpacked >> 20} MiB")
        self.sha.update(data)
        return data


def _member(unpacker: Unpacker) -> type[tarfile.TarInfo]:
    """Members whose extended headers are small enough to be held in memory.

    Sparse ones are refused: their maps may be as long as the archive and their files larger than it. The image format
    advises against them, and the tools that make images do not write them.
    """

    class Member(tarfile.TarInfo):
        def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
            extended = self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, b"L", b"K", tarfile.SOLARIS_XHDTYPE)
            if extended and self.size > unpacker.limits.header:
                raise BuildFailed(f"the image has a header of {self.size} bytes")
            if self.type == tarfile.GNUTYPE_SPARSE:
                self._refuse_sparse()
            return super()._proc_member(archive)  # type: ignore[misc,no-any-return]

        def _refuse_sparse(self, *_: object) -> None:
            raise BuildFailed(f"the image has a sparse file, which is not supported: {self.name[:200]!r}")

        _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse

    return Member


def _opened(blob: IO[bytes], packing: str) -> IO[bytes]:
    if packing == "gzip":
        return gzip.GzipFile(fileobj=blob, mode="rb")  # type: ignore[return-value]
    if packing == "zstd":
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(blob, read_across_frames=True)
    return blob


def _owner(member: tarfile.TarInfo) -> tuple[int, int]:
    if not (0 <= member.uid < (1 << 32) - 1 and 0 <= member.gid < (1 << 32) - 1):
        raise BuildFailed(f"the image has a file of an impossible owner: {member.name[:200]!r}")
    return member.uid, member.gid


def _time(member: tarfile.TarInfo) -> float:
    return min(max(float(member.mtime), 0.0), float(1 << 33))


def _set_attributes(descriptor: int, member: tarfile.TarInfo) -> None:
    for key, value in member.pax_headers.items():
        name = key.removeprefix("SCHILY.xattr.")
        if name != key and name.startswith(_KEPT_ATTRIBUTES):
            try:
                os.setxattr(descriptor, name, value.encode("utf-8", "surrogateescape"))
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EPERM):
                    raise
