"""Work with a sandbox: find it by id or name, wake it if it dozed off, and keep it awake meanwhile."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import SandboxPaused


@asynccontextmanager
async def awake(runtime: Runtime, reference: str) -> AsyncIterator[Sandbox]:
    """The sandbox, running: one paused for being idle is resumed; one paused on purpose, or suspended, is refused."""
    sandbox = runtime.sandbox(reference)
    sandbox.check_stays()
    sandbox.users += 1
    try:
        if sandbox.info.status == "paused":
            if not sandbox.info.auto_paused:
                raise SandboxPaused(f"sandbox {reference} is paused", hint=f"forkd resume {reference}")
            await resume_sandbox(runtime, sandbox)
        yield sandbox
    finally:
        sandbox.users -= 1
        sandbox.used = trio.current_time()
        sandbox.changed.set()


async def pause_sandbox(runtime: Runtime, sandbox: Sandbox, *, auto: bool = False) -> None:
    """Stop its virtual CPUs. What it runs stands still and costs no CPU. ``auto``: unless somebody uses it."""
    async with sandbox.capturing:
        if not auto:
            sandbox.check_stays()
        if sandbox.info.status == "paused":
            sandbox.info.auto_paused = sandbox.info.auto_paused and auto
        elif not (auto and sandbox.users):
            await sandbox.machine.pause()
            if auto and sandbox.users:  # who came meanwhile believes that it runs
                await sandbox.machine.resume()
                return
            sandbox.info.status, sandbox.info.auto_paused = "paused", auto
            runtime.observe("paused", id=sandbox.id, auto=auto)
        runtime.inventory.save(sandbox)


async def resume_sandbox(runtime: Runtime, sandbox: Sandbox) -> None:
    """Let it run again, with the right time."""
    async with sandbox.capturing:
        sandbox.check_stays()
        if sandbox.info.status != "paused":
            return
        await sandbox.machine.resume()
        sandbox.info.status, sandbox.info.auto_paused = "running", False
        runtime.inventory.save(sandbox)
        await sandbox.link.request({"op": "resume", "time_ns": time.time_ns()}, timeout=30)
        runtime.observe("resumed", id=sandbox.id)
