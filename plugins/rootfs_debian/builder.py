"""Builds a minimal Debian with Python and the packages asked for."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from forkd.linux.command import CommandFailed, run_command
from forkd.plugins.rootfs_debian.sources import read_host_sources, sources_for
from forkd.specs.errors import BadInput, BuildFailed, HostNotReady, ToolMissing
from forkd.specs.rootfs import ImageConfig, ImageRequest, Progress

VERSION = "1"
DEFAULT_SUITE = "bookworm"
ALWAYS = ("python3",)
EXCLUDED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
_REFERENCE = re.compile(r"debian(?::([a-z][a-z0-9-]*))?")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_STEP = re.compile(r"I: (.+?)\.*$")


class DebianBuilder:
    """``debian`` or ``debian:SUITE``; the agent's Python is always in."""

    name = "debian"

    def accepts(self, reference: str) -> bool:
        """Only what names Debian itself."""
        return _REFERENCE.fullmatch(reference) is not None

    async def content_key(self, request: ImageRequest) -> str:
        """Suite and packages, in whatever order they were given."""
        return " ".join((VERSION, _suite(request), *_packages(request)))

    async def build(self, request: ImageRequest, target: Path, progress: Progress) -> ImageConfig:
        """Run mmdebstrap into ``target``."""
        suite = _suite(request)
        sources = sources_for(suite, read_host_sources())
        if not sources:
            raise HostNotReady("this host has no Debian apt sources to build from", hint="use a directory or tar image")
        command = [
            "mmdebstrap",
            "--variant=minbase",
            f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
            f"--include={','.join(_packages(request))}",
            "--aptopt=Acquire::Languages none",
            "--aptopt=APT::Install-Recommends false",
            *(f"--dpkgopt=path-exclude={path}" for path in EXCLUDED),
            suite,
            str(target),
            *(source.line() for source in sources),
        ]

        def on_line(line: str) -> None:
            if found := _STEP.match(line):
                progress(f"building debian:{suite}: {found[1]}", None)

        progress(f"building debian:{suite}", None)
        try:
            await run_command(command, on_line=on_line)
        except FileNotFoundError as error:
            raise ToolMissing("mmdebstrap is not on PATH", hint="install it: apt-get install mmdebstrap") from error
        except CommandFailed as error:
            raise BuildFailed(f"debian:{suite} could not be built: {error}") from error
        _drop_devices(target / "dev")
        return ImageConfig()


def _drop_devices(dev: Path) -> None:
    """Device nodes, which mmdebstrap makes where it may: a guest has its own, and not every host could copy them."""
    with os.scandir(dev) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                os.unlink(entry)


def _suite(request: ImageRequest) -> str:
    match = _REFERENCE.fullmatch(request.reference)
    assert match is not None, "accepts() said so"
    return match[1] or DEFAULT_SUITE


def _packages(request: ImageRequest) -> list[str]:
    """What to install, sorted, each once. Raises BadInput for what cannot be a package's name."""
    words = [word for extra in request.extras for word in re.split(r"[\s,]+", extra) if word]
    for word in words:
        if not _PACKAGE.fullmatch(word):
            raise BadInput(f"{word!r} is not a Debian package name", hint="for example --extra python3-numpy")
    return sorted({*ALWAYS, *words})
