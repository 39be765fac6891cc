"""What goes into dist/forkd besides what imports lead to, and the papers that travel with it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import subprocess
import sys
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

WHOLE_PACKAGES = (
    "forkd.cli",
    "forkd.daemon",
    "forkd.mcp",
    "forkd.ops",
    "forkd.sdk",
    "forkd.testing",
    "forkd.specs",
    "forkd.linux",
)
"""Ours, whole: foreign plugins may import what is public, and verbs import late."""

PUBLIC_LIBRARIES = [
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "hypercorn.trio",
    "prometheus_client",
    "pytest_trio.plugin",
]
"""Third-party modules that foreign plugins may count on, besides those that forkd imports where imports can be seen."""

EXCLUDED = [
    *("tkinter", "_tkinter", "turtle", "turtledemo", "idlelib", "lib2to3", "ensurepip", "venv", "test", "pydoc_data"),
    *("distutils", "setuptools", "pkg_resources", "pip", "PyInstaller", "mypy", "hypothesis"),
    *("antigravity", "this", "numpy", "curses", "_curses", "_curses_panel", "dbm", "nis", "ossaudiodev"),
    *("pygments", "uvloop", "IPython", "pycparser", "zstandard._cffi", "zstandard.backend_cffi"),
]
"""Not worth their weight, or only here because a developer's environment has them."""

_NOT_TO_IMPORT = {"__main__", "test", "tests", "idle_test", "windows_events", "windows_utils", "popen_spawn_win32"}

BULKY = ("cryptography.hazmat.bindings._rust", "pydantic_core._pydantic_core", "rpds.rpds")
"""Large, and needed by few verbs: packed small, and unpacked by forkd.frozen when they are imported."""

DATA = ("guest", "specs/schemas", "specs/formats", "docs", "forkd/testing/skeletons")


def standard_library() -> list[str]:
    """All of the standard library but what is excluded: a foreign plugin may need any of it."""
    names: list[str] = []
    for name in sorted(sys.stdlib_module_names - set(EXCLUDED)):
        spec = None if name.startswith("_") else importlib.util.find_spec(name)
        if spec is None:
            continue
        names.append(name)
        for folder in spec.submodule_search_locations or ():
            inside = (path.relative_to(folder).with_suffix("") for path in sorted(Path(folder).rglob("*.py")))
            names += [".".join((name, *path.parts)) for path in inside if not _NOT_TO_IMPORT & set(path.parts)]
    return [name.removesuffix(".__init__") for name in names]


Entry = tuple[str, str, str]
"""PyInstaller's own: name in the binary, file it comes from, kind."""


def arranged(binaries: list[Entry], folder: Path) -> tuple[list[Entry], list[Entry]]:
    """Native libraries to unpack at every start, and the BULKY ones as data; without what only line editing needs."""
    unwanted = ("libreadline", "libtinfo", "libncurses", "readline.")
    kept: list[Entry] = []
    packed: list[Entry] = []
    for name, source, kind in binaries:
        module = name.partition(".")[0].replace("/", ".")
        if module in BULKY:
            packed.append((f"forkd/packed/{module}", str(_pack(Path(source), folder / module)), "DATA"))
        elif not Path(name).name.startswith(unwanted):
            kept.append((name, source, kind))
    return kept, packed


def _pack(source: Path, target: Path) -> Path:
    subprocess.run(["strip", "--strip-unneeded", "-o", str(target), str(source)], check=True)
    target.write_bytes(zlib.compress(target.read_bytes(), 9))
    return target


def data_files(root: Path) -> list[tuple[str, str]]:
    """Guest files, schemas, formats and documents, each where the source tree has it below ``forkd``."""
    found = []
    for folder in DATA:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = str(path.parent.relative_to(root)).removeprefix("forkd/")
                found.append((str(path), f"forkd/{inside}"))
    return found


def write_build_info(root: Path, folder: Path) -> Path:
    """``build.json``: commit, Python and the distributions inside. No time, so that equal sources give equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    from forkd.pluginmanager import DEFAULT_PLUGINS

    info = {
        "commit": commit(root),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in runtime_distributions()},
        "plugins": [name.rpartition(".")[2] for name in DEFAULT_PLUGINS],
    }
    path = folder / "build.json"
    path.write_text(json.dumps(info, indent=1) + "\n")
    return path


def commit(root: Path) -> str:
    """The commit of the source tree, with ``+changes`` if it is not that commit exactly; ``unknown`` without git."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def runtime_distributions() -> list[str]:
    """The distributions in the binary: forkd's dependencies, those of the extras it carries, and theirs."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    queue: list[tuple[str, set[str]]] = [("forkd", {"mcp", "testing"})]
    while queue:
        owner, extras = queue.pop()
        for text in metadata.requires(owner) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                name = metadata.metadata(requirement.name)["Name"]
                if name not in found:
                    found.add(name)
                    queue.append((name, requirement.extras))
    return sorted(found, key=str.lower)


def write_sbom(root: Path, analysis: Any) -> None:
    """``dist/forkd.cdx.json``: CycloneDX 1.5, every distribution and every native library in the binary."""
    from forkd import __version__

    components: list[dict[str, Any]] = [_python_component()]
    components += [_distribution_component(name) for name in runtime_distributions()]
    for name, source, _ in sorted(analysis.binaries):
        if not name.startswith("python3") and ".cpython-" not in name and ".abi3." not in name and source:
            components.append(_library_component(name, Path(source)))
    sbom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "forkd",
                "version": __version__,
                "purl": f"pkg:pypi/forkd@{__version__}",
                "properties": [{"name": "forkd:commit", "value": commit(root)}],
            }
        },
        "components": components,
    }
    (root / "dist").mkdir(exist_ok=True)
    (root / "dist" / "forkd.cdx.json").write_text(json.dumps(sbom, indent=2) + "\n")


def _python_component() -> dict[str, Any]:
    version = platform.python_version()
    return {"type": "framework", "name": "python", "version": version, "licenses": [{"license": {"id": "PSF-2.0"}}]}


def _distribution_component(name: str) -> dict[str, Any]:
    data = metadata.metadata(name)
    component: dict[str, Any] = {
        "type": "library",
        "name": data["Name"],
        "version": data["Version"],
        "purl": f"pkg:pypi/{data['Name'].lower().replace('_', '-')}@{data['Version']}",
    }
    if licence := data.get("License-Expression") or data.get("License"):
        one = licence.splitlines()[0][:100]
        component["licenses"] = [{"expression": one} if data.get("License-Expression") else {"license": {"name": one}}]
    return component


def _library_component(name: str, source: Path) -> dict[str, Any]:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return {"type": "file", "name": Path(name).name, "hashes": [{"alg": "SHA-256", "content": digest}]}
