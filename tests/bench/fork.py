"""`make bench`: time to N answers, product and raw floor in one run; cold boot, idle CPU and private memory; JSON."""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

import trio

from forkd.config import load_settings
from forkd.ops.snapshot import boot_machine
from forkd.provision import find_kernel
from forkd.runtime import open_runtime
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.inprocess import hosted_app
from forkd.specs.engine import BootSpec
from forkd.specs.models import Hardware

TAG = "python-numpy"
EXPRESSION = "numpy.zeros(5).tolist()"
HERE = Path(__file__).parent


def raw(count: int) -> float:
    settings = load_settings()
    snapshot = settings.snapshots_dir / TAG
    manifest = json.loads((snapshot / "snapshot.json").read_text())
    rootfs = settings.rootfs_dir / (manifest["rootfs"]["digest"].partition(":")[2] + ".ext4")
    command = [sys.executable, str(HERE / "raw_floor.py"), str(snapshot), str(rootfs), str(count), EXPRESSION]
    return float(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["seconds"])


async def product(controller: AsyncController, count: int) -> tuple[float, list[str]]:
    began = time.monotonic()
    # Restored, as the raw floor does it: clones of a template are another bench's matter.
    children = [child["id"] for child in await controller.spawn_sandboxes(TAG, count, spawn="restore")]

    async def ask(child: str) -> None:
        answer = await controller.eval_code(child, EXPRESSION, 120)
        assert answer["result"] == "[0.0, 0.0, 0.0, 0.0, 0.0]", answer

    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(ask, child)
    return time.monotonic() - began, children


async def end(controller: AsyncController, children: list[str]) -> None:
    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(controller.kill_sandbox, child)


async def cold_boot() -> float:
    """Boot the same machine from its kernel, until it has answered the same expression."""
    settings = load_settings()
    manifest = json.loads((settings.snapshots_dir / TAG / "snapshot.json").read_text())
    rootfs = settings.rootfs_dir / (manifest["rootfs"]["digest"].partition(":")[2] + ".ext4")
    kernel = await find_kernel(settings.data_dir)
    hardware = Hardware(vcpus=manifest["hardware"]["vcpus"], mem_mib=manifest["hardware"]["mem_mib"])
    async with open_runtime(settings) as runtime:
        began = time.monotonic()
        spec = BootSpec(kernel.kernel, kernel.initrd, rootfs, hardware, secrets.token_hex(16))
        sandbox = await boot_machine(runtime, spec)
        answer = await sandbox.link.eval(EXPRESSION, timeout=120)
        assert answer.error is None, answer
        return time.monotonic() - began


async def main() -> None:
    report: dict[str, object] = {}
    own_of_one = 0.0
    async with hosted_app() as transport:
        controller = AsyncController("http://forkd", timeout=None, transport=transport)
        for count, turns in ((1, 15), (10, 5), (100, 1)):
            floors, ours = [], []
            for _ in range(turns):
                floors.append(await trio.to_thread.run_sync(raw, count))
                seconds, children = await product(controller, count)
                ours.append(seconds)
                await end(controller, children)
            floor, own = statistics.median(floors), statistics.median(ours)
            own_of_one = own_of_one or own
            print(f"n={count}: raw {floor:.3f} s, forkd {own:.3f} s", file=sys.stderr)
            report[f"n={count}"] = {"raw_s": round(floor, 3), "forkd_s": round(own, 3), "ratio": round(own / floor, 3)}
        _, children = await product(controller, 10)
        before = [await controller.sandbox_stats(child) for child in children]
        await trio.sleep(10)
        after = [await controller.sandbox_stats(child) for child in children]
        spent = [(b["cpu_seconds"] - a["cpu_seconds"]) * 100 for a, b in zip(before, after, strict=True)]
        report["idle_cpu_ms_per_s"] = round(statistics.mean(spent), 2)
        report["guest_private_kib"] = round(statistics.median(s["guest_private_bytes"] for s in before) / 1024)
        report["vmm_private_mib"] = round(statistics.median(s["vmm_private_bytes"] for s in before) / (1 << 20), 1)
        await end(controller, children)
    boots = [await cold_boot() for _ in range(3)]
    report["cold_boot_s"] = round(statistics.median(boots), 3)
    report["cold_boot_over_one_fork"] = round(statistics.median(boots) / own_of_one, 1)
    print(json.dumps(report, indent=2))


trio.run(main)
