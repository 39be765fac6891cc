"""Run things in a sandbox: commands, expressions, a ping."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from forkd.ops.awake import awake
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput
from forkd.specs.models import EvalResult, ExecResult
from forkd.specs.requests import EvalRequest, ExecRequest, PrepareRequest

MAX_ARGS = 4096


def check_command(args: list[str], shell: str | None) -> list[str]:
    """The words to run: ``args``, or the guest's shell with a line. Raises BadInput for what no guest could run."""
    if shell is not None:
        if args:
            raise BadInput("args and shell exclude each other", hint="give one of them")
        args = ["/bin/sh", "-c", shell]
    if not args or not args[0]:
        raise BadInput("args is empty", hint='give a command, for example {"args": ["uname", "-a"]}')
    if len(args) > MAX_ARGS or any("\0" in arg for arg in args):
        raise BadInput(f"args has more than {MAX_ARGS} words, or a NUL byte")
    return args


def check_exec(request: ExecRequest) -> list[str]:
    """The words of a command. Raises BadInput."""
    args = check_command(request.args, request.shell)
    check_timeout(request.timeout_secs)
    return args


def check_timeout(seconds: float) -> None:
    """Raise BadInput for a time limit nobody means."""
    if not 0 < seconds <= 7 * 86400:
        raise BadInput(f"a timeout of {seconds:g} s is not possible", hint="give more than 0, and at most a week")


async def exec_command(runtime: Runtime, sandbox_id: str, request: ExecRequest) -> ExecResult:
    """Run a command to its end and return what it printed."""
    args = check_exec(request)
    began = time.monotonic()
    async with awake(runtime, sandbox_id) as sandbox:
        result = await sandbox.link.run(
            args,
            env=request.env,
            cwd=request.cwd,
            user=request.user,
            stdin=request.stdin.encode() if request.stdin is not None else None,
            timeout=request.timeout_secs,
        )
    runtime.observe("exec", id=sandbox_id, exit_code=result.exit_code, seconds=time.monotonic() - began)
    return result


async def stream_command(
    runtime: Runtime, sandbox_id: str, request: ExecRequest, on_output: Callable[[str, bytes], Awaitable[None]]
) -> ExecResult:
    """Run a command; ``on_output(stream, bytes)`` gets what it prints as it comes, and may be slow."""
    args = check_exec(request)
    began = time.monotonic()
    async with awake(runtime, sandbox_id) as sandbox:
        result = await sandbox.link.run(
            args,
            env=request.env,
            cwd=request.cwd,
            user=request.user,
            stdin=request.stdin.encode() if request.stdin is not None else None,
            timeout=request.timeout_secs,
            on_output=on_output,
        )
    runtime.observe("exec", id=sandbox_id, exit_code=result.exit_code, seconds=time.monotonic() - began)
    return result


async def eval_code(runtime: Runtime, sandbox_id: str, request: EvalRequest) -> EvalResult:
    """Evaluate code in the warm interpreter."""
    check_timeout(request.timeout_secs)
    began = time.monotonic()
    async with awake(runtime, sandbox_id) as sandbox:
        result = await sandbox.link.eval(request.code, timeout=request.timeout_secs)
    runtime.observe("eval", id=sandbox_id, exit_code=result.exit_code, seconds=time.monotonic() - began)
    return result


async def prepare(runtime: Runtime, sandbox_id: str, request: PrepareRequest) -> None:
    """New defaults of commands, or a warm runtime, for this sandbox and all its branches."""
    if not 0 < request.timeout_secs <= 3600:
        raise BadInput(f"a timeout of {request.timeout_secs:g} s is not possible", hint="give up to 3600")
    fields = {"workdir": request.workdir, "user": request.user, "args": request.args, "lang": request.lang}
    given = {key: value for key, value in fields.items() if value is not None}
    op = {"op": "prepare", "env": request.env, "timeout": request.timeout_secs, **given}
    async with awake(runtime, sandbox_id) as sandbox:
        await sandbox.link.request(op, timeout=request.timeout_secs + 10)


async def ping(runtime: Runtime, sandbox_id: str) -> dict[str, Any]:
    """Ask the agent whether it is there."""
    async with awake(runtime, sandbox_id) as sandbox:
        return await sandbox.link.request({"op": "ping"}, timeout=5)
