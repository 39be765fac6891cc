"""Paths inside a directory tree nobody has to trust: links lead where they would lead if the tree were ``/``."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path

MAX_LINKS = 40
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree:
    """An open directory tree. No path given to it, and no link found in it, ever leads outside.

    One directory at a time is opened, never following a link, so there is no moment between check and use.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give back the root's descriptor."""
        os.close(self._root)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def directory(self, parts: Sequence[str], *, make: bool = False) -> tuple[int, tuple[str, ...]]:
        """A descriptor of the directory, which the caller closes, and its real path; ``make`` creates what is missing.

        Raises FileNotFoundError, NotADirectoryError, or OSError with ELOOP after 40 links.
        """
        waiting, done, links = deque(parts), list[str](), 0
        here = os.dup(self._root)
        try:
            while waiting:
                part = waiting.popleft()
                if part in ("", "."):
                    continue
                if part == "..":
                    del done[-1:]
                    here = _swap(here, self._real(done))
                    continue
                try:
                    below = _enter(part, here, make)
                except NotADirectoryError:
                    target = _link(part, here)
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part) from None
                    waiting.extendleft(reversed(target.split("/")))
                    if target.startswith("/"):
                        done.clear()
                        here = _swap(here, os.dup(self._root))
                    continue
                done.append(part)
                here = _swap(here, below)
        except BaseException:
            os.close(here)
            raise
        return here, tuple(done)

    def find(self, path: str) -> str | None:
        """Where the file ``path`` really is, links followed; None where there is none."""
        parts = path.split("/")
        for _ in range(MAX_LINKS):
            try:
                folder, done = self.directory(parts[:-1])
                try:
                    status = os.lstat(parts[-1], dir_fd=folder)
                    if not stat.S_ISLNK(status.st_mode):
                        return "/".join((*done, parts[-1]))
                    target = os.readlink(parts[-1], dir_fd=folder)
                finally:
                    os.close(folder)
            except OSError:
                return None
            parts = target.split("/") if target.startswith("/") else [*done, *target.split("/")]
            if parts[-1] in ("", ".", ".."):
                return None
        return None

    def _real(self, parts: Sequence[str]) -> int:
        """A directory by a path already known to have no links."""
        here = os.dup(self._root)
        for part in parts:
            try:
                below = os.open(part, _DIRECTORY, dir_fd=here)
            finally:
                os.close(here)
            here = below
        return here


def _enter(part: str, here: int, make: bool) -> int:
    try:
        return os.open(part, _DIRECTORY, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(part, 0o755, dir_fd=here)
        return os.open(part, _DIRECTORY, dir_fd=here)
    except OSError as error:
        if error.errno == errno.ELOOP:  # some kernels say so for a link in place of "not a directory"
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part) from error
        raise


def _link(part: str, here: int) -> str:
    try:
        return os.readlink(part, dir_fd=here)
    except OSError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part) from error


def _swap(old: int, new: int) -> int:
    os.close(old)
    return new
