"""Describe running sandboxes with the limits they have hit, and change those limits."""

from __future__ import annotations

import msgspec

from forkd.limits import FIELDS, check_limits
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import LimitRefused
from forkd.specs.models import SandboxInfo
from forkd.specs.requests import UpdateSandbox


def list_sandboxes(runtime: Runtime) -> list[SandboxInfo]:
    """Every running sandbox."""
    return [_now(runtime, sandbox) for sandbox in runtime.sandboxes.values()]


def get_sandbox(runtime: Runtime, sandbox_id: str) -> SandboxInfo:
    """One running sandbox. Raises SandboxNotFound."""
    return _now(runtime, runtime.sandbox(sandbox_id))


def update_sandbox(runtime: Runtime, sandbox_id: str, request: UpdateSandbox) -> SandboxInfo:
    """Change the limits that are given. Raises BadInput; LimitRefused, when those it does not name hold."""
    sandbox = runtime.sandbox(sandbox_id)
    given = {name: value for name in FIELDS.values() if (value := getattr(request, name)) is not None}
    wanted = msgspec.structs.replace(sandbox.info, **given, best_effort=request.best_effort)
    check_limits(wanted)
    try:
        runtime.slots.limits.apply(wanted, sandbox.machine.pid)
    except LimitRefused as error:
        _note(sandbox.info, {name: value for name, value in given.items() if name not in error.refused})
        raise
    _note(sandbox.info, given)
    runtime.inventory.save(sandbox)
    runtime.observe("update", id=sandbox_id, **given)
    return _now(runtime, sandbox)


def _note(info: SandboxInfo, values: dict[str, float]) -> None:
    for name, value in values.items():
        setattr(info, name, value)


def _now(runtime: Runtime, sandbox: Sandbox) -> SandboxInfo:
    sandbox.info.limits_hit = runtime.slots.limits.hits(sandbox.id)
    return sandbox.info
