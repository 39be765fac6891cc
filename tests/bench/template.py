"""Cloned against restored children in one run: time to N answers, memory, idle CPU, disk and timers; forks that run.

Usage: template.py [PART ...] with parts answers, cost, running; all of them without. Prints JSON.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import sys
import time
from operator import truediv

import trio

from forkd.config import load_settings
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.fork_running import fork_running
from forkd.ops.stats import stats
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox, end_sandbox

TAG = "python-numpy"
EXPRESSION = "numpy.zeros(5).tolist()"
WORK = """
import os, time
def walk(top):
    began = time.perf_counter()
    size = 0
    for directory, _, names in os.walk(top):
        for name in names:
            try:
                with open(os.path.join(directory, name), "rb") as source:
                    size += len(source.read(4096))
            except OSError:
                pass
    return time.perf_counter() - began
def naps():
    began = time.perf_counter()
    for _ in range(200):
        time.sleep(0.001)
    return time.perf_counter() - began
def talk():
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far = server.accept()[0]
        began = time.perf_counter()
        for _ in range(500):
            near.sendall(b"x" * 1000)
            far.sendall(far.recv(1000))
            near.recv(1000)
        return time.perf_counter() - began
"""
PARTS = {"small_files": "walk('/usr/lib/python3')", "naps": "naps()", "tcp": "talk()"}
CHANGE = "import os; blob = os.urandom(64 << 20)"


async def up(runtime: Runtime, count: int, spawn: str) -> list[Sandbox]:
    children = await fork(runtime, TAG, count, ForkOptions(spawn=spawn))
    made = [child.sandbox for child in children if child.sandbox is not None]
    assert len(made) == count, [child.error for child in children]
    assert {each.info.spawned_by for each in made} == {spawn}
    return made


async def ask(sandbox: Sandbox, code: str) -> str:
    answer = await sandbox.link.eval(code, timeout=120)
    assert answer.error is None, answer
    return answer.result or ""


async def everyone(sandboxes: list[Sandbox], code: str) -> None:
    async with trio.open_nursery() as nursery:
        for sandbox in sandboxes:
            nursery.start_soon(ask, sandbox, code)


async def end(sandboxes: list[Sandbox]) -> None:
    async with trio.open_nursery() as nursery:
        for sandbox in sandboxes:
            nursery.start_soon(end_sandbox, sandbox)


async def seconds(runtime: Runtime, count: int, spawn: str) -> float:
    began = time.monotonic()
    children = await up(runtime, count, spawn)
    await everyone(children, EXPRESSION)
    spent = time.monotonic() - began
    await end(children)
    return spent


def plain_fork(count: int) -> float:
    """A warm Python process forked ``count`` times, each child answering the same expression."""
    import numpy

    eval(EXPRESSION, {"numpy": numpy})
    began = time.monotonic()
    pids, ends = [], []
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, repr(eval(EXPRESSION, {"numpy": numpy})).encode())
            os._exit(0)
        os.close(writing)
        pids.append(pid)
        ends.append(reading)
    for reading in ends:
        assert select.select([reading], [], [], 60)[0]
        assert os.read(reading, 100)
        os.close(reading)
    spent = time.monotonic() - began
    for pid in pids:
        os.waitpid(pid, 0)
    return spent


async def answers(runtime: Runtime) -> dict[str, object]:
    report: dict[str, object] = {}
    await seconds(runtime, 1, "template")
    for count, turns in ((1, 9), (10, 3), (100, 1)):
        cloned, restored = [], []
        for _ in range(turns):
            cloned.append(await seconds(runtime, count, "template"))
            restored.append(await seconds(runtime, count, "restore"))
        ours, theirs = statistics.median(cloned), statistics.median(restored)
        row = {"template_s": round(ours, 4), "restore_s": round(theirs, 4), "ratio": round(ours / theirs, 3)}
        report[f"n={count}"] = row
        print(f"n={count}", row, file=sys.stderr, flush=True)
    try:
        forked = await trio.to_thread.run_sync(plain_fork, 100)
        ours = await seconds(runtime, 100, "template")
        report["plain_fork_n=100"] = {"fork_s": round(forked, 4), "ratio": round(ours / forked, 2)}
    except ModuleNotFoundError as error:
        report["plain_fork_n=100"] = str(error)
    return report


async def cost(runtime: Runtime) -> dict[str, object]:
    """Memory after the first answer, CPU when idle, how quick disk, timers and TCP are: by pairs, as hosts vary."""
    kinds = ("template", "restore")
    spent: dict[str, dict[str, list[float]]] = {part: {kind: [] for kind in kinds} for part in PARTS}
    private, idle = {}, {}
    children = {kind: await up(runtime, 15, kind) for kind in kinds}
    for kind, made in children.items():
        await everyone(made, EXPRESSION)
        private[kind] = [(await stats(runtime, child.id))["vmm_private_bytes"] for child in made]
    await trio.sleep(11)  # until idle workers of the VMM have left
    for kind, made in children.items():
        before = [(await stats(runtime, child.id))["cpu_seconds"] for child in made]
        await trio.sleep(10)
        after = [(await stats(runtime, child.id))["cpu_seconds"] for child in made]
        idle[kind] = statistics.mean(late - early for early, late in zip(before, after, strict=True)) * 100
    for turn, pair in enumerate(zip(*children.values(), strict=True)):
        for kind, child in list(zip(kinds, pair, strict=True))[:: -1 if turn % 2 else 1]:
            await ask(child, WORK)
            for part, code in PARTS.items():
                spent[part][kind].append(float(await ask(child, code)))
    report: dict[str, object] = {}
    for kind, made in children.items():
        report[kind] = {
            "private_mib": round(statistics.median(private[kind]) / (1 << 20), 2),
            "idle_cpu_ms_per_s": round(idle[kind], 2),
            **{f"{part}_s": round(statistics.median(spent[part][kind]), 3) for part in PARTS},
        }
        await end(made)
    for part in PARTS:
        report[f"{part}_ratio"] = round(truediv(*map(statistics.median, spent[part].values())), 3)
    return report


async def running(runtime: Runtime) -> dict[str, object]:
    """How long a running source with 64 MiB changed stands still, for one child and for twenty."""
    report: dict[str, object] = {}
    source = (await up(runtime, 1, "restore"))[0]
    await ask(source, CHANGE)
    for count in (1, 20):
        pauses = []
        for _ in range(9 if count == 1 else 5):
            children = await fork_running(runtime, source.id, count)
            made = [child.sandbox for child in children if child.sandbox is not None]
            assert len(made) == count, [child.error for child in children]
            pauses.append(children[0].pause_ms or 0.0)
            await end(made)
        report[f"n={count}"] = {"pause_ms": round(statistics.median(pauses), 2), "worst_ms": round(max(pauses), 2)}
    await end([source])
    return report


async def main() -> None:
    parts = {"answers": answers, "cost": cost, "running": running}
    report: dict[str, object] = {}
    async with open_runtime(load_settings()) as runtime:
        for name in sys.argv[1:] or parts:
            report[name] = await parts[name](runtime)
    print(json.dumps(report, indent=2))


trio.run(main)
