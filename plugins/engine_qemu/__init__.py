"""Engine plugin: unmodified QEMU, with KVM where it really works and software emulation otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forkd.specs.hookspecs import Check, EngineFactory, hookimpl
from forkd.specs.host import Host


@hookimpl
def forkd_register_engines(register: Callable[[str, EngineFactory], None]) -> None:
    """Hand over the engine; nothing of QEMU is looked at before its first use."""
    from forkd.plugins.engine_qemu.engine import QemuEngine

    register("qemu", QemuEngine)


@hookimpl
def forkd_doctor_checks(host: Host) -> Iterable[Check]:
    """Is QEMU there, and new enough?"""
    from forkd.plugins.engine_qemu.host import doctor_checks

    return doctor_checks(host)
