"""The hooks a plugin may implement. Hooks hand over objects; they are plain functions, never ``async def``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pluggy

from forkd.specs.branch import BranchMode
from forkd.specs.engine import Engine, EngineContext
from forkd.specs.host import Host
from forkd.specs.memory import MemoryBackend
from forkd.specs.rootfs import RootfsBuilder
from forkd.specs.transport import HubTransport

PROJECT = "forkd"
CONTRACT_VERSION = 1
"""Plugins may state ``forkd_contract = 1``; one that states another number is left out and named."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

EngineFactory = Callable[[EngineContext], Engine]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of ``forkd doctor``: ``status`` is PASS, WARN, FAIL or SKIP; ``hint`` says how to fix it."""

    name: str
    status: str
    detail: str
    hint: str | None = None


@hookspec
def forkd_register_engines(register: Callable[[str, EngineFactory], None]) -> None:
    """Called once at start: hand over engine factories by name; a factory runs when its engine is first used."""


@hookspec
def forkd_register_memory_backends(register: Callable[[MemoryBackend], None]) -> None:
    """Called once at start: hand over ways to provide a child's RAM."""


@hookspec
def forkd_register_branch_modes(register: Callable[[BranchMode], None]) -> None:
    """Called once at start: hand over ways to capture a running machine."""


@hookspec
def forkd_register_rootfs_builders(register: Callable[[RootfsBuilder], None]) -> None:
    """Called once at start: hand over rootfs builders; the first that accepts a reference builds it."""


@hookspec
def forkd_register_hub_transports(register: Callable[[HubTransport], None]) -> None:
    """Called once at start: hand over hub transports by URL scheme."""


@hookspec
def forkd_register_commands(commands: Callable[[str, str, str], None]) -> None:
    """Called when the CLI lists its verbs: ``commands(verb, "module:click_command", help)``; imported when run."""


@hookspec
def forkd_doctor_checks(host: Host) -> Iterable[Check]:  # type: ignore[empty-body]
    """Called by ``forkd doctor``: rows about what this plugin needs of the host, learnt through ``host`` alone.

    Runs in a worker thread, so it may block briefly; must not raise.
    """


@hookspec
def forkd_observe(event: dict[str, Any]) -> None:
    """Called for every event (spawn, exec, branch, kill …) in order. Must not block and must not raise."""
