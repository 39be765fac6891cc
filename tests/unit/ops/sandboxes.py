"""Sandboxes without machines in a real runtime, for what verbs do around them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio

from forkd.config import Settings
from forkd.ops.children import Child
from forkd.ops.fork import ForkOptions
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox
from forkd.specs.engine import Slot
from forkd.specs.models import SandboxInfo
from tests.hub_support import add_snapshot

TAG = "parent"


class FakeMachine:
    """Remembers whether it runs."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.agent = None
        self.runs = True

    async def pause(self) -> None:
        await trio.lowlevel.checkpoint()
        self.runs = False

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self.runs = True

    async def save_devices(self) -> bytes:
        return b""

    def ram(self) -> list[object]:
        return []

    async def wait(self) -> str:
        await trio.sleep_forever()
        return ""

    async def kill(self) -> None:
        await trio.lowlevel.checkpoint()


class FakeGuest:
    """Answers every request, once ``open`` is set, or as it is told to fail."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def request(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return {}

    async def procs(self, timeout: float) -> list[Any]:
        return []


class FakeEngine:
    async def describe(self) -> Any:
        return SimpleNamespace(capabilities=frozenset())


def forks(runtime: Runtime) -> Callable[..., Awaitable[list[Child]]]:
    """What stands in for ``fork``: children sb-0, sb-1 …, or with the id they are to have."""
    number = itertools.count()

    async def fork(_: Runtime, tag: str, n: int, options: ForkOptions) -> list[Child]:
        ids = [options.sandbox_id or f"sb-{next(number)}" for _ in range(n)]
        details = {"network": options.network, "allow": list(options.allow), "warnings": list(options.warnings)}
        return [
            Child(index, await add_sandbox(runtime, sandbox_id, **details), None)
            for index, sandbox_id in enumerate(ids)
        ]

    return fork


@asynccontextmanager
async def scene(path: Path) -> AsyncIterator[Runtime]:
    """A daemon's runtime with a snapshot, whose engine is nobody's."""
    async with open_runtime(Settings(path, low_water_bytes=0), daemon=True) as runtime:
        add_snapshot(runtime, TAG)
        runtime.engines["qemu"] = cast(Any, FakeEngine())
        yield runtime
        for sandbox in list(runtime.sandboxes.values()):
            sandbox.stop.set()
            await sandbox.ended.wait()


async def add_sandbox(runtime: Runtime, sandbox_id: str, **fields: Any) -> Sandbox:
    """A sandbox that is up, forked from ``TAG``."""
    info = SandboxInfo(id=sandbox_id, snapshot_tag=TAG, created_at_unix=int(time.time()), **fields)
    slot = Slot(sandbox_id, runtime.slots.directory / sandbox_id)
    machine, guest = cast(Any, FakeMachine()), cast(Any, FakeGuest())
    sandbox = Sandbox(sandbox_id, machine, guest, slot, runtime.snapshots.load(TAG), info)

    async def run(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        runtime.sandboxes[sandbox_id] = sandbox
        task_status.started()
        await sandbox.stop.wait()
        await trio.lowlevel.checkpoint()
        del runtime.sandboxes[sandbox_id]
        runtime.inventory.remove(sandbox_id)
        sandbox.ended.set()

    await runtime.nursery.start(run)
    return sandbox
