"""A Python that needs nothing of the image it runs in: Debian's, with its C library, fetched by package name."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import trio

from forkd import aptfetch
from forkd.linux.command import CommandFailed, run_command
from forkd.linux.filelock import file_lock
from forkd.specs.errors import HostNotReady
from forkd.specs.rootfs import Progress

VERSION = "1"
HINT = "use an image that has python3"
PLACE = "/.forkd"
"""Where the guest has it; the launcher below says so too."""
APPLETS = ("sh", "mount", "mkdir", "ln")

# Not needed by an agent, nor by short scripts: tests, graphical tools, package installers.
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "distutils", "venv")
# --argv0 makes sys.executable this very file, so a Python that starts another one starts it through here.
_LAUNCHER = """#!{place}/bin/busybox sh
exec {place}/python/ld.so --library-path {place}/python/lib --argv0 {place}/python/bin/python3 \
{place}/python/bin/{name} "$@"
"""


async def guest_python(cache: Path, progress: Progress) -> Path:
    """The directory that becomes ``/.forkd``: ``python/`` and ``bin/busybox``. Fetched unless it is cached.

    Safe for several processes at a time and after a crash: it appears whole, by a rename. Raises HostNotReady.
    """
    target = cache / "guest-python" / VERSION
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    async with file_lock(target.parent / ".lock"):
        for leftover in target.parent.glob(".staging-*"):
            await trio.to_thread.run_sync(shutil.rmtree, leftover)
        if not target.is_dir():
            staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=target.parent))
            try:
                await _make(staging, progress)
                (staging / "out").rename(target)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(shutil.rmtree, staging)
    return target


async def _make(staging: Path, progress: Progress) -> None:
    name = (await aptfetch.resolve_dependency("python3-minimal", r"python3\.\d+-minimal")).removesuffix("-minimal")
    packages = [f"{name}-minimal", f"lib{name}-minimal", f"lib{name}-stdlib"]
    packages = sorted({*packages, *await aptfetch.libraries_of(packages)})
    archives, tree, out = staging / "archives", staging / "tree", staging / "out"
    for folder in (archives, tree, out):
        folder.mkdir(mode=0o755)
    what = "a Python for images without one"
    await aptfetch.download([*packages, "busybox-static"], archives, progress, what=what, hint=HINT)
    await aptfetch.unpack(sorted(archives.iterdir()), tree)
    await trio.to_thread.run_sync(_arrange, tree, out, name)
    progress("compiling its library", None)
    python = [f"{out}/python/ld.so", "--library-path", f"{out}/python/lib", f"{out}/python/bin/{name}"]
    compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(out), "-p", PLACE]
    try:
        environment = {"PYTHONHOME": f"{out}/python", "PYTHONDONTWRITEBYTECODE": "1"}
        await run_command([*python, "-S", *compile_all, f"{out}/python/lib/{name}"], env=environment)
    except (CommandFailed, OSError) as error:
        raise HostNotReady(f"the Python for guests does not run: {error}", hint=HINT) from error


def _arrange(tree: Path, out: Path, name: str) -> None:
    """From Debian's places to ours."""
    python = out / "python"
    (out / "bin").mkdir()
    (python / "bin").mkdir(parents=True)
    busybox = next(path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.is_file())
    shutil.copy2(busybox, out / "bin/busybox")
    for applet in APPLETS:
        (out / "bin" / applet).symlink_to("busybox")
    shutil.copy2(tree / "usr/bin" / name, python / "bin" / name)
    launcher = python / "bin/python3"
    launcher.write_text(_LAUNCHER.format(place=PLACE, name=name))
    launcher.chmod(0o755)
    ignore = shutil.ignore_patterns("__pycache__", "config-*", *_LEFT_OUT)
    shutil.copytree(tree / "usr/lib" / name, python / "lib" / name, ignore=ignore)
    for folder in (*tree.glob("lib/*-linux-gnu"), *tree.glob("usr/lib/*-linux-gnu")):
        for library in folder.glob("*.so*"):
            if library.is_file():  # and no link that leads nowhere
                near = library.is_symlink() and "/" not in os.readlink(library)
                shutil.copy2(library, python / "lib" / library.name, follow_symlinks=not near)
    loader = next(iter((python / "lib").glob("ld-linux*.so.*")), None)
    if loader is None:
        raise HostNotReady("the packages of the Python for guests have no dynamic loader", hint=HINT)
    loader.rename(python / "ld.so")
