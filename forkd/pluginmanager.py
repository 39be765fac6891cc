"""The plugin manager: the one list of default plugins, and a typed face over pluggy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pluggy

from forkd.specs import hookspecs
from forkd.specs.branch import BranchMode
from forkd.specs.errors import BadInput, PluginError
from forkd.specs.hookspecs import PROJECT, EngineFactory
from forkd.specs.memory import MemoryBackend
from forkd.specs.rootfs import RootfsBuilder
from forkd.specs.transport import HubTransport

T = TypeVar("T")

DEFAULT_PLUGINS = (
    "forkd.plugins.engine_qemu",
    "forkd.plugins.memory_file",
    "forkd.plugins.memory_memfd",
    "forkd.plugins.branch_full",
    "forkd.plugins.branch_diff",
    "forkd.plugins.branch_live",
    "forkd.plugins.rootfs_debian",
    "forkd.plugins.rootfs_dir",
)


@dataclass(slots=True)
class Plugins:
    """Everything plugins handed over, by name."""

    manager: pluggy.PluginManager
    engines: dict[str, EngineFactory] = field(default_factory=dict)
    memory_backends: dict[str, MemoryBackend] = field(default_factory=dict)
    branch_modes: dict[str, BranchMode] = field(default_factory=dict)
    rootfs_builders: dict[str, RootfsBuilder] = field(default_factory=dict)
    hub_transports: dict[str, HubTransport] = field(default_factory=dict)

    def memory_backend(self, name: str) -> MemoryBackend:
        """The backend called ``name``; raises BadInput naming the ones there are."""
        return _pick(self.memory_backends, name, "memory backend")

    def branch_mode(self, name: str) -> BranchMode:
        """The branch mode called ``name``; raises BadInput naming the ones there are."""
        return _pick(self.branch_modes, name, "branch mode")

    def rootfs_builder(self, reference: str) -> RootfsBuilder:
        """The first builder that accepts ``reference``; raises BadInput naming the ones there are."""
        for builder in self.rootfs_builders.values():
            if builder.accepts(reference):
                return builder
        known = ", ".join(self.rootfs_builders)
        raise BadInput(
            f"no rootfs builder understands image {reference!r}",
            hint=f"builders here: {known}; try debian:bookworm, or the path of a directory or tar file",
        )

    def observe(self, event: dict[str, Any]) -> None:
        """Tell every observer about ``event``."""
        self.manager.hook.forkd_observe(event=event)


def load_plugins(names: Iterable[str] = DEFAULT_PLUGINS) -> Plugins:
    """Import the named plugin modules into a fresh manager and collect what they hand over."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in names:
        try:
            manager.register(importlib.import_module(name), name)
        except ImportError as error:
            raise PluginError(f"plugin {name} cannot be loaded: {error}") from error
    plugins = Plugins(manager)
    hook = manager.hook
    hook.forkd_register_engines(register=lambda name, factory: _add(plugins.engines, name, factory, "engine"))
    hook.forkd_register_memory_backends(register=_adder(plugins.memory_backends, "memory backend"))
    hook.forkd_register_branch_modes(register=_adder(plugins.branch_modes, "branch mode"))
    hook.forkd_register_rootfs_builders(register=_adder(plugins.rootfs_builders, "rootfs builder"))
    hook.forkd_register_hub_transports(register=lambda transport: _add_transport(plugins.hub_transports, transport))
    return plugins


def _add(table: dict[str, Any], name: str, thing: object, kind: str) -> None:
    if name in table:
        raise PluginError(f"two plugins register the {kind} {name!r}")
    table[name] = thing


def _adder(table: dict[str, Any], kind: str) -> Callable[[Any], None]:
    return lambda thing: _add(table, thing.name, thing, kind)


def _add_transport(table: dict[str, HubTransport], transport: HubTransport) -> None:
    for scheme in transport.schemes:
        _add(table, scheme, transport, "hub transport")


def _pick(table: dict[str, T], name: str, kind: str) -> T:
    try:
        return table[name]
    except KeyError:
        raise BadInput(f"there is no {kind} {name!r}", hint=f"there are: {', '.join(sorted(table))}") from None
