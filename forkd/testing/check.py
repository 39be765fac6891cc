"""The contract suites, run on whatever one plugin hands over: the machinery of ``forkd plugin check``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from forkd import pluginsources
from forkd.config import load_settings
from forkd.pluginmanager import DEFAULT_PLUGINS, KINDS, Plugins, load_candidates, load_plugins
from forkd.specs.errors import PluginError
from forkd.specs.models import PluginInfo

INI = "[pytest]\ntrio_mode = true\naddopts = --import-mode=importlib -p no:cacheprovider\n"
MODULE = "from forkd.testing.check import suites\nglobals().update(suites({which!r}, **{options!r}))\n"


@dataclass(frozen=True, slots=True)
class Found:
    """One plugin, loaded beside all the bundled ones."""

    plugins: Plugins
    record: PluginInfo

    def things(self) -> list[tuple[str, str, Any]]:
        """What it hands over: kind, name and the thing itself."""
        found = []
        for provided in self.record.provides:
            kind = next(kind for kind in KINDS if provided.startswith(kind + " "))
            name = provided.removeprefix(kind + " ")
            found.append((kind, name, getattr(self.plugins, KINDS[kind])[name]))
        return found


def find(which: str) -> Found:
    """The plugin in a file or package, or one that forkd knows by name. Raises PluginError."""
    if "/" in which or which.endswith(".py"):
        candidate = pluginsources.one_file(Path(which))
        name = candidate.name
        plugins = load_candidates(chain(pluginsources.bundled(DEFAULT_PLUGINS), [candidate]))
        matching = [record for record in plugins.records.values() if record.origin == candidate.origin]
    else:
        name = which
        plugins = load_plugins(load_settings())
        matching = [record for record in plugins.records.values() if record.name == which]
    if not matching:
        raise PluginError(f"there is no plugin {which!r}", hint="give its name or the path of its file or package")
    if matching[0].status != "loaded":
        raise PluginError(f"plugin {name} is {matching[0].status}: {matching[0].error or 'by FORKD_DISABLE_PLUGINS'}")
    return Found(plugins, matching[0])


def suites(which: str, **options: str | None) -> dict[str, type]:
    """Test classes for a plugin, by class name, as pytest collects them."""
    classes: dict[str, type] = {}
    for kind, name, thing in find(which).things():
        make = MAKERS.get(kind)
        made = make(thing, options) if make is not None else None
        if made is not None:
            label = "".join(word.title() for word in f"{kind} {name}".replace("-", " ").split())
            classes[f"Test{label}"] = type(f"Test{label}", made[0], made[1])
    return classes


def skipped(found: Found, options: dict[str, str | None]) -> list[str]:
    """What the suites cannot say anything about, and what would let them."""
    notes = []
    for kind, name, thing in found.things():
        make = MAKERS.get(kind)
        if make is None:
            notes.append(f"{kind} {name}: there is no suite for this kind")
        elif make(thing, options) is None:
            notes.append(f"{kind} {name}: not checked; give {NEEDS[kind]}")
    return notes


def run(which: str, options: dict[str, str | None]) -> int:
    """Run the suites with pytest; its exit status, 0 if there is nothing to run."""
    if not suites(which, **options):
        return 0
    try:
        import pytest
        import pytest_trio  # noqa: F401
    except ImportError as error:
        raise PluginError("the contract suites need pytest", hint="pip install 'forkd[testing]'") from error
    with tempfile.TemporaryDirectory(prefix="forkd-check-") as folder:
        (Path(folder) / "pytest.ini").write_text(INI)
        (Path(folder) / "test_contract.py").write_text(MODULE.format(which=which, options=options))
        arguments = ["-q", "--disable-warnings", "--rootdir", folder, "-c", f"{folder}/pytest.ini", folder]
        return int(pytest.main(arguments, [_Trio()]))


class _Trio:
    """Has pytest load the trio plugin also where installed packages cannot be seen."""

    def pytest_configure(self, config: Any) -> None:
        import pytest_trio.plugin

        if not config.pluginmanager.has_plugin("trio"):
            config.pluginmanager.register(pytest_trio.plugin, "trio")


Made = tuple[tuple[type, ...], dict[str, Any]] | None
Maker = Callable[[Any, dict[str, str | None]], Made]


def _branch_mode(thing: Any, options: dict[str, str | None]) -> Made:
    from forkd.testing.branch import BranchModeContract

    return (BranchModeContract,), {"mode": _gives(thing)}


def _memory_backend(thing: Any, options: dict[str, str | None]) -> Made:
    from forkd.testing.memory import MemoryBackendContract

    return (MemoryBackendContract,), {"backend": _gives(thing)}


def _rootfs_builder(thing: Any, options: dict[str, str | None]) -> Made:
    from forkd.specs.rootfs import ImageRequest
    from forkd.testing.rootfs import RootfsBuilderContract

    good, bad = options.get("image"), options.get("bad_image")
    if good is None or bad is None:
        return None
    fixtures = {
        "builder": _gives(thing),
        "request_": _gives(ImageRequest(good)),
        "bad_request": _gives(ImageRequest(bad)),
    }
    return (RootfsBuilderContract,), fixtures


def _hub_transport(thing: Any, options: dict[str, str | None]) -> Made:
    from forkd.testing.hub import HubTransportContract

    url = options.get("url")
    if url is None:
        return None
    return (HubTransportContract,), {"transport": _gives(thing), "base": _gives(url.rstrip("/"))}


def _engine(thing: Any, options: dict[str, str | None]) -> Made:
    import secrets

    import pytest
    import trio

    from forkd.provision import find_kernel
    from forkd.specs.engine import BootSpec
    from forkd.specs.models import Hardware
    from forkd.testing.engine import EngineContract

    rootfs = options.get("rootfs")
    if rootfs is None:
        return None
    path = Path(rootfs)

    def boot_spec(cls: type) -> BootSpec:
        kernel = trio.run(find_kernel, load_settings().data_dir)
        return BootSpec(kernel.kernel, kernel.initrd, path, Hardware(vcpus=1, mem_mib=256), secrets.token_hex(16))

    def engine_factory(cls: type) -> Any:
        return thing

    in_class = pytest.fixture(scope="class")
    return (EngineContract,), {
        "engine_factory": in_class(classmethod(engine_factory)),  # type: ignore[arg-type]
        "boot_spec": in_class(classmethod(boot_spec)),  # type: ignore[arg-type]
    }


def _gives(thing: Any) -> Any:
    import pytest

    def fixture(self: object) -> Any:
        return thing

    return pytest.fixture(fixture)


MAKERS: dict[str, Maker] = {
    "branch mode": _branch_mode,
    "memory backend": _memory_backend,
    "rootfs builder": _rootfs_builder,
    "hub transport": _hub_transport,
    "engine": _engine,
}
NEEDS = {
    "hub transport": "--url URL, an empty registry it may write to",
    "rootfs builder": "--image REFERENCE it can build and --bad-image REFERENCE it must refuse",
    "engine": "--rootfs FILE, the path that `forkd parent build` prints",
}
