"""First byte, throughput and memory of streams and files: the SDK against the raw agent link, in one run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from forkd.config import load_settings
from forkd.daemon.app import make_app
from forkd.runtime import open_runtime
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.inprocess import InProcessTransport

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conftest import large_parent, resident_mib

PARENT = "python-numpy"
MIB = 1 << 20
FILE_MIB = int(os.environ.get("FILE_MIB", "96"))
SMALL_MIB = 200
STDOUT_MIB = 200


async def parent(controller: AsyncController) -> str:
    """A parent whose children have room for the file."""
    return await large_parent(controller, load_settings().data_dir) if FILE_MIB > SMALL_MIB else PARENT


async def pieces(count: int) -> AsyncIterator[bytes]:
    data = os.urandom(MIB)
    for _ in range(count):
        yield data


async def ratios() -> None:
    """Time to the first byte and file throughput through the SDK, as multiples of the raw link's."""
    async with open_runtime(load_settings()) as runtime, trio.open_nursery() as nursery:
        transport = InProcessTransport(make_app(runtime), nursery)
        async with AsyncController("http://forkd", timeout=None, transport=transport) as controller:
            child = (await controller.spawn_sandboxes(await parent(controller), 1))[0]["id"]
            link = runtime.sandbox(child).link
            raw, sdk = [], []
            for _ in range(15):
                began = time.monotonic()
                async with link.exec(["echo", "x"]) as stream:
                    await anext(stream)
                    raw.append(time.monotonic() - began)
                    await stream.result()
                sdk.append(await _first_byte(controller, child))
            low, high = statistics.median(raw) * 1000, statistics.median(sdk) * 1000
            print(f"first byte: raw link {low:.1f} ms, SDK {high:.1f} ms, ratio {high / low:.2f}")
            rates: dict[str, float] = {}
            for name, work in (
                ("write raw", lambda: link.write_file("/root/a", pieces(FILE_MIB))),
                ("write SDK", lambda: controller.write_file(child, "/root/a", pieces(FILE_MIB))),
                ("read raw", lambda: _raw_read(link)),
                ("read SDK", lambda: _sdk_read(controller, child)),
            ):
                if name.startswith("write"):  # a new file is written beside the old one, and there is room for one
                    await controller.exec_command(child, ["rm", "-f", "/root/a"])
                began = time.monotonic()
                await work()
                seconds = time.monotonic() - began
                rates[name] = FILE_MIB / seconds
                print(f"{name} {FILE_MIB} MiB: {seconds:.2f} s, {rates[name]:.0f} MiB/s")
            for verb in ("write", "read"):
                print(f"{verb}: SDK at {rates[f'{verb} SDK'] / rates[f'{verb} raw']:.2f} of the raw link's throughput")
        nursery.cancel_scope.cancel()


async def _first_byte(controller: AsyncController, child: str) -> float:
    first: list[float] = []
    began = time.monotonic()
    await controller.exec_stream(child, ["echo", "x"], lambda _, __: first.append(time.monotonic()))
    return first[0] - began


async def _raw_read(link: object) -> None:
    async with link.read_file("/root/a") as stream:  # type: ignore[attr-defined]
        await stream.result()


async def _sdk_read(controller: AsyncController, child: str) -> None:
    async with controller.open_file(child, "/root/a") as data:
        async for _ in data:
            pass


async def memory() -> None:
    """How much a daemon grows while much goes through it."""
    environ = {key: value for key, value in os.environ.items() if key != "FORKD_URL"}
    command = [sys.executable, "-m", "forkd", "daemon", "--bind", "127.0.0.1:0", "--end-sandboxes"]
    daemon = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        assert daemon.stderr is not None
        url = ""
        for line in daemon.stderr:
            url = next((word for word in line.split() if word.startswith("http")), url)
            if "stop it with" in line:
                break
        async with AsyncController(url, timeout=None) as controller:
            child = (await controller.spawn_sandboxes(await parent(controller), 1))[0]["id"]
            await controller.write_file(child, "/root/a", pieces(1))
            await controller.read_file(child, "/root/a")
            for name, work in (
                (f"write {FILE_MIB} MiB", lambda: controller.write_file(child, "/root/a", pieces(FILE_MIB))),
                (f"read {FILE_MIB} MiB", lambda: _sdk_read(controller, child)),
                (
                    f"stdout {STDOUT_MIB} MiB",
                    lambda: controller.exec_stream(
                        child, ["head", "-c", str(STDOUT_MIB * MIB), "/dev/zero"], lambda _, __: None, 600
                    ),
                ),
            ):
                Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")
                before, began = resident_mib(daemon.pid), time.monotonic()
                await work()
                seconds = time.monotonic() - began
                grown = resident_mib(daemon.pid, "VmHWM") - before
                print(f"{name}: {seconds:.1f} s, daemon grew by {grown:.1f} MiB at its peak")
    finally:
        daemon.terminate()
        daemon.wait()


if __name__ == "__main__":
    trio.run(ratios)
    trio.run(memory)
