"""`make bench`: time to N answers, product and raw floor in one run; cold boot, idle CPU and private memory; JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import trio

from forkd.config import load_settings
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.inprocess import hosted_app

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
    children = [child["id"] for child in await controller.spawn_sandboxes(TAG, count)]

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


async def main() -> None:
    report: dict[str, object] = {}
    async with hosted_app() as transport:
        controller = AsyncController("http://forkd", timeout=None, transport=transport)
        for count, turns in ((1, 7), (10, 3), (100, 1)):
            floors, ours = [], []
            for _ in range(turns):
                floors.append(await trio.to_thread.run_sync(raw, count))
                seconds, children = await product(controller, count)
                ours.append(seconds)
                await end(controller, children)
            floor, own = statistics.median(floors), statistics.median(ours)
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
        rootfs = next(load_settings().rootfs_dir.glob("*.ext4"))
        began = time.monotonic()
        await controller.create_snapshot("bench-cold-boot", rootfs=str(rootfs))
        report["cold_boot_and_capture_s"] = round(time.monotonic() - began, 2)
        await controller.delete_snapshot("bench-cold-boot")
    one = report["n=1"]
    assert isinstance(one, dict)
    report["cold_boot_over_one_fork"] = round(float(str(report["cold_boot_and_capture_s"])) / one["forkd_s"], 1)
    print(json.dumps(report, indent=2))


os.environ.setdefault("FORKD_DATA_DIR", str(load_settings().data_dir))
trio.run(main)
