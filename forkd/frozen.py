"""The one-file binary: the only module that knows whether forkd runs from it, and how it then differs.

The binary is two processes: a launcher that unpacks into a directory ``_MEI…`` and waits, and this one. A launcher
that is killed cannot tidy up, so this process dies with it and the next start removes what it left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

FROZEN: bool = getattr(sys, "frozen", False)
RUN_MODULE = "_module"
"""The hidden verb by which the binary runs one of its own modules as a program."""

_PR_SET_PDEATHSIG = 1
_OWNER = ".forkd-owner"
_UNOWNED_SECONDS = 600
_held: list[int] = []
_launcher_environment: dict[str, str] = {}


def start(*, helper: bool = False) -> None:
    """Make the binary behave like a program that was never packed; from source there is nothing to do.

    A ``helper`` runs in the directory of the forkd that started it, so it neither owns one nor looks for others.
    """
    if not FROZEN:
        return
    unpacked = Path(sys._MEIPASS)  # type: ignore[attr-defined]
    _launcher_environment.update(clean_environment(os.environ))
    sys.meta_path.insert(0, PackedLibraries(unpacked / "forkd" / "packed", unpacked))
    if helper:
        return
    _die_with_launcher()
    _own(unpacked)
    sweep(unpacked.parent, keep=unpacked)


class PackedLibraries(MetaPathFinder):
    """Finds the few large native modules that stay compressed until somebody imports them."""

    def __init__(self, packed: Path, unpacked: Path) -> None:
        self._packed = packed
        self._unpacked = unpacked

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Unpack the module, if it is one of them, beside everything else."""
        packed = self._packed / fullname
        if not packed.exists():
            return None
        library = self._unpacked / f"{fullname}.so"
        if not library.exists():
            import zlib

            staged = library.with_suffix(f".{os.getpid()}")
            staged.write_bytes(zlib.decompress(packed.read_bytes()))
            staged.replace(library)
        return spec_from_file_location(fullname, library)


def clean_environment(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Undo what the launcher did to the environment, so that programs we start, forkd too, start as from a shell.

    Returns what was taken out.
    """
    removed = {name: value for name, value in environ.items() if name.startswith("_PYI_")}
    if "LD_LIBRARY_PATH" in environ:
        removed["LD_LIBRARY_PATH"] = environ["LD_LIBRARY_PATH"]
    for name in removed:
        del environ[name]
    original = environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if original is not None:
        environ["LD_LIBRARY_PATH"] = original
    return removed


def module_command(module: str, *args: str) -> list[str]:
    """The command that runs one of our modules as a program of its own (``python -m``, where there is a python)."""
    return [sys.executable, *([RUN_MODULE] if FROZEN else ["-m"]), module, *args]


def module_environment() -> dict[str, str]:
    """The environment for ``module_command``: the binary then runs as one process, from what is unpacked already.

    So such a process must not outlive us.
    """
    return {**os.environ, **_launcher_environment}


def run_module(module: str, args: list[str]) -> None:
    """What the hidden verb does. Only our own modules: the binary is not a Python for everyone."""
    import runpy

    if not module.startswith("forkd."):
        raise SystemExit(f"forkd: error: {module} is not a module of forkd")
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def build_info() -> dict[str, Any]:
    """Commit, Python and packages of the binary; what can be said of them from source."""
    if FROZEN:
        return dict(json.loads((Path(__file__).parent / "build.json").read_text()))
    return {"commit": "source", "python": ".".join(map(str, sys.version_info[:3])), "packages": {}, "plugins": []}


def _die_with_launcher() -> None:
    import ctypes

    launcher = os.getppid()
    # SAFETY: prctl reads two integers and touches nothing of ours; the signal is for this process alone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher or not _is_ours(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _is_ours(pid: int) -> bool:
    """Whether a process runs the program we run, as our launcher does; who may not look takes it for that."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except PermissionError:
        return True
    except FileNotFoundError:
        return False


def _own(unpacked: Path) -> None:
    """Hold a lock in our directory for as long as we live; it appears locked, never free first."""
    staged = unpacked / f"{_OWNER}.new"
    descriptor = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    staged.rename(unpacked / _OWNER)
    _held.append(descriptor)


def sweep(folder: Path, keep: Path) -> None:
    """Remove directories that killed binaries of ours left in ``folder``."""
    for path in folder.glob("_MEI*"):
        try:
            if path != keep and _abandoned(path):
                shutil.rmtree(path)
        except OSError:
            continue  # another's, or somebody is quicker: not ours to insist on


def _abandoned(path: Path) -> bool:
    status = path.lstat()
    if status.st_uid != os.geteuid() or not (path / "forkd").is_dir():
        return False
    try:
        descriptor = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Killed while unpacking, or not yet that far.
        return time.time() - status.st_mtime > _UNOWNED_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
