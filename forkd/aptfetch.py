"""Fetches Debian packages with the machine's own apt and unpacks them; nothing is installed on the host."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from forkd.linux.command import CommandFailed, run_command
from forkd.specs.errors import HostNotReady, ToolMissing
from forkd.specs.rootfs import Progress

OWN_KERNEL = "give a kernel of your own: `forkd setup --kernel FILE`"

_DOWNLOADED = re.compile(r"dlstatus:\d+:([0-9.]+):")


async def resolve_dependency(package: str, pattern: str) -> str:
    """The name, matching ``pattern``, of a package that the metapackage ``package`` depends on.

    Has apt update its lists first where it does not know the package and we are root. Raises HostNotReady with the
    command that helps, ToolMissing where the host has no apt.
    """
    found = await _depends(package, pattern)
    if found is None:
        problem = await _update_lists(f"apt knows no package {package}")
        found = await _depends(package, pattern)
        if found is None:
            raise HostNotReady(f"apt knows no package {package}{problem}", hint=OWN_KERNEL)
    return found


async def libraries_of(packages: Sequence[str]) -> list[str]:
    """The library packages these packages say they need. Raises HostNotReady, ToolMissing."""
    try:
        lines = await _run(["apt-cache", "depends", *packages])
    except CommandFailed as error:
        raise HostNotReady(f"apt knows no packages {' and '.join(packages)}: {error}") from error
    return sorted(
        {match[1] for line in lines if (match := re.fullmatch(r"\s+(?:Pre)?Depends: ((?:lib|zlib)\S+)", line))}
    )


async def download(
    packages: Sequence[str], into: Path, progress: Progress, *, what: str = "the guest kernel", hint: str = OWN_KERNEL
) -> None:
    """Put the packages' ``.deb`` files into the directory ``into``, checked by apt against its signed lists."""

    def on_line(line: str) -> None:
        if done := _DOWNLOADED.match(line):
            progress(f"fetching {what}", float(done[1]) / 100)

    # As root, apt would fetch as a user that cannot write here, and say so at length.
    options = ["-q", "-o", "APT::Status-Fd=1", "-o", "APT::Sandbox::User=root"]
    argv = ["apt-get", *options, "download", *packages]
    try:
        await _run(argv, into, on_line)
    except CommandFailed as first:
        # The usual reason: the lists are older than the archive, and the version they name is gone.
        failure = f"cannot fetch {' and '.join(packages)}: {first}"
        problem = await _update_lists(failure)
        try:
            await _run(argv, into, on_line)
        except CommandFailed as error:
            raise HostNotReady(failure + problem, hint=f"check the network, or {hint}") from error


async def unpack(archives: Sequence[Path], into: Path) -> None:
    """Unpack ``.deb`` files into a directory."""
    for archive in archives:
        try:
            await _run(["dpkg-deb", "-x", str(archive), str(into)])
        except CommandFailed as error:
            raise HostNotReady(f"cannot unpack {archive.name}: {error}") from error


async def _depends(package: str, pattern: str) -> str | None:
    try:
        lines = await _run(["apt-cache", "depends", package])
    except CommandFailed:
        return None  # apt-cache fails for a package it does not know
    names = (line.rpartition("Depends: ")[2].strip() for line in lines if "Depends: " in line)
    return next((name for name in names if re.fullmatch(pattern, name)), None)


async def _update_lists(reason: str) -> str:
    """Update apt's lists. A source that fails may not be the one we need: its problem is returned, to be told later."""
    if os.geteuid() != 0:
        raise HostNotReady(reason, hint="run `sudo apt-get update`, then try again")
    try:
        await _run(["apt-get", "-q", "update"])
    except CommandFailed as error:
        return f"; {error}"
    return ""


async def _run(argv: list[str], cwd: Path | None = None, on_line: Callable[[str], None] | None = None) -> list[str]:
    try:
        return await run_command(argv, cwd=cwd, on_line=on_line)
    except FileNotFoundError as error:
        raise ToolMissing(f"{argv[0]} is not on PATH", hint=f"this needs Debian or Ubuntu; or {OWN_KERNEL}") from error
