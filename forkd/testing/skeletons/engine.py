"""Engine: QEMU at a lower priority, so that a busy guest leaves the host its breath."""

from __future__ import annotations

import os
from collections.abc import Callable

from forkd.plugins.engine_qemu.engine import QemuEngine
from forkd.specs.engine import BootSpec, Machine, RestoreSpec, Slot
from forkd.specs.hookspecs import EngineFactory, hookimpl

forkd_contract = 1
NICE = 10


class SkeletonEngine(QemuEngine):
    """An engine need not inherit: anything that fulfils ``forkd.specs.engine.Engine`` will do."""

    name = "skeleton_engine"

    async def boot(self, spec: BootSpec, slot: Slot) -> Machine:  # type: ignore[override]
        """As QEMU does, then lower."""
        return _lowered(await super().boot(spec, slot))

    async def restore(self, spec: RestoreSpec, slot: Slot) -> Machine:  # type: ignore[override]
        """As QEMU does, then lower."""
        return _lowered(await super().restore(spec, slot))


def _lowered(machine: Machine) -> Machine:
    for thread in os.listdir(f"/proc/{machine.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), NICE)
    return machine


@hookimpl
def forkd_register_engines(register: Callable[[str, EngineFactory], None]) -> None:
    """Called once at start; the factory runs when the engine is first used (``FORKD_ENGINE=skeleton_engine``)."""
    register("skeleton_engine", SkeletonEngine)
