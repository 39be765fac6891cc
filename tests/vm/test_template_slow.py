"""Clones in great numbers, for long, deep, and of every size; run with ``-m slow``."""

from __future__ import annotations

import ast
import ctypes
import os
import random
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.config import load_settings
from forkd.linux.mapping import read_totals
from forkd.linux.process import start_time
from forkd.ops.branch import branch
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.fork_running import fork_running
from forkd.ops.parent import create_parent
from forkd.ops.remove import remove_snapshot
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.specs.engine import Slot
from forkd.specs.requests import BranchRequest, CreateSnapshot
from forkd.testing.engine import linked
from tests.conftest import none_left

pytestmark = [pytest.mark.vm, pytest.mark.slow]
PARENT = "python-numpy"
MANY, SOAK = 1000, 3000


@pytest.fixture
async def runtime(data_dir: Path) -> AsyncIterator[Runtime]:
    async with open_runtime(load_settings({}, data_dir=data_dir)) as made:
        yield made


async def children(runtime: Runtime, n: int, tag: str = PARENT, spawn: str = "template") -> list[Sandbox]:
    made = await fork(runtime, tag, n, ForkOptions(spawn=spawn))
    assert [child.error for child in made if child.error] == []
    assert {child.sandbox.info.spawned_by for child in made if child.sandbox} == {spawn}
    return [child.sandbox for child in made if child.sandbox is not None]


async def ask(sandbox: Sandbox, code: str) -> Any:
    answer = await sandbox.link.eval(code, timeout=300)
    assert answer.error is None, answer
    return None if answer.result is None else ast.literal_eval(answer.result)


async def test_a_thousand_children_alive_at_once_all_answer_all_differ_and_all_go(
    runtime: Runtime, machines: Callable[[], list[int]]
) -> None:
    made = await children(runtime, MANY)
    answers: list[tuple[str, str, str]] = []

    async def one(child: Sandbox) -> None:
        code = "import os, socket; (os.urandom(16).hex(), repr(numpy.random.rand()), socket.gethostname())"
        answers.append(await ask(child, code))

    async with trio.open_nursery() as nursery:
        for child in made:
            nursery.start_soon(one, child)
    assert len(machines()) in (MANY, MANY + 1)  # the template may still ripen
    assert [len(set(values)) for values in zip(*answers, strict=True)] == [MANY] * 3
    async with trio.open_nursery() as nursery:
        for child in made:
            nursery.start_soon(end_sandbox, child)
    await none_left(machines)
    assert runtime.templates.counts.fallbacks == 0


async def test_thousands_of_clones_that_work_and_are_killed_leave_nothing_and_are_never_wrong(
    runtime: Runtime, machines: Callable[[], list[int]]
) -> None:
    chance = random.Random(1)
    limit = trio.CapacityLimiter(8)
    first = (await children(runtime, 1))[0]
    kept = young = next(iter(runtime.templates.kept.values()))
    with trio.fail_after(60):
        while kept is young:  # until the riper one has taken its place
            await trio.sleep(0.1)
            kept = next(iter(runtime.templates.kept.values()))

    def footprint() -> tuple[int, int, int]:
        descriptors = len(os.listdir("/proc/self/fd"))
        return descriptors, read_totals(kept.grown.template.pid)["Rss"], read_totals(os.getpid())["Pss"]

    async def life(number: int) -> None:
        async with limit:
            child = (await children(runtime, 1))[0]
            token = secrets.token_hex(8)
            for _ in range(chance.randrange(1, 4)):
                match chance.randrange(4):
                    case 0:
                        assert await ask(child, f"sum(range({number})) % 1000") == sum(range(number)) % 1000
                    case 1:
                        code = f"open('/root/f', 'w').write({token!r}); open('/root/f').read()"
                        assert await ask(child, code) == token
                    case 2:
                        done = await child.link.run(
                            ["sh", "-c", "cat /usr/bin/env /etc/os-release | wc -c"], timeout=300
                        )
                        assert done.exit_code == 0 and int(done.stdout) > 1000
                    case 3:
                        assert await ask(child, "import time; time.sleep(0.02)") is None
            if chance.random() < 0.3:
                os.kill(child.machine.pid, signal.SIGKILL)
                await child.ended.wait()
            else:
                await end_sandbox(child)

    async def lives(count: int) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(life, number)

    await lives(100)
    before = footprint()
    await lives(SOAK - 100)
    after = footprint()
    assert await ask(first, "1 + 1") == 2
    await end_sandbox(first)
    await none_left(machines)
    assert runtime.templates.counts.clones == SOAK + 1 and runtime.templates.counts.fallbacks == 0
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] * 1.05 and after[2] <= before[2] + (24 << 20), (before, after)


async def test_five_generations_each_forked_from_the_running_one_before(runtime: Runtime) -> None:
    sandbox = (await children(runtime, 1))[0]
    await ask(sandbox, "family = []")
    for generation in range(5):
        await ask(sandbox, f"family.append({generation})")
        first, second = [child.sandbox for child in await fork_running(runtime, sandbox.id, 2)]
        assert first is not None and second is not None
        for each in (first, second, sandbox):
            assert await ask(each, "family") == list(range(generation + 1))
        sandbox = first
    tag = f"t-{sandbox.id}"
    info = await branch(runtime, sandbox.id, BranchRequest(tag=tag, mode="live"))
    try:
        assert info.parent_tag == PARENT
        assert await ask((await children(runtime, 1, tag))[0], "family") == [0, 1, 2, 3, 4]
    finally:
        await remove_snapshot(runtime, tag)


@pytest.mark.parametrize("vcpus, mem_mib", [(1, 128), (2, 256), (4, 512), (1, 1024), (2, 2048)])
async def test_machines_of_every_size_are_cloned(runtime: Runtime, data_dir: Path, vcpus: int, mem_mib: int) -> None:
    rootfs = runtime.disks.find(runtime.snapshots.load(PARENT).manifest.rootfs)  # type: ignore[arg-type]
    tag = f"t-size-{secrets.token_hex(3)}"
    request = CreateSnapshot(tag=tag, rootfs=str(rootfs), mem_size_mib=mem_mib, vcpus=vcpus)
    await create_parent(runtime, request, lambda step, fraction: None)
    try:
        busy = "import threading; t = [threading.Thread(target=lambda: sum(range(20000))) for _ in range(8)]"
        for child in await children(runtime, 4, tag):
            await ask(child, busy)
            await ask(child, "[x.start() for x in t]; [x.join() for x in t]; None")
            assert await ask(child, "import os; os.cpu_count()") == vcpus
            done = await child.link.run(
                ["sh", "-c", "find /usr/lib -type f | head -300 | xargs cat | wc -c"], timeout=300
            )
            assert done.exit_code == 0
            grandchild = (await fork_running(runtime, child.id, 1))[0].sandbox
            assert grandchild is not None and await ask(grandchild, "len(t)") == 8
            await end_sandbox(grandchild)
        assert runtime.templates.counts.fallbacks == 0
    finally:
        await remove_snapshot(runtime, tag)


STEPS = ["seized", "framed", "armed", "entered", "forked", "held", "restored", "prepared"]
CLONE_STEPS = ["handed", "entered", "forked", "held", "built", "checked"]


@pytest.fixture
def orphans() -> Iterator[Callable[[], set[int]]]:
    """Processes left to us by one that ended."""

    def found() -> set[int]:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}

    before = found()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield lambda: found() - before
    for pid in found() - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def reap(pids: set[int]) -> None:
    for pid in pids:
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("phase, moment", [*(("freeze", s) for s in STEPS), *(("clone", s) for s in CLONE_STEPS)])
async def test_a_forkd_killed_at_any_step_leaves_the_machine_working_and_nothing_else(
    runtime: Runtime, tmp_path: Path, orphans: Callable[[], set[int]], phase: str, moment: str
) -> None:
    stored = runtime.snapshots.load(PARENT)
    code = f"""
        import os, signal, sys, trio
        from pathlib import Path
        from forkd.linux.clone import ProcessTemplate
        from forkd.plugins.engine_qemu import engine as module, template
        from forkd.specs.engine import EngineContext, MemoryImage, RestoreSpec, Slot
        from forkd.store.snapshots import SnapshotStore
        from forkd.config import load_settings
        from forkd.store.disks import DiskStore
        armed = {phase == "freeze"}
        def step(name):
            if armed and name == {moment!r}:
                os.kill(os.getpid(), signal.SIGKILL)
        original = ProcessTemplate.freeze.__func__
        template.ProcessTemplate.freeze = classmethod(lambda cls, *a, **k: original(cls, *a, **k, step=step))
        async def main():
            global armed
            settings = load_settings({{}}, data_dir=Path({str(runtime.settings.data_dir)!r}))
            stored = SnapshotStore(settings.snapshots_dir).load({PARENT!r})
            rootfs = DiskStore(settings.rootfs_dir).find(stored.manifest.rootfs)
            size = stored.manifest.hardware.mem_mib << 20
            image = MemoryImage(str(stored.memory), size)
            manifest = stored.manifest
            spec = RestoreSpec(stored.vmstate, image, rootfs, manifest.hardware, manifest.platform)
            engine = module.QemuEngine(EngineContext(Path({str(tmp_path)!r}) / "cache"))
            slot = Slot("sb-source", Path({str(tmp_path)!r}) / "source", die_with_owner=False)
            machine = await engine.restore(spec, slot)
            print(machine.pid, flush=True)
            made = await engine.freeze(machine, slot, resume=True)
            armed = True
            await made.clone(Slot("sb-clone", Path({str(tmp_path)!r}) / "clone", die_with_owner=False))
        trio.run(main)
    """
    (tmp_path / "source").mkdir()
    (tmp_path / "clone").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = await trio.to_thread.run_sync(lambda: subprocess.run(command, capture_output=True, text=True, timeout=120))
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    with trio.fail_after(30):
        while (left := orphans()) != {pid}:
            reap(left - {pid})
            await trio.sleep(0.01)
    slot = Slot("sb-source", tmp_path / "source")
    machine = await runtime.engine().adopt(slot, pid, start_time(pid))
    try:
        await machine.resume()
        async with linked(machine, bytes.fromhex(stored.manifest.agent_sync)) as link:
            assert (await link.eval("numpy.zeros(5).tolist()", timeout=60)).result == "[0.0, 0.0, 0.0, 0.0, 0.0]"
    finally:
        await machine.kill()
