"""The plugin manager: the one list of default plugins, a typed face over pluggy, and a record of every plugin.

A plugin that cannot be used is named, recorded with its reason and left out as a whole; the others work.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import pluggy

from forkd import pluginsources
from forkd.config import Settings
from forkd.pluginsources import Candidate
from forkd.specs import hookspecs
from forkd.specs.branch import BranchMode
from forkd.specs.errors import BadInput, ForkdError, PluginError
from forkd.specs.hookspecs import CONTRACT_VERSION, PROJECT, Check, EngineFactory
from forkd.specs.host import Host
from forkd.specs.memory import MemoryBackend
from forkd.specs.models import PluginInfo
from forkd.specs.rootfs import RootfsBuilder
from forkd.specs.transport import HubTransport
from forkd.verbs import VERBS

T = TypeVar("T")
Command = tuple[str, str]
log = logging.getLogger("forkd")

DEFAULT_PLUGINS = (
    "forkd.plugins.engine_firecracker",
    "forkd.plugins.engine_qemu",
    "forkd.plugins.memory_file",
    "forkd.plugins.memory_memfd",
    "forkd.plugins.branch_full",
    "forkd.plugins.branch_diff",
    "forkd.plugins.branch_live",
    "forkd.plugins.rootfs_debian",
    "forkd.plugins.rootfs_dir",
    "forkd.plugins.rootfs_oci",
    "forkd.plugins.hub_file",
    "forkd.plugins.hub_http",
    "forkd.plugins.hub_oci",
)


LOADED, DISABLED, FAILED = "loaded", "disabled", "failed"


@dataclass(slots=True)
class Plugins:
    """Everything plugins handed over, by name, and what became of each plugin."""

    manager: pluggy.PluginManager
    records: dict[str, PluginInfo] = field(default_factory=dict)
    engines: dict[str, EngineFactory] = field(default_factory=dict)
    memory_backends: dict[str, MemoryBackend] = field(default_factory=dict)
    branch_modes: dict[str, BranchMode] = field(default_factory=dict)
    rootfs_builders: dict[str, RootfsBuilder] = field(default_factory=dict)
    """In the order they are asked: those of a hook with ``tryfirst`` before the others, with ``trylast`` behind."""
    builder_owners: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each rootfs builder: its place in that order, and the plugin it is from."""
    hub_transports: dict[str, HubTransport] = field(default_factory=dict)
    commands: dict[str, Command] = field(default_factory=dict)
    observers: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def memory_backend(self, name: str) -> MemoryBackend:
        """The backend called ``name``; raises BadInput naming the ones there are."""
        return _pick(self.memory_backends, name, "memory backend")

    def branch_mode(self, name: str) -> BranchMode:
        """The branch mode called ``name``; raises BadInput naming the ones there are."""
        return _pick(self.branch_modes, name, "branch mode")

    def rootfs_builder(self, reference: str) -> RootfsBuilder:
        """The first builder that accepts ``reference``; raises BadInput naming the ones there are."""
        for name, builder in list(self.rootfs_builders.items()):
            try:
                if builder.accepts(reference):
                    return builder
            except Exception as error:  # a foreign plugin must not stand in the way of the others
                del self.rootfs_builders[name]
                self.fail(self.builder_owners[name][1], f"its rootfs builder {name!r} raised: {_reason(error)}")
        known = ", ".join(self.rootfs_builders)
        raise BadInput(
            f"no rootfs builder understands image {reference!r}",
            hint=f"builders here: {known}; try debian:bookworm, oci://HOST/NAME:TAG, or the path of a directory",
        )

    def observe(self, event: dict[str, Any]) -> None:
        """Tell every observer about ``event``; one that raises is not asked again."""
        for name, observer in list(self.observers.items()):
            try:
                observer(event=event)
            except Exception as error:  # a foreign plugin must not break the verb it watches
                del self.observers[name]
                self.fail(name, f"raised in forkd_observe: {_reason(error)}")

    def checks(self, host: Host) -> Iterator[Check]:
        """Rows for ``forkd doctor``: one about the plugins, then each plugin's own."""
        own: list[Check] = []
        for name, checks in _callers(self.manager, "forkd_doctor_checks"):
            try:
                own.extend(row for rows in checks(host=host) for row in rows)
            except Exception as error:  # as above
                self.fail(name, f"raised in forkd_doctor_checks: {_reason(error)}")
        failed = [record for record in self.records.values() if record.status == FAILED]
        for record in failed:
            hint = f"mend it, or leave it out: FORKD_DISABLE_PLUGINS={record.name}"
            yield Check("plugins", "WARN", f"{record.name} ({record.origin}): {record.error}", hint)
        if not failed:
            yield Check("plugins", "PASS", f"{sum(one.status == LOADED for one in self.records.values())} loaded")
        yield from own

    def fail(self, name: str, reason: str) -> None:
        """Note that a plugin misbehaved, where people see it."""
        record = self.records[name]
        record.status, record.error = FAILED, reason
        log.warning("forkd: warning: plugin %s (%s) is left out: %s", name, record.origin, reason)


def load_plugins(settings: Settings | None = None, bundled: Iterable[str] = DEFAULT_PLUGINS) -> Plugins:
    """Load the bundled plugins and, if there are ``settings``, foreign ones, into a fresh manager."""
    sources = [pluginsources.bundled(tuple(bundled))]
    if settings is not None:
        sources += [pluginsources.entry_points(), pluginsources.directory(settings.plugin_dir)]
    return load_candidates(chain(*sources), disabled=settings.disabled_plugins if settings is not None else ())


def load_candidates(candidates: Iterable[Candidate], disabled: Iterable[str] = ()) -> Plugins:
    """Load plugins one after the other; what one hands over counts only if all of it is in order."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    plugins = Plugins(manager)
    for candidate in candidates:
        record = PluginInfo(
            name=candidate.name, source=candidate.source, origin=candidate.origin, version=candidate.version
        )
        if candidate.name in disabled:
            record.status = DISABLED
        elif known := plugins.records.get(candidate.name):
            record.name = f"{candidate.name} ({candidate.origin})"
            plugins.records[record.name] = record
            plugins.fail(record.name, f"a plugin of this name is loaded from {known.origin}")
            continue
        plugins.records[candidate.name] = record
        if record.status != DISABLED:
            try:
                _load(plugins, candidate, record)
            except (Exception, SystemExit) as error:  # foreign code may raise anything
                plugins.fail(candidate.name, _reason(error))
    return plugins


def _load(plugins: Plugins, candidate: Candidate, record: PluginInfo) -> None:
    module = candidate.load()
    stated = getattr(module, "forkd_contract", CONTRACT_VERSION)
    if stated != CONTRACT_VERSION:
        raise PluginError(f"it is written for contract version {stated}; this forkd has version {CONTRACT_VERSION}")
    record.version = record.version or _text(getattr(module, "__version__", None))
    record.about = (inspect.getdoc(module) or "").partition("\n")[0]
    # A manager of its own first: the shared one never sees a plugin that is not in order.
    trial = pluggy.PluginManager(PROJECT)
    trial.add_hookspecs(hookspecs)
    trial.register(module, candidate.name)
    callers = trial.get_hookcallers(module) or []
    record.hooks = sorted(caller.name for caller in callers)
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if inspect.iscoroutinefunction(implementation.function) or inspect.isasyncgenfunction(
                implementation.function
            ):
                raise PluginError(f"{caller.name} is async def: hooks are plain functions that hand over objects")
    trial.check_pending()
    if not callers:
        raise PluginError("it implements no hook", hint="mark its functions with forkd.specs.hookspecs.hookimpl")
    given = _collect(trial.hook)
    given.merge_into(plugins)
    _order_builders(plugins, candidate.name, callers, given.tables.get("rootfs builder", {}))
    record.provides = given.names()
    plugins.manager.register(module, candidate.name)
    if "forkd_observe" in record.hooks:
        plugins.observers[candidate.name] = trial.hook.forkd_observe
    record.status = LOADED


def _order_builders(plugins: Plugins, plugin: str, callers: list[pluggy.HookCaller], mine: Iterable[str]) -> None:
    """Heed the order a plugin asks for: each has a manager of its own, in which pluggy has nothing to order."""
    for caller in callers:
        if caller.name == "forkd_register_rootfs_builders":
            rank = sum(one.trylast - one.tryfirst for one in caller.get_hookimpls())
            plugins.builder_owners |= {name: (rank, plugin) for name in mine}
    rows = plugins.rootfs_builders.items()
    plugins.rootfs_builders = dict(sorted(rows, key=lambda row: plugins.builder_owners[row[0]][0]))


@dataclass(slots=True)
class _Given:
    """What one plugin hands over, by kind and name, before it is let in."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, kind: str, name: object, thing: object, contract: type | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise PluginError(f"it registers a {kind} without a name")
        if lacking := _lacking(thing, contract):
            raise PluginError(f"its {kind} {name!r} lacks {', '.join(lacking)}")
        table = self.tables.setdefault(kind, {})
        if name in table:
            raise PluginError(f"it registers the {kind} {name!r} twice")
        table[name] = thing

    def merge_into(self, plugins: Plugins) -> None:
        if own := sorted(self.tables.get("command", {}).keys() & VERBS.keys()):
            raise PluginError(f"the command {own[0]!r} is forkd's own", hint="give the verb another name")
        targets = {kind: getattr(plugins, attribute) for kind, attribute in KINDS.items()}
        for kind, table in self.tables.items():
            if taken := sorted(table.keys() & targets[kind].keys()):
                raise PluginError(f"the {kind} {taken[0]!r} is taken by another plugin")
        for kind, table in self.tables.items():
            targets[kind].update(table)

    def names(self) -> list[str]:
        return [f"{kind} {name}" for kind, table in self.tables.items() for name in table]


KINDS = {
    "engine": "engines",
    "memory backend": "memory_backends",
    "branch mode": "branch_modes",
    "rootfs builder": "rootfs_builders",
    "hub transport": "hub_transports",
    "command": "commands",
}
"""What a plugin can hand over, and where it ends up in Plugins."""


def _collect(hook: Any) -> _Given:
    given = _Given()

    def transport(one: Any) -> None:
        for scheme in one.schemes:
            given.add("hub transport", scheme, one, HubTransport)

    hook.forkd_register_engines(register=lambda name, factory: given.add("engine", name, factory))
    hook.forkd_register_memory_backends(register=lambda one: given.add("memory backend", one.name, one, MemoryBackend))
    hook.forkd_register_branch_modes(register=lambda one: given.add("branch mode", one.name, one, BranchMode))
    hook.forkd_register_rootfs_builders(register=lambda one: given.add("rootfs builder", one.name, one, RootfsBuilder))
    hook.forkd_register_hub_transports(register=transport)
    hook.forkd_register_commands(commands=lambda verb, path, about: given.add("command", verb, (path, about)))
    return given


def _lacking(thing: object, contract: type | None) -> list[str]:
    """Public names of the contract that ``thing`` does not have."""
    if contract is None:
        return []
    names = {*vars(contract), *contract.__annotations__}
    return sorted(name for name in names if not name.startswith("_") and not hasattr(thing, name))


def _callers(manager: pluggy.PluginManager, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each plugin that implements ``hook`` and a way to call it alone."""
    everyone = manager.get_plugins()
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        others = everyone - {implementation.plugin}
        yield implementation.plugin_name, manager.subset_hook_caller(hook, others)


def _reason(error: BaseException) -> str:
    if isinstance(error, ForkdError):
        return error.message
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}, line {error.lineno})"
        return f"SyntaxError: {error.msg}{where}"
    return f"{type(error).__name__}: {error}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _pick(table: dict[str, T], name: str, kind: str) -> T:
    try:
        return table[name]
    except KeyError:
        raise BadInput(f"there is no {kind} {name!r}", hint=f"there are: {', '.join(sorted(table))}") from None
