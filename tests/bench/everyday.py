"""First byte, file throughput and memory through a daemon, as users have it, beside the raw agent link; JSON.

Each figure has the limit it is held to, and whether it holds. FILE_MIB and STDOUT_MIB make a run smaller.
Run: python tests/bench/everyday.py     (with the parent `python-numpy` in the data directory)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from forkd.config import load_settings
from forkd.guestlink import GuestLink
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import open_runtime
from forkd.sandbox import end_sandbox
from forkd.sdk.async_controller import AsyncController

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conftest import large_parent, resident_mib

PARENT = "python-numpy"
MIB = 1 << 20
FILE_MIB = int(os.environ.get("FILE_MIB", "1024"))
STDOUT_MIB = int(os.environ.get("STDOUT_MIB", "200"))
SMALL_MIB = 200
ROUNDS = 15
FIRST_BYTE_RATIO, FILE_RATIO, GROWN_MIB = 1.5, 0.6, 20.0
Work = Callable[[], Awaitable[object]]


async def pieces(count: int) -> AsyncIterator[bytes]:
    data = os.urandom(MIB)
    for _ in range(count):
        yield data


async def timed(work: Work) -> float:
    began = time.monotonic()
    await work()
    return time.monotonic() - began


@contextmanager
def daemon() -> Iterator[tuple[int, str]]:
    """A daemon of its own on the data directory: its pid, and where it listens."""
    environ = {key: value for key, value in os.environ.items() if key != "FORKD_URL"}
    command = [sys.executable, "-m", "forkd", "daemon", "--bind", "127.0.0.1:0", "--end-sandboxes"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            url = next((word for word in line.split() if word.startswith("http")), url)
            if "stop it with" in line:
                break
        try:
            yield process.pid, url
        finally:
            process.terminate()


async def first_byte(link: GuestLink, controller: AsyncController, child: str) -> dict[str, Any]:
    """Time to a command's first byte, taken in turns."""
    raw, sdk = [], []
    for _ in range(ROUNDS):
        began = time.monotonic()
        async with link.exec(["echo", "x"]) as stream:
            await anext(stream)
            raw.append(time.monotonic() - began)
            await stream.result()
        seen: list[float] = []
        began = time.monotonic()

        def on_output(_: str, __: bytes, seen: list[float] = seen) -> None:
            seen.append(time.monotonic())

        await controller.exec_stream(child, ["echo", "x"], on_output)
        sdk.append(seen[0] - began)
    low, high = statistics.median(raw) * 1000, statistics.median(sdk) * 1000
    ratio = high / low
    return {
        "raw_ms": round(low, 2),
        "sdk_ms": round(high, 2),
        "ratio": round(ratio, 2),
        "at_most": FIRST_BYTE_RATIO,
        "holds": ratio <= FIRST_BYTE_RATIO,
    }


async def raw_files(link: GuestLink) -> dict[str, float]:
    """Seconds a file takes each way on the raw link."""

    async def read() -> None:
        async with link.read_file("/root/a") as stream:
            await stream.result()

    return {"write": await timed(lambda: link.write_file("/root/a", pieces(FILE_MIB))), "read": await timed(read)}


async def sdk_files(controller: AsyncController, child: str) -> dict[str, float]:
    """The same through the daemon."""

    async def read() -> None:
        async with controller.open_file(child, "/root/a") as data:
            async for _ in data:
                pass

    write = await timed(lambda: controller.write_file(child, "/root/a", pieces(FILE_MIB)))
    return {"write": write, "read": await timed(read)}


def compared(raw: dict[str, float], sdk: dict[str, float]) -> dict[str, dict[str, Any]]:
    """A file's throughput each way, as a part of the raw link's."""
    return {
        verb: {
            "mib": FILE_MIB,
            "raw_mib_per_s": round(FILE_MIB / raw[verb], 1),
            "sdk_mib_per_s": round(FILE_MIB / sdk[verb], 1),
            "ratio": round(raw[verb] / sdk[verb], 2),
            "at_least": FILE_RATIO,
            "holds": raw[verb] / sdk[verb] >= FILE_RATIO,
        }
        for verb in raw
    }


async def stdout(pid: int, controller: AsyncController, child: str) -> dict[str, Any]:
    """How much the daemon grows, at its peak, while a command's output goes through it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = resident_mib(pid)
    command = ["head", "-c", str(STDOUT_MIB * MIB), "/dev/zero"]
    seconds = await timed(lambda: controller.exec_stream(child, command, lambda _, __: None, 600))
    grown = resident_mib(pid, "VmHWM") - before
    return {
        "mib": STDOUT_MIB,
        "seconds": round(seconds, 2),
        "daemon_grew_mib": round(grown, 1),
        "below": GROWN_MIB,
        "holds": grown < GROWN_MIB,
    }


async def main() -> None:
    settings = load_settings()
    report: dict[str, Any] = {}
    with daemon() as (pid, url):
        async with AsyncController(url, timeout=None) as controller, open_runtime(settings) as runtime:
            large = FILE_MIB > SMALL_MIB
            tag = await large_parent(controller, settings.data_dir) if large else PARENT
            child = (await controller.spawn_sandboxes(tag, 1))[0]["id"]
            (row,) = await fork(runtime, tag, 1, ForkOptions())
            assert row.sandbox is not None, row.error
            link = row.sandbox.link
            report["first byte"] = await first_byte(link, controller, child)
            raw = await raw_files(link)
            await end_sandbox(row.sandbox)  # two children with such a file are much for a small host
            report |= compared(raw, await sdk_files(controller, child))
            report["stdout"] = await stdout(pid, controller, child)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    trio.run(main)
