"""Packing and unpacking a warmed parent, beside ``zstd -T2`` on the same files in the same run; and peak RSS.

Run it alone: ``python tests/bench/hub.py [DATA_DIR [TAG]]``; the data directory is only read.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVEL = 3
ROUNDS = int(os.environ.get("ROUNDS", "3"))


def run(*command: str, env: dict[str, str] | None = None) -> tuple[float, float, float]:
    """Seconds, seconds of CPU and peak RSS in MiB of a command."""
    began = time.monotonic()
    pid = os.posix_spawnp(command[0], command, {**os.environ, **(env or {})}, file_actions=[
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ])  # fmt: skip
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, command
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def physical(path: Path) -> float:
    return path.stat().st_blocks * 512 / (1 << 20)


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".work/test-data").absolute()
    tag = sys.argv[2] if len(sys.argv) > 2 else "python-numpy"
    memory = data / "snapshots" / tag / "memory.bin"
    manifest = json.loads((memory.parent / "snapshot.json").read_text())
    disks = [data / "rootfs" / f"{manifest['rootfs']['digest'].partition(':')[2]}.ext4"]
    forkd = [sys.executable, "-m", "forkd"]
    with tempfile.TemporaryDirectory(dir=data.parent) as name:
        work = Path(name)
        host, there = work / "host", work / "there"
        host.mkdir()
        for part in ("snapshots", "rootfs", "cache"):
            (host / part).symlink_to(data / part)
        out = work / f"{tag}.forkd-snapshot.tar.zst"
        start = run(*forkd, "images", env={"FORKD_DATA_DIR": str(host)})[1]
        rows: dict[str, list[tuple[float, float, float]]] = {"zstd": [], "pack": [], "unpack": []}
        run("cat", str(memory))
        for _ in range(ROUNDS):
            seconds = cpu = 0.0
            for path in (memory, *disks):
                spent, busy, _ = run("zstd", f"-{LEVEL}", "-T2", "-q", "-f", "-o", str(work / "zstd.out"), str(path))
                seconds, cpu = seconds + spent, cpu + busy
            rows["zstd"].append((seconds, cpu, 0))
            shutil.rmtree(host / "blobs", ignore_errors=True)
            rows["pack"].append(run(*forkd, "pack", "--tag", tag, "-o", str(out), env={"FORKD_DATA_DIR": str(host)}))
            shutil.rmtree(there, ignore_errors=True)
            rows["unpack"].append(run(*forkd, "unpack", str(out), env={"FORKD_DATA_DIR": str(there)}))
        size, ram = out.stat().st_size, memory.stat().st_size
        zstd, pack, unpack = (statistics.median(row[0] for row in rows[name]) for name in rows)
        cpu_zstd, cpu_pack, cpu_unpack = (statistics.median(row[1] for row in rows[name]) for name in rows)
        print(f"memory {ram >> 20} MiB, on disk {physical(memory):.0f} MiB; disks {sum(map(physical, disks)):.0f} MiB")
        print(f"pack {size / (1 << 20):.1f} MiB: {ram / size:.1f} times smaller than RAM")
        peaks = {name: max(row[2] for row in rows[name]) for name in rows}
        print(f"zstd -{LEVEL} -T2  {zstd:.2f} s, {cpu_zstd:.2f} s of CPU")
        print(f"forkd pack    {pack:.2f} s, {cpu_pack:.2f} s of CPU; peak {peaks['pack']:.0f} MiB")
        print(f"forkd unpack  {unpack:.2f} s, {cpu_unpack:.2f} s of CPU; peak {peaks['unpack']:.0f} MiB")
        print(f"throughput of pack / zstd: {zstd / pack:.2f} by the clock, {cpu_zstd / cpu_pack:.2f} by CPU time,")
        print(f"  {cpu_zstd / (cpu_pack - start):.2f} by CPU time without the {start:.2f} s any command takes to start")


main()
