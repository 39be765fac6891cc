"""`make bench-branch`: pause and total time of full, diff and live, and of QEMU's own background-snapshot.

Results of earlier runs for other RAM sizes stay in the JSON file; the chart shows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from forkd.config import Settings, load_settings
from forkd.linux.sparse import physical_bytes
from forkd.ops.branch import branch
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.parent import create_parent
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.specs.requests import BranchRequest, CreateSnapshot

ROOT = Path(__file__).parents[2]
PARENT = "python-numpy"
MODES = ("full", "diff", "live")
QEMU = "background-snapshot"
THROTTLE = 20 << 20


async def parent(runtime: Runtime, ram: int) -> str:
    """A warm parent of this size, made once."""
    tag = f"bench-{ram}"
    if not runtime.snapshots.path(tag).exists():
        rootfs = runtime.snapshots.load(PARENT).manifest.rootfs
        assert rootfs is not None
        request = CreateSnapshot(tag=tag, rootfs=str(runtime.disks.find(rootfs)), mem_size_mib=ram)
        await create_parent(runtime, request, lambda step, fraction: None)
    return tag


async def source(runtime: Runtime, tag: str, changed: int, backend: str) -> Sandbox:
    """A running child that has changed this many MiB."""
    (child,) = await fork(runtime, tag, 1, ForkOptions(memory_backend=backend))
    assert child.sandbox is not None, child.error
    answer = await child.sandbox.link.eval(f"import os; blob = os.urandom({changed} << 20); len(blob)", timeout=120)
    assert answer.error is None, answer
    return child.sandbox


async def one_branch(runtime: Runtime, sandbox: Sandbox, mode: str) -> dict[str, float]:
    began = time.monotonic()
    info = await branch(runtime, sandbox.id, BranchRequest(tag="bench-branch", mode=mode))
    total = (time.monotonic() - began) * 1000
    stored = runtime.snapshots.load(info.tag)
    row = {
        "pause_ms": info.pause_exact_ms or 0.0,
        "total_ms": total,
        "written_bytes": physical_bytes(stored.memory),
        "changed_bytes": (info.changed_pages or 0) * 4096,
    }
    runtime.snapshots.remove(info.tag)
    return row


async def one_background_snapshot(runtime: Runtime, sandbox: Sandbox) -> dict[str, float]:
    """QEMU's own: device state in a pause, RAM write-protected by userfaultfd and written by and by."""
    qmp = sandbox.machine._qmp  # type: ignore[attr-defined]
    await qmp.execute("migrate-set-capabilities", capabilities=[{"capability": "background-snapshot", "state": True}])
    await qmp.execute("migrate-set-parameters", max_bandwidth=1 << 40)
    target = runtime.settings.snapshots_dir / ".bench-qemu"
    stamps: dict[str, float] = {}
    note = qmp._note

    def noted(message: dict[str, Any]) -> None:
        if "event" in message:
            stamp = message["timestamp"]
            stamps.setdefault(message["event"], stamp["seconds"] + stamp["microseconds"] / 1e6)
        note(message)

    qmp._note = noted
    try:
        began = time.monotonic()
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        await qmp.execute_all(("getfd", {"fdname": "bench"}), descriptor=descriptor)
        os.close(descriptor)
        await qmp.execute("migrate", uri="fd:bench")
        while (status := (await qmp.execute("query-migrate"))["status"]) not in ("completed", "failed"):
            await trio.sleep(0.005)
        assert status == "completed", await qmp.execute("query-migrate")
        total = (time.monotonic() - began) * 1000
    finally:
        qmp._note = note
    written = physical_bytes(target)
    target.unlink()
    pause = (stamps["RESUME"] - stamps["STOP"]) * 1000
    return {"pause_ms": pause, "total_ms": total, "written_bytes": written, "changed_bytes": 0}


def summary(rows: list[dict[str, float]], **key: object) -> dict[str, Any]:
    pauses = sorted(row["pause_ms"] for row in rows)
    totals = sorted(row["total_ms"] for row in rows)
    return {
        **key,
        "repetitions": len(rows),
        "pause_ms": {
            "median": round(statistics.median(pauses), 2),
            "p99": round(pauses[min(len(pauses) - 1, round(0.99 * len(pauses)))], 2),
            "first": round(rows[0]["pause_ms"], 2),
            "worst_of_first_six_over_first": round(max(row["pause_ms"] for row in rows[:6]) / rows[0]["pause_ms"], 2),
        },
        "total_ms": {"median": round(statistics.median(totals), 1), "max": round(totals[-1], 1)},
        "written_bytes": round(statistics.median(row["written_bytes"] for row in rows)),
        "changed_bytes": round(statistics.median(row["changed_bytes"] for row in rows)),
    }


async def measure(settings: Settings, ram: int, changes: list[int], repetitions: int) -> list[dict[str, Any]]:
    results = []
    async with open_runtime(settings) as runtime:
        tag = await parent(runtime, ram)
        for changed in changes:
            for backend, mode in (*(("file", mode) for mode in MODES), ("memfd", "live"), ("memfd", QEMU)):
                # A source of its own for each: reading all of RAM maps it all, which lengthens every later fork.
                sandbox = await source(runtime, tag, changed, backend)
                rows = []
                for _ in range(repetitions):
                    if mode == QEMU:
                        rows.append(await one_background_snapshot(runtime, sandbox))
                    else:
                        rows.append(await one_branch(runtime, sandbox, mode))
                row = summary(rows, ram_mib=ram, changed_mib=changed, mode=mode, memory=backend, store="disk")
                print(row_line(row), file=sys.stderr)
                results.append(row)
                await end_sandbox(sandbox)
    return results


async def measure_throttled(settings: Settings, ram: int, changed: int, repetitions: int) -> list[dict[str, Any]]:
    """Diff and live with the store on a device that takes 20 MiB a second."""
    results = []
    async with open_runtime(settings) as runtime:
        await parent(runtime, ram)
    with throttled_store(settings, f"bench-{ram}") as slow:
        async with open_runtime(slow) as runtime:
            sandbox = await source(runtime, f"bench-{ram}", changed, "file")
            for mode in ("diff", "live"):
                rows = [await one_branch(runtime, sandbox, mode) for _ in range(repetitions)]
                row = summary(rows, ram_mib=ram, changed_mib=changed, mode=mode, memory="file", store="20 MiB/s")
                print(row_line(row), file=sys.stderr)
                results.append(row)
            await end_sandbox(sandbox)
    return results


async def measure_chain(settings: Settings, repetitions: int) -> dict[str, Any]:
    """Time to a first answer of a child of a chain of depth 5, once it is put together, and of its root."""
    async with open_runtime(settings) as runtime:
        tags = [await parent(runtime, 512)]
        for depth in range(1, 6):
            sandbox = await source(runtime, tags[-1], 4, "file")
            tags.append(f"bench-depth-{depth}")
            await branch(runtime, sandbox.id, BranchRequest(tag=tags[-1], mode="diff"))
            await end_sandbox(sandbox)
        times: dict[str, list[float]] = {tags[0]: [], tags[-1]: []}
        for turn in range(repetitions + 1):  # the first round, which puts the chain together, does not count
            for tag, taken in times.items():
                began = time.monotonic()
                (child,) = await fork(runtime, tag, 1, ForkOptions(spawn="restore"))
                assert child.sandbox is not None, child.error
                await child.sandbox.link.eval("numpy.zeros(5).tolist()", timeout=60)
                if turn:
                    taken.append((time.monotonic() - began) * 1000)
                await end_sandbox(child.sandbox)
        for tag in reversed(tags[1:]):
            runtime.images.forget(runtime.snapshots.load(tag).manifest.content)
            runtime.snapshots.remove(tag)
    flat, deep = (statistics.median(taken) for taken in times.values())
    return {"depth_0_ms": round(flat, 1), "depth_5_ms": round(deep, 1), "ratio": round(deep / flat, 3)}


@contextmanager
def throttled_store(settings: Settings, tag: str) -> Iterator[Settings]:
    """A data directory on a loop device whose writes, which are synchronous, go at 20 MiB/s; needs root and blkio."""
    group = Path("/sys/fs/cgroup/blkio/forkd-bench")
    with tempfile.TemporaryDirectory(dir=settings.data_dir) as scratch:
        disk, mount = Path(scratch, "disk"), Path(scratch, "mnt")
        mount.mkdir()
        with open(disk, "xb") as out:
            out.truncate(1 << 30)
        run("mkfs.ext4", "-q", "-O", "^has_journal", str(disk))
        loop = run("losetup", "--show", "-f", str(disk))
        try:
            run("mount", "-o", "sync", loop, str(mount))
            group.mkdir(exist_ok=True)
            number = os.stat(loop).st_rdev
            rule = f"{os.major(number)}:{os.minor(number)} {THROTTLE}"
            (group / "blkio.throttle.write_bps_device").write_text(rule)
            (group / "cgroup.procs").write_text(str(os.getpid()))
            for name in ("rootfs", "kernels", "cache"):
                (mount / name).symlink_to(settings.data_dir / name)
            (mount / "snapshots").mkdir()
            (mount / "snapshots" / tag).symlink_to(settings.snapshots_dir / tag)
            yield load_settings({"FORKD_DATA_DIR": str(mount)})
        finally:
            (group.parent / "cgroup.procs").write_text(str(os.getpid()))
            run("umount", str(mount))
            run("losetup", "-d", loop)
            group.rmdir()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def row_line(row: dict[str, Any]) -> str:
    pause, total = row["pause_ms"], row["total_ms"]
    return (
        f"{row['ram_mib']:5} MiB, {row['changed_mib']:4} changed, {row['memory']:5} on {row['store']:8}"
        f" {row['mode']:20} pause {pause['median']:8.1f} ms (p99 {pause['p99']:8.1f})  total {total['median']:8.1f} ms"
        f"  {row['written_bytes'] >> 20} MiB"
    )


def identity(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("ram_mib", "changed_mib", "memory", "store", "mode"))


def chart(results: list[dict[str, Any]], out: Path) -> None:
    """Pause by changed bytes, one panel for each RAM size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = [row for row in results if row["store"] == "disk" and (row["memory"] == "file" or row["mode"] == QEMU)]
    sizes = sorted({row["ram_mib"] for row in plain})
    figure, panels = pyplot.subplots(2, len(sizes), figsize=(4.5 * len(sizes), 7), sharey="row", squeeze=False)
    for column, ram in enumerate(sizes):
        for mode in (*MODES, QEMU):
            rows = sorted(
                (row for row in plain if row["ram_mib"] == ram and row["mode"] == mode),
                key=lambda row: int(row["changed_mib"]),
            )
            changed = [row["changed_mib"] for row in rows]
            for panel, what in zip(panels[:, column], ("pause_ms", "total_ms"), strict=True):
                label = f"QEMU {mode}" if mode == QEMU else mode
                panel.plot(changed, [row[what]["median"] for row in rows], marker="o", label=label)
                panel.set_yscale("log")
                panel.grid(visible=True, which="both", alpha=0.3)
        panels[0, column].set_title(f"{ram} MiB of RAM")
        panels[1, column].set_xlabel("MiB changed since the fork")
    panels[0, 0].set_ylabel("source stands still (ms, median)")
    panels[1, 0].set_ylabel("until it is on disk (ms, median)")
    panels[0, 0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ram", type=int, nargs="*", default=[256, 512, 1024], help="MiB")
    parser.add_argument("--changed", type=int, nargs="*", default=[8, 64, 128], help="MiB")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--throttled", action="store_true", help="also with the store on a 20 MiB/s device")
    parser.add_argument("--chain", action="store_true", help="also spawning from a chain of depth 5")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "branch-bench.json")
    options = parser.parse_args()
    settings = load_settings()
    report = json.loads(options.out.read_text()) if options.out.exists() else {"results": []}
    results = report["results"]
    for ram in options.ram:
        results += trio.run(measure, settings, ram, options.changed, options.repetitions)
    if options.throttled:
        results += trio.run(measure_throttled, settings, 512, 64, options.repetitions)
    if options.chain:
        report["chain"] = trio.run(measure_chain, settings, options.repetitions)
        print(json.dumps(report["chain"]), file=sys.stderr)
    latest = {identity(row): row for row in results}
    rows = [latest[key] for key in sorted(latest, key=str)]
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({**report, "results": rows}, indent=1) + "\n")
    chart(rows, options.out.with_suffix(".png"))
    print(json.dumps({"results": len(rows), "json": str(options.out), "chart": str(options.out.with_suffix(".png"))}))


main()
