"""Engine plugin: unmodified Firecracker (1.10 or newer) on KVM, controlled over its API socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forkd.specs.hookspecs import Check, EngineFactory, hookimpl
from forkd.specs.host import Host


@hookimpl
def forkd_register_engines(register: Callable[[str, EngineFactory], None]) -> None:
    """Hand over the engine; nothing of Firecracker is looked at before its first use."""
    from forkd.plugins.engine_firecracker.engine import FirecrackerEngine

    register("firecracker", FirecrackerEngine)


@hookimpl
def forkd_doctor_checks(host: Host) -> Iterable[Check]:
    """Is Firecracker there, and new enough?"""
    from forkd.plugins.engine_firecracker.host import doctor_checks

    return doctor_checks(host)
