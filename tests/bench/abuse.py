"""How much a misbehaving child slows its neighbours: p99 of their evals, quiet and beside each abuser, in one run.

Run: python tests/bench/abuse.py [evals]     (root, cgroups; the parent `python-numpy` in the data directory)
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "vm"))
from test_abuse import ABUSES, LIMITS, PARENT

from forkd.config import load_settings
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.specs.errors import ForkdError


async def child(runtime: Runtime, options: ForkOptions) -> Sandbox:
    (row,) = await fork(runtime, PARENT, 1, options)
    assert row.sandbox is not None, row.error
    return row.sandbox


async def evals(neighbours: list[Sandbox], count: int) -> list[float]:
    took = []
    for number in range(count):
        began = time.monotonic()
        await neighbours[number % len(neighbours)].link.eval("numpy.zeros(5).tolist()", timeout=60)
        took.append((time.monotonic() - began) * 1000)
        await trio.sleep(0.01)
    return sorted(took)


async def abuse(abuser: Sandbox, command: list[str]) -> None:
    async def ignore(stream: str, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    try:
        await abuser.link.run(command, timeout=600, on_output=ignore)
    except ForkdError:
        return


async def main(count: int) -> None:
    async with open_runtime(load_settings()) as runtime:
        neighbours = [await child(runtime, ForkOptions()) for _ in range(2)]
        await evals(neighbours, 40)
        quiet = await evals(neighbours, count)
        floor = quiet[int(count * 0.99)]
        print(f"quiet        p50 {statistics.median(quiet):7.1f} ms   p99 {floor:7.1f} ms", flush=True)
        for what, (command, _) in ABUSES.items():
            abuser = await child(runtime, ForkOptions(**LIMITS))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(abuse, abuser, command)
                await trio.sleep(1)
                took = await evals(neighbours, count)
                nursery.cancel_scope.cancel()
            p99 = took[int(count * 0.99)]
            print(
                f"{what:12} p50 {statistics.median(took):7.1f} ms   p99 {p99:7.1f} ms   {p99 / floor:.2f}x", flush=True
            )
            if abuser.id in runtime.sandboxes:
                await end_sandbox(abuser)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 150)
