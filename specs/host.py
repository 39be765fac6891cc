"""The host as checks see it: a small face over files, programs and system calls, so that any can be described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Host(Protocol):
    """What a doctor's check may ask. Nothing here raises for what is merely absent."""

    @property
    def euid(self) -> int:
        """Who asks; 0 is root."""

    def read(self, path: str) -> str | None:
        """A small text file's content, stripped; None if it cannot be read."""

    def names(self, path: str) -> list[str] | None:
        """A directory's entries; None if it is not there."""

    def why_not_open(self, path: str) -> str | None:
        """None if the file opens for reading and writing, else the reason in the kernel's words."""

    def which(self, program: str) -> str | None:
        """Where a program is, if it is."""

    def output(self, command: Sequence[str]) -> str | None:
        """What a program prints; None if it is missing, fails or takes more than a few seconds."""

    def free_bytes(self, path: str) -> int | None:
        """Space left for us on the file system that has, or would have, ``path``."""

    def why_not(self, ability: str) -> str | None:
        """Try a system facility for real: ``userfaultfd``, ``memfd``, ``ptrace``, ``suspend_seccomp``, ``netns``,
        ``reflink:DIRECTORY``.

        None if it works, else why it does not.
        """
