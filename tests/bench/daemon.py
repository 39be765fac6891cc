"""What the daemon adds: eval over REST against the raw agent link, spawn over REST against the verb; JSON.

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

from forkd import AsyncController
from forkd.config import load_settings
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import end_sandbox

TAG = "python-numpy"
EVALS = 300
ROUNDS = 7


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
        report = {**await evals(runtime, controller), **await spawns(runtime, controller)}
    print(json.dumps({key: round(value, 3) for key, value in report.items()}, indent=2))


async def evals(runtime: Runtime, controller: AsyncController) -> dict[str, float]:
    """The same expression, in turns, so that both sides see the same machine."""
    (child,) = await fork(runtime, TAG, 1, ForkOptions())
    assert child.sandbox is not None
    link = child.sandbox.link
    other = (await controller.spawn_sandboxes(TAG, 1))[0]["id"]
    raw, rest = [], []
    for _ in range(EVALS):
        raw.append(await timed(lambda: link.eval("1 + 1", timeout=30)))
        rest.append(await timed(lambda: controller.eval_code(other, "1 + 1")))
    await end_sandbox(child.sandbox)
    await controller.kill_sandbox(other)
    raw_median, rest_median = statistics.median(raw[20:]), statistics.median(rest[20:])
    return {"eval_raw_ms": raw_median, "eval_rest_ms": rest_median, "eval_adds_ms": rest_median - raw_median}


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


if __name__ == "__main__":
    with daemon_process() as url:
        trio.run(main, url)
