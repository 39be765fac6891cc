"""Doctor: is this host fit, and what would new machines run on?"""

from __future__ import annotations

import trio

from forkd.doctor import Place, core_checks
from forkd.linux.hostprobe import HostProbe
from forkd.runtime import Runtime
from forkd.specs.engine import TEMPLATE
from forkd.specs.errors import ForkdError
from forkd.specs.hookspecs import Check
from forkd.specs.host import Host


async def doctor(runtime: Runtime, host: Host | None = None) -> list[Check]:
    """Every row: forkd's own, the plugins', and what the engine chosen says of itself."""
    probe = HostProbe() if host is None else host
    place = Place(runtime.settings.data_dir, runtime.settings.kernel)

    def look() -> list[Check]:
        return [*core_checks(probe, place), *runtime.plugins.checks(probe)]

    return [*await trio.to_thread.run_sync(look), *await _engine(runtime), *_pools(runtime), _daemon(runtime)]


async def _engine(runtime: Runtime) -> list[Check]:
    try:
        info = await runtime.engine().describe()
    except ForkdError as error:
        return [Check("engine", "FAIL", error.message, error.hint)]
    made = info.platform
    rows = [Check("engine", "PASS", f"{made.engine} {made.engine_version} on {made.accelerator}: {info.why}")]
    if TEMPLATE in info.capabilities:
        rows.append(Check("spawn path", "PASS", "children can be cloned from a warm template"))
    else:
        rows.append(Check("spawn path", "PASS", "children are restored from the snapshot"))
    return rows


def _pools(runtime: Runtime) -> list[Check]:
    rows = []
    for pool in runtime.pools.pools.values():
        told = f"{len(pool.waiting)} of {pool.size} machines wait" + (f": {pool.problem}" if pool.problem else "")
        rows.append(Check(f"pool of {pool.tag}", "WARN" if pool.problem else "PASS", told))
    return rows


def _daemon(runtime: Runtime) -> Check:
    if runtime.slots.die_with_owner:
        return Check("daemon", "SKIP", "none: each command hosts the app itself, and its children end with it")
    return Check("daemon", "PASS", "this answer is the daemon's")
