"""The one fork verb: children of a snapshot or of a running sandbox, each with details of its own; and going back."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import trio

from forkd.config import MAX_CHILDREN
from forkd.ops.awake import awake
from forkd.ops.branch import source_of
from forkd.ops.children import Child, Told, dress_children, or_ended
from forkd.ops.fork import ForkOptions, fork, network_notes, prepare
from forkd.ops.fork_running import Make, instant
from forkd.ops.lifecycle import check_details, dress
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox, end_sandbox, end_sandboxes
from forkd.specs.errors import BadInput, Conflict, ForkdError, GuestTimeout, SandboxNotFound
from forkd.specs.models import SandboxInfo
from forkd.specs.requests import ForkRequest, SandboxDetails

MAX_ANSWERS = 1000


class Answer:
    """A fork under way or done, under its idempotency key."""

    def __init__(self, request: ForkRequest) -> None:
        self.request = request
        self.done = trio.Event()
        self.children: list[Told] = []
        self.error: Exception | None = None
        self.abandoned = False


async def fork_any(runtime: Runtime, request: ForkRequest) -> list[Told]:
    """One row a child. With ``on_partial`` rollback one failure ends the others too, and is raised.

    The same ``idempotency_key`` gives the same answer, whether the first request is under way or done; this process
    remembers the last thousand. A deadline that passes ends whatever comes up after it.
    """
    key = request.idempotency_key
    answer = runtime.fork_answers.get(key) if key is not None else None
    if answer is None:
        _check(runtime, request)  # not for a repeated one: its names are taken, by its own children
        answer = Answer(request)
        if key is not None:
            runtime.fork_answers[key] = answer
            while len(runtime.fork_answers) > MAX_ANSWERS:
                runtime.fork_answers.pop(next(iter(runtime.fork_answers)))
        runtime.nursery.start_soon(_run, runtime, answer)
    elif answer.request != request:
        raise Conflict(f"the idempotency key {str(key)[:80]!r} was used for another request", hint="use a new key")
    try:
        with trio.move_on_after(request.deadline_secs if request.deadline_secs is not None else 86400):
            await answer.done.wait()
    finally:
        if not answer.done.is_set() and key is None:
            answer.abandoned = True
    if not answer.done.is_set():
        answer.abandoned = True
        raise GuestTimeout(f"the children were not up within {request.deadline_secs or 0:g} s; they are ended")
    if answer.error is not None:
        raise answer.error
    return answer.children


def _check(runtime: Runtime, request: ForkRequest) -> None:
    if not 1 <= request.n <= MAX_CHILDREN:
        raise BadInput(f"{request.n} children are not possible", hint=f"give 1 to {MAX_CHILDREN}")
    if len(request.per_child) > request.n:
        raise BadInput(f"per_child has {len(request.per_child)} entries for {request.n} children")
    if request.on_partial not in ("keep", "rollback"):
        raise BadInput(f"on_partial is {request.on_partial[:40]!r}", hint="keep or rollback")
    if request.deadline_secs is not None and not 0 < request.deadline_secs <= 86400:
        raise BadInput(f"a deadline of {request.deadline_secs:g} s is not possible")
    for details in (request.all_children, *request.per_child):
        check_details(runtime, details)


async def _run(runtime: Runtime, answer: Answer) -> None:
    request = answer.request
    rows: list[Child] = []
    try:
        rows = await _children(runtime, request)
        await dress_children(runtime, rows, lambda index: [request.all_children, *request.per_child[index : index + 1]])
        errors = [child.error for child in rows if child.error is not None]
        alive = [child.sandbox for child in rows if child.sandbox is not None]
        if answer.abandoned or (errors and (request.on_partial == "rollback" or not alive)):
            await end_sandboxes(alive)
            if answer.abandoned:
                answer.error = GuestTimeout("the children were not up in time; they are ended")
            elif errors:
                failed = [{"index": row.index, "error": str(row.error)} for row in rows if row.error is not None]
                errors[0].details["failed"] = failed
                answer.error = errors[0]
        answer.children = [Told(row.index, row.info, row.error) for row in rows]
    except Exception as error:  # raised to whoever asked: in the runtime's nursery it would end the whole runtime
        answer.error = error
        await end_sandboxes([child.sandbox for child in rows if child.sandbox is not None])
    finally:
        if answer.error is not None and request.idempotency_key is not None:
            runtime.fork_answers.pop(request.idempotency_key, None)
        answer.done.set()


async def _children(runtime: Runtime, request: ForkRequest) -> list[Child]:
    alike: dict[ForkOptions, list[int]] = {}
    for index in range(request.n):
        alike.setdefault(_options(request, index), []).append(index)
    try:
        sandbox = runtime.sandbox(request.source)
    except SandboxNotFound:
        if request.mode is not None:
            raise BadInput("mode is for a running sandbox", hint="leave it away to fork a snapshot") from None
        if not runtime.snapshots.path(request.source).exists() and request.source not in runtime.writing:
            raise
        return await _made(alike, partial(fork, runtime, request.source))
    for options in alike:  # before anything is captured for them
        await network_notes(runtime, source_of(sandbox).manifest, options)
    why = next((options.needs_restore for options in alike if options.needs_restore), None)
    async with awake(runtime, request.source), instant(runtime, sandbox, mode=request.mode, why=why) as make:
        children = await _made(alike, make)
    for child in children:
        if child.sandbox is not None:
            child.sandbox.info.forked_from = sandbox.id
    return children


def _options(request: ForkRequest, index: int) -> ForkOptions:
    """How one child is made: with the request's network, unless its own details name another."""
    network, allow = request.network, request.allow
    for details in (request.all_children, *request.per_child[index : index + 1]):
        if details.allow is not None or details.network not in (None, "allowlist"):
            allow = details.allow or []
        network = details.network or network
    return ForkOptions(network=network, allow=tuple(allow))


async def _made(alike: dict[ForkOptions, list[int]], make: Make) -> list[Child]:
    """All children in their order, made together where they are made alike."""
    children: list[Child] = []
    for options, indexes in alike.items():
        async with or_ended(children):
            made = await make(len(indexes), options)
        children += [replace(child, index=index) for index, child in zip(indexes, made, strict=True)]
    return sorted(children, key=lambda child: child.index)


async def rollback(runtime: Runtime, reference: str, tag: str) -> Sandbox:
    """A sandbox goes back to one of its snapshots and keeps its id, name and details.

    What it runs now ends once the snapshot is ready to be forked; if it then does not come up, the sandbox is gone,
    and the error says so.
    """
    sandbox = runtime.sandbox(reference)
    stored = runtime.snapshots.load(tag)
    if tag != sandbox.info.snapshot_tag and stored.manifest.branched_from != sandbox.id:
        raise Conflict(f"snapshot {tag!r} is not one of {sandbox.id}", hint="branch it first; or fork the snapshot")
    with runtime.reading(tag):
        await prepare(runtime, tag, _like(sandbox.info))
        return await _replace(runtime, sandbox, partial(fork, runtime, tag))


async def promote(runtime: Runtime, reference: str) -> Sandbox:
    """A child takes over the id, name and details of the sandbox it was forked from, which ends."""
    child = runtime.sandbox(reference)
    source = runtime.sandboxes.get(child.info.forked_from or "")
    if source is None:
        raise Conflict(f"{child.id} was not forked from a sandbox that runs", hint="fork it with POST /v1/fork")
    why = _like(source.info).needs_restore
    async with awake(runtime, reference), instant(runtime, child, why=why) as make:
        made = await _replace(runtime, source, make)
    await end_sandbox(child)
    return made


async def _replace(runtime: Runtime, former: Sandbox, make: Make) -> Sandbox:
    """End a sandbox and make another one with its id and details."""
    info = former.info
    async with former.capturing:
        if former.stop.is_set():
            raise Conflict(f"sandbox {info.id} is ending, or was replaced meanwhile", hint="look again and retry")
        former.check_stays()
        await end_sandbox(former)
    try:
        row = (await make(1, _like(info)))[0]
        if row.sandbox is None:
            assert row.error is not None
            raise row.error
        async with or_ended([row]):  # without its details it might live for ever
            await _take_over(runtime, row.sandbox, info)
    except ForkdError as error:
        runtime.endings[info.id] = f"it was replaced, and the other did not come up: {error}"
        raise
    runtime.observe("replaced", id=info.id, tag=row.sandbox.info.snapshot_tag)
    return row.sandbox


async def _take_over(runtime: Runtime, sandbox: Sandbox, info: SandboxInfo) -> None:
    """Give a sandbox the details of another one."""
    new = sandbox.info
    new.forked_from, new.branch_count, new.has_branched = info.forked_from, info.branch_count, info.has_branched
    new.best_effort = info.best_effort
    left = None if info.expires_at_unix is None else max(0.001, info.expires_at_unix - time.time())
    details = SandboxDetails(
        name=info.name,
        labels=info.labels,
        metadata=info.metadata,
        env=info.env,
        timeout_secs=left,
        idle_pause_secs=info.idle_pause_secs,
    )
    await dress(runtime, sandbox, details)
    new.timeout_secs = info.timeout_secs


def _like(info: SandboxInfo) -> ForkOptions:
    """How to make a child that takes a sandbox's place: with its id, under its limits, on its network.

    A limit the host refuses is a warning: that sandbox has ended already.
    """
    return ForkOptions(
        sandbox_id=info.id,
        memory_backend=info.memory_backend,
        memory_limit_mib=info.memory_limit_mib,
        cpu_limit=info.cpu_limit,
        pids_limit=info.pids_limit,
        io_limit_mibps=info.io_limit_mibps,
        best_effort=True,
        network=info.network,
        allow=tuple(info.allow),
        per_child_netns=info.per_child_netns,
    )
