"""The tools about snapshots and sandboxes."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import trio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from forkd.sdk.async_controller import AsyncController, OnProgress
from forkd.sdk.errors import ControllerError

P = ParamSpec("P")
T = TypeVar("T")
Row = dict[str, Any]

SandboxId = Annotated[str, Field(description="Id of a running sandbox, from spawn_sandboxes or list_sandboxes")]
Tag = Annotated[str, Field(description="Tag of a snapshot, from list_snapshots")]
Seconds = Annotated[float, Field(gt=0, le=3600, description="Time limit in seconds")]
EXCERPT = 256
TAIL = 4096
PROGRESS_SECS = 2.0


def told(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """A tool whose refusals reach the model as sentences: what, the stable code, and what to do about it."""

    @functools.wraps(call)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(*args, **kwargs)
        except ControllerError as error:
            hint = f" Hint: {error.hint}" if error.hint else ""
            raise ToolError(f"{error} [{error.code or error.status}]{hint}") from error

    return guarded


class SandboxTools:
    """Fork, run, branch, end; a name maps to whether the tool only looks."""

    NAMES = {
        "list_snapshots": True,
        "create_snapshot": False,
        "delete_snapshot": False,
        "spawn_sandboxes": False,
        "list_sandboxes": True,
        "get_sandbox": True,
        "kill_sandbox": False,
        "exec_command": False,
        "eval_code": False,
        "branch_sandbox": False,
        "fork_sandbox": False,
        "ping_sandbox": True,
    }

    def __init__(self, controller: AsyncController) -> None:
        self._controller = controller

    @told
    async def list_snapshots(self) -> list[Row]:
        """List the snapshots sandboxes can be forked from."""
        return await self._controller.list_snapshots()

    @told
    async def create_snapshot(
        self,
        tag: Annotated[str, Field(description="Tag of the new snapshot")],
        ctx: Context,
        kernel: Annotated[
            str | None, Field(description="Kernel file of the host; the one of `forkd setup` if absent")
        ] = None,
        rootfs: Annotated[str | None, Field(description="ext4 image of the host; or give `image`")] = None,
        rw: bool = False,
        tap: str | None = None,
        boot_wait_secs: Annotated[float, Field(ge=0, le=60, description="Extra seconds to let the guest settle")] = 0,
        image: Annotated[str | None, Field(description="debian:SUITE, an OCI reference, or a directory")] = None,
        extras: Annotated[list[str] | None, Field(description="Debian packages to add")] = None,
        mem_size_mib: int = 512,
        vcpus: int = 1,
    ) -> Row:
        """Boot a machine once, warm it and capture it, to be forked later. Takes seconds; a new image minutes."""
        fields = {"kernel": kernel, "rootfs": rootfs, "tap": tap, "image": image, "extras": extras}
        given = {name: value for name, value in fields.items() if value is not None}
        size = {"mem_size_mib": mem_size_mib, "vcpus": vcpus, "rw": rw, "boot_wait_secs": boot_wait_secs}
        async with progress_of(ctx) as on_progress:
            return await self._controller.create_snapshot(tag, on_progress, **given, **size)

    @told
    async def delete_snapshot(self, tag: Tag, cascade: bool = False) -> Row:
        """Remove a snapshot; with cascade also those that depend on it."""
        await self._controller.delete_snapshot(tag, cascade=cascade)
        return {"tag": tag, "deleted": True}

    @told
    async def spawn_sandboxes(
        self,
        snapshot_tag: Tag,
        ctx: Context,
        n: Annotated[int, Field(ge=1, le=1000, description="How many")] = 1,
        per_child_netns: bool = False,
        memory_limit_mib: Annotated[int | None, Field(ge=1, description="Limit of each; none if absent")] = None,
        prewarm: bool = False,
        live_fork: bool = False,
    ) -> list[Row]:
        """Fork n sandboxes from a snapshot, in milliseconds each. They start where the snapshot stopped."""
        flags = {"per_child_netns": per_child_netns, "prewarm": prewarm, "live_fork": live_fork}
        given: dict[str, Any] = {name: value for name, value in flags.items() if value}
        if memory_limit_mib is not None:
            given["memory_limit_mib"] = memory_limit_mib
        async with elapsed(ctx, f"forking {n} from {snapshot_tag}"):
            return await self._controller.spawn_sandboxes(snapshot_tag, n, **given)

    @told
    async def list_sandboxes(self) -> list[Row]:
        """List the running sandboxes."""
        return await self._controller.list_sandboxes()

    @told
    async def get_sandbox(self, sandbox_id: SandboxId) -> Row:
        """Look at one sandbox."""
        return await self._controller.get_sandbox(sandbox_id)

    @told
    async def kill_sandbox(self, sandbox_id: SandboxId) -> Row:
        """End a sandbox; all that is in it is gone, except what was branched."""
        await self._controller.kill_sandbox(sandbox_id)
        return {"id": sandbox_id, "killed": True}

    @told
    async def exec_command(
        self,
        sandbox_id: SandboxId,
        args: Annotated[
            list[str], Field(min_length=1, description='Program and arguments, as ["sh", "-c", "ls | wc"]')
        ],
        ctx: Context,
        timeout_secs: Seconds = 30,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: Annotated[str | None, Field(description="Text for its standard input")] = None,
    ) -> Row:
        """Run a program in a sandbox to its end: stdout, stderr, exit_code (124: it took too long)."""
        fields = {"cwd": cwd, "env": env, "stdin": stdin}
        given = {name: value for name, value in fields.items() if value is not None}
        async with elapsed(ctx, f"running {args[0][:40]}", timeout_secs):
            return await self._controller.exec_command(sandbox_id, args, timeout_secs, **given)

    @told
    async def eval_code(self, sandbox_id: SandboxId, code: str, ctx: Context, timeout_secs: Seconds = 30) -> Row:
        """Evaluate code in the sandbox's warm interpreter (Python, unless its snapshot says otherwise).

        Names last from call to call; `result` is the last expression's value, `stdout` what was printed.
        """
        async with elapsed(ctx, "evaluating", timeout_secs):
            return await self._controller.eval_code(sandbox_id, code, timeout_secs)

    @told
    async def branch_sandbox(
        self,
        sandbox_id: SandboxId,
        ctx: Context,
        tag: Annotated[str | None, Field(description="Tag of the new snapshot; made up if absent")] = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: Annotated[
            Literal["full", "diff", "live"] | None, Field(description="live stops the sandbox for milliseconds only")
        ] = None,
        wait: Annotated[
            bool, Field(description="Wait until it is written; else its status is 'writing' at first")
        ] = True,
    ) -> Row:
        """Keep a running sandbox's whole state (memory, processes, files) as a snapshot; it runs on."""
        async with elapsed(ctx, f"capturing {sandbox_id}"):
            return await self._controller.branch_sandbox(sandbox_id, tag, diff, measure_diff, mode, wait)

    @told
    async def fork_sandbox(
        self,
        sandbox_id: SandboxId,
        ctx: Context,
        n: Annotated[int, Field(ge=1, le=100, description="How many children")] = 2,
    ) -> list[Row]:
        """Fork a running sandbox: n children that go on from its present state, each on its own. It runs on."""
        async with elapsed(ctx, f"forking {n} from {sandbox_id}"):
            return await self._controller.fork_sandbox(sandbox_id, n)

    @told
    async def ping_sandbox(self, sandbox_id: SandboxId) -> Row:
        """Ask a sandbox's agent whether it is there."""
        return await self._controller.ping_sandbox(sandbox_id)


@asynccontextmanager
async def progress_of(ctx: Context) -> AsyncIterator[OnProgress]:
    """A callback that becomes progress notifications; it never waits, and a slow client misses some."""
    send, receive = trio.open_memory_channel[tuple[str, float | None]](64)

    def on_progress(step: str, fraction: float | None) -> None:
        try:
            send.send_nowait((step, fraction))
        except trio.WouldBlock:
            pass

    async def pump() -> None:
        steps: list[str] = []
        async for step, fraction in receive:
            if step not in steps:
                steps.append(step)
            await ctx.report_progress(len(steps) - 1 + (fraction or 0.0), None, step)

    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump)
        with send:
            try:
                yield on_progress
            except Exception as error:  # raised below as it is, not as a group
                failed = error
    if failed is not None:
        raise failed


@asynccontextmanager
async def elapsed(ctx: Context, doing: str, limit: float | None = None) -> AsyncIterator[None]:
    """Tell the client every few seconds how many have passed, of ``limit`` if there is one, while the block runs."""

    async def tick() -> None:
        began = trio.current_time()
        while True:
            await trio.sleep(PROGRESS_SECS)
            await ctx.report_progress(round(trio.current_time() - began, 1), limit, doing)

    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        try:
            yield
        except Exception as error:  # raised below as it is, not as a group
            failed = error
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed


def since(began: float) -> int:
    """Whole milliseconds since a monotonic time."""
    return round((time.monotonic() - began) * 1000)
