"""Where plugins come from: the bundled list, entry points of installed packages, a directory only we can write to."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from forkd.specs.errors import PluginError
from forkd.specs.hookspecs import PROJECT

log = logging.getLogger("forkd")
BUNDLED = "bundled"
ENTRY_POINT = "entry point"
DIRECTORY = "directory"
BUNDLED_PREFIX = "forkd.plugins."


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plugin that may be loaded: ``load`` imports it and may raise anything."""

    name: str
    source: str
    origin: str
    load: Callable[[], object]
    version: str | None = None


def bundled(modules: tuple[str, ...]) -> Iterator[Candidate]:
    """The plugins forkd brings."""
    for module in modules:
        name = module.removeprefix(BUNDLED_PREFIX)
        yield Candidate(name, BUNDLED, module, lambda module=module: importlib.import_module(module))  # type: ignore[misc]


def entry_points() -> Iterator[Candidate]:
    """Installed packages that declare an entry point of group ``forkd``, by name."""
    if getattr(sys, "frozen", False):
        return  # a binary has no installed packages but its own
    from importlib import metadata

    for point in sorted(metadata.entry_points(group=PROJECT), key=lambda point: point.name):
        version = point.dist.version if point.dist is not None else None
        yield Candidate(point.name, ENTRY_POINT, point.value, point.load, version)


def directory(path: Path) -> Iterator[Candidate]:
    """Files ``name.py`` and packages ``name/`` in ``path``, by name; none if there is no such directory."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        log.warning("plugins in %s are left out: %s", path, error.strerror)
        return
    for entry in entries:
        file = Path(entry.path)
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir() and (file / "__init__.py").is_file():
            yield _from_file(entry.name, file)
        elif entry.name.endswith(".py") and entry.is_file():
            yield _from_file(entry.name.removesuffix(".py"), file)


def one_file(path: Path) -> Candidate:
    """The plugin in a file or package directory. Raises PluginError if there is none."""
    package = (path / "__init__.py").is_file()
    if not package and not (path.suffix == ".py" and path.is_file()):
        raise PluginError(f"{path} is neither a file ending in .py nor a package with __init__.py")
    return _from_file(path.absolute().name.removesuffix(".py"), path.absolute())


def _from_file(name: str, path: Path) -> Candidate:
    return Candidate(name, DIRECTORY, str(path), lambda: _import_file(name, path))


def _import_file(name: str, path: Path) -> ModuleType:
    """Import under the bare name, so that a package's own absolute imports work as if it were installed."""
    if not name.isidentifier():
        raise PluginError(f"{name!r} is not a name Python can import", hint="use letters, digits and underscores")
    if reason := untrusted(path):
        raise PluginError(reason)
    if name in sys.modules:
        known = getattr(sys.modules[name], "__file__", None)
        if known is None or Path(known) not in (path, path / "__init__.py"):
            raise PluginError(f"the module name {name} is taken by {known or 'Python itself'}")
        return sys.modules[name]
    if importlib.util.find_spec(name) is not None:
        raise PluginError(f"the module name {name} is taken by an installed module")
    package = path.is_dir()
    spec = importlib.util.spec_from_file_location(
        name, path / "__init__.py" if package else path, submodule_search_locations=[str(path)] if package else None
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def untrusted(path: Path) -> str | None:
    """Why code at ``path`` must not run: somebody but root and us could have written it. None if nobody could.

    Looks at the real file, at everything below it and at every directory above it (there, a sticky bit keeps others
    from exchanging what is ours).
    """
    real = path.resolve()
    below = [Path(folder, name) for folder, names, files in os.walk(real) for name in (*names, *files)]
    for one in (real, *below):
        if problem := _writable(one, sticky_is_fine=False):
            return problem
    for one in real.parents:
        if problem := _writable(one, sticky_is_fine=True):
            return problem
    return None


def _writable(path: Path, *, sticky_is_fine: bool) -> str | None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link inside a plugin"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}, who could change what forkd runs"
    if status.st_mode & 0o022 and not (sticky_is_fine and status.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others (chmod go-w {path})"
    return None
