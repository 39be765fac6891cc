"""A sandbox's life: who it is called, how long it may live, when it may doze, what it is told from outside."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import trio

from forkd.ops.awake import awake, pause_sandbox, resume_sandbox
from forkd.ops.limits import update_sandbox
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import BadInput, ForkdError, NameTaken
from forkd.specs.models import SandboxInfo
from forkd.specs.requests import SandboxDetails, UpdateSandbox
from forkd.specs.tags import check_tag

MAX_TIMEOUT = 365 * 86400.0
MAX_LABELS = 64
MAX_VALUE = 4096
NAP = 86400.0
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_details(runtime: Runtime, details: SandboxDetails, own: Sandbox | None = None) -> None:
    """Raise BadInput or NameTaken for what cannot be."""
    if details.name is not None:
        check_tag(details.name, "name")
        holder = next((each for each in runtime.sandboxes.values() if each.info.name == details.name), None)
        if details.name in runtime.sandboxes or (holder is not None and holder is not own):
            raise NameTaken(f"there is a sandbox called {details.name!r}", hint="names are for one sandbox at a time")
    for what, seconds in (("timeout_secs", details.timeout_secs), ("idle_pause_secs", details.idle_pause_secs)):
        if seconds is not None and not 0 <= seconds <= MAX_TIMEOUT:
            raise BadInput(f"{what} is {seconds:g}", hint="give seconds above 0, or 0 for none")
    for what, pairs in (("labels", details.labels), ("metadata", details.metadata), ("env", details.env)):
        check_pairs(what, pairs or {})
    for key in details.env or {}:
        if not _ENV.fullmatch(key):
            raise BadInput(f"env: {key[:80]!r} is no name of a variable")


def check_pairs(what: str, pairs: Mapping[str, str]) -> None:
    """Raise BadInput unless these can be labels or the like."""
    if len(pairs) > MAX_LABELS:
        raise BadInput(f"{what} has more than {MAX_LABELS} entries")
    for key, value in pairs.items():
        if not key or len(key) > 256 or len(value) > MAX_VALUE or "\0" in key + value:
            raise BadInput(f"{what}: {key[:80]!r} or its value is empty, too long, or has a NUL")


async def dress(runtime: Runtime, sandbox: Sandbox, details: SandboxDetails) -> SandboxInfo:
    """Give a sandbox what ``details`` names; the rest stays. A time limit counts from now."""
    check_details(runtime, details, sandbox)
    info = sandbox.info
    former = info.name
    info.name = details.name or former  # before the guest is asked, so that nobody takes the name meanwhile
    try:
        if details.limits is not None:
            update_sandbox(runtime, sandbox.id, details.limits)
        if details.env:
            env = {**info.env, **details.env}
            await sandbox.link.request({"op": "resume", "env": env}, timeout=30)
            info.env = env
    except BaseException:
        info.name = former
        raise
    for name in ("labels", "metadata"):
        if (value := getattr(details, name)) is not None:
            setattr(info, name, value)
    if details.timeout_secs is not None:
        info.timeout_secs = details.timeout_secs or None
        info.expires_at_unix = round(time.time() + details.timeout_secs, 3) if details.timeout_secs else None
    if details.idle_pause_secs is not None:
        info.idle_pause_secs = details.idle_pause_secs or None
    runtime.inventory.save(sandbox)
    keep_time(runtime, sandbox)
    return info


def keep_time(runtime: Runtime, sandbox: Sandbox) -> None:
    """See to it that the sandbox ends and dozes when it should; also for one that was adopted."""
    sandbox.changed.set()
    if not sandbox.timed and (sandbox.info.expires_at_unix or sandbox.info.idle_pause_secs):
        sandbox.timed = True
        runtime.nursery.start_soon(_timekeeper, runtime, sandbox)


async def _timekeeper(runtime: Runtime, sandbox: Sandbox) -> None:
    """One task a sandbox with a limit: sleeps until the next thing is due, or something has changed."""

    async def leave(scope: trio.CancelScope) -> None:
        await sandbox.ended.wait()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave, nursery.cancel_scope)
        while True:
            sandbox.changed = changed = trio.Event()
            wait = _due(sandbox)
            if wait <= 0:
                await _act(runtime, sandbox)
                continue
            with trio.move_on_after(min(wait, NAP)):
                await changed.wait()


def _due(sandbox: Sandbox) -> float:
    """Seconds until the sandbox must end or may doze."""
    info = sandbox.info
    waits = [NAP]
    if info.expires_at_unix is not None:
        waits.append(info.expires_at_unix - time.time())
    if info.idle_pause_secs is not None and info.status == "running" and not sandbox.users:
        waits.append(sandbox.used + info.idle_pause_secs - trio.current_time())
    return min(waits)


async def _act(runtime: Runtime, sandbox: Sandbox) -> None:
    info = sandbox.info
    if info.expires_at_unix is not None and info.expires_at_unix <= time.time():
        runtime.endings[sandbox.id] = f"its time limit of {info.timeout_secs or 0:g} s was over"
        sandbox.stop.set()
        await sandbox.ended.wait()
        return
    try:
        await pause_sandbox(runtime, sandbox, auto=True)
    except ForkdError as error:
        runtime.observe("pause_failed", id=sandbox.id, reason=error.message)
        info.idle_pause_secs = None


async def pause(runtime: Runtime, reference: str) -> SandboxInfo:
    """Stop a sandbox's CPUs until it is resumed."""
    sandbox = runtime.sandbox(reference)
    await pause_sandbox(runtime, sandbox)
    return sandbox.info


async def resume(runtime: Runtime, reference: str) -> SandboxInfo:
    """Let a paused sandbox run on."""
    sandbox = runtime.sandbox(reference)
    await resume_sandbox(runtime, sandbox)
    sandbox.used = trio.current_time()
    sandbox.changed.set()
    return sandbox.info


async def update(runtime: Runtime, reference: str, request: UpdateSandbox) -> SandboxInfo:
    """Change limits and details of a sandbox; what is absent stays."""
    sandbox = runtime.sandbox(reference)
    details = SandboxDetails(
        name=request.name,
        labels=request.labels,
        metadata=request.metadata,
        env=request.env,
        timeout_secs=request.timeout_secs,
        idle_pause_secs=request.idle_pause_secs,
    )
    check_details(runtime, details, sandbox)
    if not request.env:
        update_sandbox(runtime, sandbox.id, request)
        return await dress(runtime, sandbox, details)
    async with awake(runtime, sandbox.id):  # its guest must hear of it
        update_sandbox(runtime, sandbox.id, request)
        return await dress(runtime, sandbox, details)


def chosen(rows: Sequence[SandboxInfo], labels: Sequence[str], status: str | None) -> list[SandboxInfo]:
    """The rows that have every label (``name=value``, or ``name`` for any value) and the status."""
    wanted = [label.partition("=") for label in labels]
    return [
        row
        for row in rows
        if (status is None or row.status == status)
        and all(key in row.labels and (not equals or row.labels[key] == value) for key, equals, value in wanted)
    ]
