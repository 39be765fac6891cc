"""What the daemon adds: eval over REST against the raw agent link, spawn over REST against the verb; JSON.

And what a warm pool takes away: from the request to a restored child's first answer, with machines waiting and without.

Run with `python tests/bench/daemon.py` and FORKD_DATA_DIR set to a directory that has the parent `python-numpy`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from forkd import AsyncController, Controller
from forkd.config import load_settings
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import end_sandbox

TAG = "python-numpy"
EVALS = 300
ROUNDS = 7
POOL = 10
CLAIMS = 15
NUMPY = "int(__import__('numpy').arange(10).sum())"


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1000


@contextmanager
def daemon_process() -> Iterator[str]:
    """A daemon on the same data directory as ours; its URL."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = ["--bind", "127.0.0.1:0", "--socket", f"{scratch}/daemon.sock", "--end-sandboxes"]
        command = [sys.executable, "-m", "forkd", "daemon", *flags]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        words = next(line.split() for line in process.stderr if "http://" in line)
        try:
            yield words[-1]
        finally:
            process.terminate()
            process.wait()


async def main(url: str) -> None:
    """Our own process hosts a runtime for the raw side; the daemon serves the other side, in turns."""
    async with open_runtime(load_settings()) as runtime, AsyncController(url, timeout=None) as controller:
        report = {**await evals(runtime, controller), **await spawns(runtime, controller), **await claims(controller)}
    print(json.dumps({key: round(value, 3) for key, value in report.items()}, indent=2))


async def evals(runtime: Runtime, controller: AsyncController) -> dict[str, float]:
    """The same expression, in turns, so that both sides see the same machine; with the sync SDK, then the async one."""
    (child,) = await fork(runtime, TAG, 1, ForkOptions())
    assert child.sandbox is not None
    link = child.sandbox.link
    other = (await controller.spawn_sandboxes(TAG, 1))[0]["id"]
    report: dict[str, float] = {}
    with Controller(controller.base_url, timeout=None) as blocking:

        async def sync() -> object:
            return blocking.eval_code(other, "1 + 1")  # nothing else happens in this process meanwhile

        for name, ask in (("sync", sync), ("async", lambda: controller.eval_code(other, "1 + 1"))):
            raw, rest = [], []
            for _ in range(EVALS):
                raw.append(await timed(lambda: link.eval("1 + 1", timeout=30)))
                rest.append(await timed(ask))
            first, second = statistics.median(raw[20:]), statistics.median(rest[20:])
            report |= {f"eval_raw_{name}_ms": first, f"eval_{name}_ms": second, f"eval_{name}_adds_ms": second - first}
    await end_sandbox(child.sandbox)
    await controller.kill_sandbox(other)
    return report


async def spawns(runtime: Runtime, controller: AsyncController) -> dict[str, float]:
    """Ten children each, in turns."""
    verb, rest = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        children = await fork(runtime, TAG, 10, ForkOptions())
        verb.append((time.perf_counter() - began) * 1000)
        async with trio.open_nursery() as nursery:
            for child in children:
                assert child.sandbox is not None
                nursery.start_soon(end_sandbox, child.sandbox)
        began = time.perf_counter()
        rows = await controller.spawn_sandboxes(TAG, 10)
        rest.append((time.perf_counter() - began) * 1000)
        async with trio.open_nursery() as nursery:
            for row in rows:
                nursery.start_soon(controller.kill_sandbox, row["id"])
    first, second = statistics.median(verb[1:]), statistics.median(rest[1:])
    return {"spawn10_verb_ms": first, "spawn10_rest_ms": second, "spawn10_ratio": second / first}


async def claims(controller: AsyncController) -> dict[str, float]:
    """One child to its first answer, and ten to the last of theirs; with a pool and without, in turns."""

    async def answered(n: int) -> float:
        began = time.perf_counter()
        rows = await controller.spawn_sandboxes(TAG, n, spawn="restore")
        async with trio.open_nursery() as nursery:
            for row in rows:
                nursery.start_soon(controller.eval_code, row["id"], NUMPY)
        took = (time.perf_counter() - began) * 1000
        async with trio.open_nursery() as nursery:
            for row in rows:
                nursery.start_soon(controller.kill_sandbox, row["id"])
        return took

    report: dict[str, float] = {}
    for n, rounds in ((1, CLAIMS), (POOL, ROUNDS)):
        took: dict[int, list[float]] = {0: [], POOL: []}
        for _ in range(rounds):
            for size, times in took.items():
                await controller.set_pool(TAG, size)
                times.append(await answered(n))
        without, pooled = statistics.median(took[0][1:]), statistics.median(took[POOL][1:])
        report |= {f"claim{n}_ms": pooled, f"claim{n}_without_ms": without, f"claim{n}_ratio": pooled / without}
    return report


if __name__ == "__main__":
    with daemon_process() as url:
        trio.run(main, url)
