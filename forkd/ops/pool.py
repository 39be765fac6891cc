"""Warm pools: let machines wait for a snapshot's next children."""

from __future__ import annotations

import logging

from forkd.ops.fork import ForkOptions, prepare
from forkd.pool import MAX_POOL
from forkd.runtime import Runtime
from forkd.specs.engine import IDLE_NIC
from forkd.specs.errors import BadInput, CapabilityMissing, ForkdError
from forkd.specs.models import PoolInfo
from forkd.warming import Recipe

log = logging.getLogger("forkd")


async def set_pool(runtime: Runtime, tag: str, size: int) -> PoolInfo:
    """Let ``size`` machines wait for children of ``tag``; 0 ends them. Returns when it is so, or says what hinders it.

    Such a machine has a file's memory, no network and no memory limit: ``ForkOptions.needs_own_start`` says who cannot
    take one. Only children that are not cloned do: with ``spawn`` restore, or where there is no template.
    Raises BadInput, CapabilityMissing, and what forking from the snapshot would.
    """
    if not 0 <= size <= MAX_POOL:
        raise BadInput(f"a pool of {size} machines is not possible", hint=f"give 0 to {MAX_POOL}")

    async def recipe() -> Recipe:
        return (await prepare(runtime, tag, ForkOptions())).recipe

    if not size:
        runtime.snapshots.load(tag)  # there is nothing to end for one that is not there
        return await runtime.pools.resize(runtime, tag, 0)
    made = await recipe()
    able = (await made.engine.describe()).capabilities
    if made.spec.hardware.network and IDLE_NIC not in able:
        raise CapabilityMissing(
            f"a machine of engine {made.engine.name} needs its own network device from its start on",
            hint="pools are for engines whose device may lead nowhere, as QEMU's",
        )
    return await runtime.pools.resize(runtime, tag, size, recipe)


async def fill_pools(runtime: Runtime, sizes: dict[str, int]) -> None:
    """The pools of the settings; one that cannot be had is told in the log."""
    for tag, size in sizes.items():
        try:
            made = await set_pool(runtime, tag, size)
            log.info("%d machines wait for children of %s", made.waiting, tag)
        except ForkdError as error:
            log.warning("no pool of %s: %s", tag, error.message)
