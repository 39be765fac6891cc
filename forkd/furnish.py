"""What forkd adds to an image's tree: ``/.forkd`` with the image's own defaults and, where it has none, a Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path

import trio

from forkd.guestpython import guest_python
from forkd.linux.command import CommandFailed, run_command
from forkd.linux.intree import Tree
from forkd.specs.errors import BuildFailed
from forkd.specs.rootfs import ImageConfig, Progress

OWN = ".forkd"
OLDEST_PYTHON = 7  # of 3.x: what the agent needs
_PLACES = ("usr/local/bin/python3", "usr/bin/python3", "bin/python3")
_LIBRARIES = ("usr/local/lib", "usr/lib")


async def furnish(tree: Path, config: ImageConfig, cache: Path, progress: Progress) -> None:
    """Add ``/.forkd`` to the tree where it is needed; what the image itself has under that name goes.

    The directory stands at the root of the tree, so writing it follows no link of the image. Raises HostNotReady where
    a Python is needed and cannot be fetched.
    """
    own = tree / OWN
    await trio.to_thread.run_sync(_clear, own)
    if config != ImageConfig():
        own.mkdir(exist_ok=True)
        values = {"env": config.env, "workdir": config.workdir, "user": config.user, "command": config.command}
        (own / "image.json").write_text(json.dumps(values), "utf-8")
    if not await trio.to_thread.run_sync(has_python, tree):
        progress("adding a Python for the agent", None)
        bundle = await guest_python(cache, progress)
        own.mkdir(exist_ok=True)
        try:
            await run_command(["cp", "-a", "--reflink=auto", f"{bundle}/.", str(own)])
        except CommandFailed as error:
            raise BuildFailed(f"the agent's Python cannot be copied: {error}") from error


def has_python(tree: Path) -> bool:
    """Whether the image has a Python the agent can run on. Blocks."""
    with Tree(tree) as image:
        found = [real for place in _PLACES if (real := image.find(place)) is not None]
        versions = [match for real in found if (match := re.fullmatch(r"python3\.(\d+)", os.path.basename(real)))]
        if found and not versions:
            names = [name for folder in _LIBRARIES for name in _names(image, folder)]
            versions = [match for name in names if (match := re.fullmatch(r"python3\.(\d+)", name))]
    return any(int(match[1]) >= OLDEST_PYTHON for match in versions)


def _names(image: Tree, folder: str) -> list[str]:
    try:
        descriptor, _ = image.directory(folder.split("/"))
    except OSError:
        return []
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _clear(own: Path) -> None:
    try:
        status = own.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(own)
    else:
        own.unlink()
