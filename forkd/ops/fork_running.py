"""Fork a running sandbox: freeze it once, then clone children from that instant; nothing is written to disk."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

import trio

from forkd.canary import Canary
from forkd.config import MAX_CHILDREN
from forkd.ops.branch import branch, quickest_mode, source_of
from forkd.ops.fork import Child, ForkOptions, end_unless_made, fork
from forkd.runtime import Runtime
from forkd.sandbox import Plan, Sandbox, run_sandbox
from forkd.slots import new_sandbox_id
from forkd.specs.engine import TEMPLATE, MachineTemplate, TemplateEngine
from forkd.specs.errors import BadInput, ForkdError, TemplateRefused
from forkd.specs.models import SandboxInfo
from forkd.specs.requests import BranchRequest

CANARY_TIMEOUT = 30.0


async def fork_running(runtime: Runtime, sandbox_id: str, n: int, options: ForkOptions | None = None) -> list[Child]:
    """``n`` children of a running sandbox, all from the same instant; it stands still once, whatever ``n`` is.

    They build on the snapshot the sandbox was forked from, so later branches of theirs are against that one. Where the
    machine cannot be cloned its state is branched first, and the children are restored from that snapshot, which
    stays. One child's failure is its own row.
    """
    if not 1 <= n <= MAX_CHILDREN:
        raise BadInput(f"{n} children are not possible", hint=f"give 1 to {MAX_CHILDREN}")
    sandbox = runtime.sandbox(sandbox_id)
    source = source_of(sandbox)
    chosen = options or ForkOptions()
    engine = runtime.engine(source.manifest.platform.engine)
    try:
        if not isinstance(engine, TemplateEngine) or TEMPLATE not in (await engine.describe()).capabilities:
            raise TemplateRefused("this engine cannot clone machines here")
        if sandbox.info.network != "none" or sandbox.info.netns is not None:
            raise TemplateRefused("its clones would have its namespace and network devices")
        canary = await _canary(sandbox)
        async with sandbox.capturing:
            template = await engine.freeze(sandbox.machine, sandbox.slot, resume=True)
    except TemplateRefused as error:
        runtime.templates.counts.refusals += 1
        return await _through_a_snapshot(runtime, sandbox, n, chosen, error.message)
    children = [Child(index, None, None) for index in range(n)]
    async with end_unless_made(children):
        try:
            await _clone(runtime, sandbox, template, canary, children, chosen)
        finally:
            await template.close()
    up = sum(child.sandbox is not None for child in children)
    runtime.observe("fork_running", id=sandbox_id, asked=n, up=up, pause_ms=round(template.pause_ms, 3))
    return children


async def _canary(sandbox: Sandbox) -> Canary:
    with trio.move_on_after(CANARY_TIMEOUT):
        return await Canary.take(sandbox.machine, sandbox.link)
    raise TemplateRefused(f"the guest of {sandbox.id} did not answer within {CANARY_TIMEOUT:g} s")


async def _clone(
    runtime: Runtime,
    sandbox: Sandbox,
    template: MachineTemplate,
    canary: Canary,
    children: list[Child],
    options: ForkOptions,
) -> None:
    source = source_of(sandbox)

    async def one(index: int) -> None:
        info = _info(sandbox, options)
        plan = Plan(info.id, template.clone, source.manifest.agent_sync, info, source, canary=canary)
        try:
            children[index] = Child(
                index, await runtime.nursery.start(run_sandbox, runtime, plan), None, template.pause_ms
            )
            runtime.templates.counts.clones += 1
        except ForkdError as error:
            children[index] = Child(index, None, error, template.pause_ms)

    async with trio.open_nursery() as nursery:
        for index in range(len(children)):
            nursery.start_soon(one, index)


def _info(sandbox: Sandbox, options: ForkOptions) -> SandboxInfo:
    sandbox_id = options.sandbox_id or new_sandbox_id()
    return SandboxInfo(
        id=sandbox_id,
        snapshot_tag=sandbox.info.snapshot_tag,
        created_at_unix=int(time.time()),
        memory_limit_mib=options.memory_limit_mib,
        cpu_limit=options.cpu_limit,
        pids_limit=options.pids_limit,
        io_limit_mibps=options.io_limit_mibps,
        best_effort=options.best_effort,
        hostname=sandbox_id,
        spawned_by="fork",
        memory_backend=sandbox.info.memory_backend,
        warnings=list(options.warnings),
    )


async def _through_a_snapshot(
    runtime: Runtime, sandbox: Sandbox, n: int, options: ForkOptions, reason: str
) -> list[Child]:
    tag = f"fork-{sandbox.id}-{secrets.token_hex(2)}"
    labels = {**sandbox.info.labels, "made_by": "fork"}  # so that retention finds those whose children are gone
    mode = (await quickest_mode(runtime, sandbox)).name
    info = await branch(runtime, sandbox.id, BranchRequest(tag=tag, mode=mode, labels=labels))
    warning = f"forked through the snapshot {tag}: {reason}"
    chosen = replace(options, spawn="restore", warnings=(*options.warnings, warning))
    return [replace(child, pause_ms=info.pause_exact_ms) for child in await fork(runtime, tag, n, chosen)]
