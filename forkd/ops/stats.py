"""What a sandbox costs the host: memory of its own and CPU time."""

from __future__ import annotations

import os
from typing import Any

import trio

from forkd.linux import pagemap
from forkd.runtime import Runtime
from forkd.specs.errors import MachineGone


async def stats(runtime: Runtime, sandbox_id: str) -> dict[str, Any]:
    """Guest RAM private to the child, all private memory of its VMM, and the CPU time it has used."""
    machine = runtime.sandbox(sandbox_id).machine

    def measure() -> dict[str, Any]:
        try:
            regions = machine.ram()
            own = sum(pagemap.own_bytes(machine.pid, region.address, region.length) for region in regions)
            return {
                "id": sandbox_id,
                "guest_private_bytes": own,
                "vmm_private_bytes": _private_bytes(machine.pid),
                "cpu_seconds": _cpu_seconds(machine.pid),
            }
        except OSError as error:
            raise MachineGone(f"VMM {machine.pid} of {sandbox_id} cannot be measured: {error.strerror}") from error

    return await trio.to_thread.run_sync(measure)


def _private_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Private_"))


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
