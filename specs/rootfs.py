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
    """What to build: ``reference`` without its scheme (``bookworm`` of ``debian:bookworm``), and packages to add."""

    reference: str
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about running its processes; used as defaults of ``exec``."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"


class RootfsBuilder(Protocol):
    """Fills a directory with a root file system. One object per process, safe for concurrent builds."""

    name: str

    def accepts(self, reference: str) -> bool:
        """Whether this builder understands the whole reference (scheme included). Pure; called for every builder."""

    async def content_key(self, request: ImageRequest) -> str:
        """A string that changes when the result would: the cache's key. Raises BuildFailed or ToolMissing."""

    async def build(self, request: ImageRequest, target: Path, progress: Progress) -> ImageConfig:
        """Fill the existing empty directory ``target``.

        Owns nothing else: the caller makes and removes ``target`` and turns it into a disk image. Raises BuildFailed
        with the tool's own last lines, ToolMissing with the package to install, BadInput for a reference that cannot
        exist. On cancellation, ends every process it started before it returns.
        """
