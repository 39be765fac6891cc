"""What a spawn on Firecracker costs our own process, beside a bare loop that only starts the same processes.

The VMM is the socket server of the tests, so this measures our side alone: CPU time of this process per child. Slots
are in memory (tmpfs): what a new name in a directory costs on a disk varies twentyfold with where the directory is.
Run: python tests/bench/firecracker_spawn.py [children]
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

from forkd.linux.hostprobe import HostProbe
from forkd.plugins.engine_firecracker.engine import FirecrackerEngine
from forkd.specs.engine import EngineContext, MemoryImage, RestoreSpec, Slot
from forkd.specs.models import Hardware, Platform

SERVER = Path(__file__).parents[1] / "unit/firecracker_server.py"
IN_MEMORY = "/dev/shm"
AT_A_TIME = 8


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def host(folder: Path) -> HostProbe:
    for name, text in (("proc/cpuinfo", "flags : vmx\n"), ("dev/kvm", ""), ("usr/bin/firecracker", "")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = folder / "usr/bin/firecracker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {SERVER} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return HostProbe(folder)


def bare(program: str, folder: Path, count: int) -> float:
    """Start the processes and nothing else; end them afterwards, off the clock."""
    began, children = cpu(), []
    for number in range(count):
        directory = folder / f"bare-{number}"
        directory.mkdir()
        children.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", program, "--api-sock", "api.sock"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                start_new_session=True,
            )
        )
    used = cpu() - began
    for child in children:
        child.kill()
        child.wait()
    return used


async def ours(engine: FirecrackerEngine, spec: RestoreSpec, folder: Path, count: int) -> tuple[float, float]:
    """Restore, a few at a time as the product does; (CPU, wall) until every guest was heard."""
    await engine.describe()
    machines = []
    limit = trio.Semaphore(AT_A_TIME)
    began, wall = cpu(), time.monotonic()

    async def one(number: int) -> None:
        async with limit:
            directory = folder / f"ours-{number}"
            directory.mkdir()
            machine = await engine.restore(spec, Slot(f"sb-{number}", directory))
            machines.append(machine)
            await machine.agent.receive_some(100)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    used, took = cpu() - began, time.monotonic() - wall
    for machine in machines:
        await machine.kill()
    return used, took


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        folder = Path(name)
        probe = host(folder / "root")
        for part in ("state", "image", "disk"):
            (folder / part).write_bytes(b"x")
        platform = Platform(
            engine="firecracker",
            engine_version="1.12.0",
            accelerator="kvm",
            machine="x",
            cpu="x",
            arch=os.uname().machine,
        )
        image = MemoryImage(str(folder / "image"), 256 << 20)
        spec = RestoreSpec(folder / "state", image, folder / "disk", Hardware(vcpus=1, mem_mib=256), platform)
        for turn in range(3):
            (folder / str(turn)).mkdir()
            floor = bare(str(folder / "root/usr/bin/firecracker"), folder / str(turn), count)
            engine = FirecrackerEngine(EngineContext(folder), probe)
            used, took = trio.run(ours, engine, spec, folder / str(turn), count)
            print(
                f"n={count}  bare loop {floor / count * 1000:.2f} ms CPU a child   "
                f"engine {used / count * 1000:.2f} ms CPU a child ({took * 1000:.0f} ms in all)   "
                f"ours on top {(used - floor) / count * 1000:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
