"""Rootfs builders: from an image reference to a directory tree a guest can boot from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Progress = Callable[[str, float | None], None]
"""``progress(step, fraction)``: what is being done, and how far (0..1, None where not known). Never blocks."""


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """What to build: the whole ``reference`` that a builder accepted (``debian:bookworm``), and packages to add."""

    reference: str
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about its processes: defaults of ``exec``, and the ``command`` it would start itself."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    command: tuple[str, ...] = ()


class RootfsBuilder(Protocol):
    """Fills a directory with a root file system. One object per process, safe for concurrent builds."""

    name: str

    def accepts(self, reference: str) -> bool:
        """Whether the reference is this builder's to build, by its form alone. Pure, quick, never raises."""

    async def content_key(self, request: ImageRequest) -> str:
        """A string that changes when the result would: the cache's key, with no time or chance in it.

        Raises BadInput for a request that cannot be built, as ``build`` would; needs none of ``build``'s tools.
        """

    async def build(self, request: ImageRequest, target: Path, progress: Progress) -> ImageConfig:
        """Fill the existing empty directory ``target`` with a whole root file system, devices left out.

        Owners, modes and links are as they shall be in the guest; a builder that is not root makes everything its own,
        and the disk image then shows it as root's. Owns nothing but the contents of ``target``: the caller makes and
        removes it, also after a failure, and turns it into a disk image. Raises BuildFailed with the tool's own last
        lines, ToolMissing or HostNotReady with what to do, BadInput for a request that makes no sense. On
        cancellation, ends every process it started before it returns.
        """
