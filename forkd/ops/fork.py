"""Fork children from a snapshot: resolve its memory once, then bring N sandboxes up side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import trio

from forkd.canary import Canary
from forkd.config import MAX_CHILDREN
from forkd.network import check_network
from forkd.ops.children import Child, or_ended
from forkd.ops.prewarm import prewarm
from forkd.ops.volumes import volume_disks
from forkd.pool import Waiting
from forkd.runtime import Runtime
from forkd.sandbox import Plan, Sandbox, run_sandbox
from forkd.slots import new_sandbox_id
from forkd.specs.engine import IDLE_NIC, USER_NETWORK, Machine, RestoreSpec, Slot
from forkd.specs.errors import BadInput, EngineError, ForkdError, GuestError, OutOfMemory, SnapshotNotReady
from forkd.specs.memory import MemoryLease
from forkd.specs.models import SandboxInfo, Snapshot
from forkd.specs.requests import CreateSandboxes, ForkSandbox
from forkd.store.chain import resolve
from forkd.store.snapshots import Stored
from forkd.templates import SPAWN
from forkd.warming import Recipe

log = logging.getLogger("forkd")


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """How children are made: which memory backend, with huge pages or not, cloned or restored, and their limits."""

    memory_backend: str = "file"
    hugepages: bool = False
    memory_limit_mib: int | None = None
    cpu_limit: float | None = None
    pids_limit: int | None = None
    io_limit_mibps: int | None = None
    best_effort: bool = False
    prewarm: bool = False
    spawn: str | None = None
    network: str = "none"
    allow: tuple[str, ...] = ()
    per_child_netns: bool = False
    keep_workdir: bool = False
    warnings: tuple[str, ...] = ()
    sandbox_id: str | None = None
    """An id that is free again, for a child that takes a former sandbox's place."""

    @classmethod
    def of(cls, request: CreateSandboxes) -> ForkOptions:
        """What a request asks for."""
        return cls(
            memory_backend=request.memory_backend or ("memfd" if request.live_fork else "file"),
            hugepages=request.hugepages,
            memory_limit_mib=request.memory_limit_mib,
            cpu_limit=request.cpu_limit,
            pids_limit=request.pids_limit,
            io_limit_mibps=request.io_limit_mibps,
            best_effort=request.best_effort,
            prewarm=request.prewarm,
            spawn=request.spawn,
            network=request.network,
            allow=tuple(request.allow),
            per_child_netns=request.per_child_netns,
            keep_workdir=request.keep_workdir,
        )

    @classmethod
    def of_fork(cls, request: ForkSandbox) -> ForkOptions:
        """What a fork of a running sandbox asks for."""
        return cls(
            memory_limit_mib=request.memory_limit_mib,
            cpu_limit=request.cpu_limit,
            pids_limit=request.pids_limit,
            io_limit_mibps=request.io_limit_mibps,
            best_effort=request.best_effort,
        )

    @property
    def needs_restore(self) -> str | None:
        """Why such a child cannot be cloned, if it cannot: a clone has its template's namespace and descriptors."""
        if self.network != "none":
            return "a child with networking has devices of its own"
        return "a child with a network namespace of its own starts in it" if self.per_child_netns else None

    @property
    def needs_own_start(self) -> bool:
        """Whether a machine of a pool would not do, as its process has to be started for this very child.

        A namespace is entered, and memory counted against a limit, from a process's start on; and a machine that waits
        has its id. Other limits are applied when it is claimed.
        """
        return self.needs_restore is not None or self.memory_limit_mib is not None or self.sandbox_id is not None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all children of one request share."""

    stored: Stored
    recipe: Recipe
    lease: MemoryLease


async def fork(runtime: Runtime, tag: str, n: int, options: ForkOptions) -> list[Child]:
    """Bring up ``n`` children of ``tag``. One child's failure is its own row; a broken snapshot raises at once."""
    if not 1 <= n <= MAX_CHILDREN:
        raise BadInput(f"{n} children are not possible", hint=f"give 1 to {MAX_CHILDREN}")
    with runtime.reading(tag):
        return await _fork(runtime, tag, n, options)


async def _fork(runtime: Runtime, tag: str, n: int, options: ForkOptions) -> list[Child]:
    prepared = await prepare(runtime, tag, options)
    stored, recipe = prepared.stored, prepared.recipe
    manifest, engine = stored.manifest, recipe.engine
    tap = manifest.hardware.network and IDLE_NIC not in (await engine.describe()).capabilities
    notes = await network_notes(runtime, manifest, options)
    spawn = _spawn(runtime, options)
    if options.needs_restore is None:
        kept, why = await runtime.templates.pick(runtime, recipe, n, spawn)
    else:
        kept, why = None, options.needs_restore if spawn == "template" else None
    children = [Child(index, None, None) for index in range(n)]

    async def up(
        start: Callable[[Slot], Awaitable[Machine]],
        by: str,
        canary: Canary | None = None,
        waiting: Waiting | None = None,
    ) -> Sandbox:
        sandbox_id = waiting.slot.id if waiting else options.sandbox_id or new_sandbox_id()
        info = _info(sandbox_id, tag, options, (*prepared.lease.warnings, *options.warnings, *notes))
        info.spawned_by = by
        if why is not None:
            info.warnings.append(f"restored, not cloned: {why}")
        plan = Plan(info.id, start, manifest.agent_sync, info, stored, canary=canary, tap=tap, waiting=waiting)
        if options.keep_workdir:
            plan = replace(plan, keep=runtime.settings.kept_dir / info.id)
            info.warnings.append(f"its work directory will be kept as {plan.keep}")
        sandbox: Sandbox = await runtime.nursery.start(run_sandbox, runtime, plan)
        return sandbox

    async def one() -> Sandbox:
        if kept is not None:
            try:
                sandbox = await up(kept.grown.template.clone, "template", kept.grown.canary)
                runtime.templates.counts.clones += 1
                return sandbox
            except OutOfMemory:
                raise
            except (EngineError, GuestError) as error:
                runtime.templates.failed(runtime, kept, error)
        waiting = None if options.needs_own_start else runtime.pools.take(tag, recipe)
        if waiting is not None:
            try:
                sandbox = await up(waiting.claim, "pool", waiting=waiting)
                runtime.templates.counts.claims += 1
                return sandbox
            except OutOfMemory:
                raise
            except (EngineError, GuestError) as error:
                runtime.templates.counts.fallbacks += 1
                log.warning("a machine of a pool failed and another is restored: %s", error)
        sandbox = await up(lambda slot: engine.restore(recipe.spec, slot), "restore")
        runtime.templates.counts.restores += 1
        return sandbox

    async def row(index: int) -> None:
        try:
            sandbox = await one()
            children[index] = Child(index, sandbox, None)
            if options.prewarm:
                await prewarm(runtime, sandbox)
        except ForkdError as error:
            children[index] = Child(index, None, error)

    with kept.in_use() if kept is not None else nullcontext():
        async with or_ended(children), trio.open_nursery() as nursery:
            for index in range(n):
                nursery.start_soon(row, index)
    runtime.observe("fork", tag=tag, asked=n, up=sum(child.sandbox is not None for child in children))
    return children


async def network_notes(runtime: Runtime, manifest: Snapshot, options: ForkOptions) -> list[str]:
    """What the user should know of the network asked for. Raises BadInput, CapabilityMissing."""
    info = await runtime.engine(manifest.platform.engine).describe()
    return check_network(
        options.network,
        options.allow,
        has_device=manifest.hardware.network,
        root=runtime.slots.networks.root,
        user_mode=USER_NETWORK in info.capabilities,
    )


def _spawn(runtime: Runtime, options: ForkOptions) -> str:
    spawn = options.spawn or runtime.settings.spawn
    if spawn not in SPAWN:
        raise BadInput(f"spawn is {spawn[:40]!r}", hint=f"use {', '.join(SPAWN)}")
    return spawn


async def prepare(runtime: Runtime, tag: str, options: ForkOptions) -> Prepared:
    """Everything all children share, checked once: chain, files, platform, disk, memory image."""
    if tag in runtime.writing:
        raise SnapshotNotReady(f"snapshot {tag!r} is still being written", hint="wait until its status is ready")
    layers = resolve(runtime.snapshots, tag)
    for layer in layers:
        layer.check_files()
    stored = layers[-1]
    manifest = stored.manifest
    engine = runtime.engine(manifest.platform.engine)
    engine.check(manifest.platform, await engine.describe())
    rootfs = runtime.disks.find(manifest.rootfs) if manifest.rootfs else None
    volumes = await volume_disks(runtime, engine, manifest.volumes)
    size = manifest.hardware.mem_mib << 20
    backend = runtime.plugins.memory_backend(options.memory_backend)
    image = await runtime.images.image(layers)
    lease = await backend.lease(image, size, hugepages=options.hugepages)
    spec = RestoreSpec(stored.vmstate, lease.image, rootfs, manifest.hardware, manifest.platform, volumes)
    return Prepared(stored, Recipe(manifest.content, manifest.agent_sync, engine, spec), lease)


def _info(sandbox_id: str, tag: str, options: ForkOptions, warnings: Sequence[str]) -> SandboxInfo:
    return SandboxInfo(
        id=sandbox_id,
        snapshot_tag=tag,
        created_at_unix=int(time.time()),
        memory_limit_mib=options.memory_limit_mib,
        cpu_limit=options.cpu_limit,
        pids_limit=options.pids_limit,
        io_limit_mibps=options.io_limit_mibps,
        best_effort=options.best_effort,
        hostname=sandbox_id,
        memory_backend=options.memory_backend,
        network=options.network,
        allow=list(options.allow),
        per_child_netns=options.per_child_netns,
        warnings=list(warnings),
    )
