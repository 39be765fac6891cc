"""Fan-out: fork many children, run one command in each, keep the best, end the rest."""

from __future__ import annotations

import math
import time

import trio

from forkd.ops.execute import check_exec, exec_command
from forkd.ops.fork_any import fork_any
from forkd.ops.score import parse_score
from forkd.runtime import Runtime
from forkd.sandbox import end_sandboxes
from forkd.specs.errors import BadInput, ForkdError
from forkd.specs.models import FanoutRow
from forkd.specs.requests import ExecRequest, FanoutRequest, ForkRequest


async def fanout(runtime: Runtime, request: FanoutRequest) -> list[FanoutRow]:
    """One row a child, the best first: by score, then by time. Whatever happens, only what is kept stays.

    A child whose command could not be run has an error and is never kept; nor is one whose score is no number.
    """
    score = parse_score(request.best)
    if not 0 <= request.keep <= request.n:
        raise BadInput(f"{request.keep} of {request.n} children cannot be kept")
    check_exec(_command(request, 0))
    made = await fork_any(runtime, ForkRequest(source=request.source, n=request.n, network=request.network))
    ids = {child.index: child.info.id for child in made if child.info is not None}
    rows: list[FanoutRow] = []
    kept: set[str] = set()

    async def one(index: int, sandbox_id: str) -> None:
        row = FanoutRow(index=index, id=sandbox_id)
        rows.append(row)
        began = time.monotonic()
        try:
            row.result = await exec_command(runtime, sandbox_id, _command(request, index))
        except ForkdError as error:
            row.error = error.message
            return
        row.seconds = round(time.monotonic() - began, 3)
        values = {"exit_code": float(row.result.exit_code), "seconds": row.seconds, "value": _number(row.result.stdout)}
        row.score = score(values)

    try:
        async with trio.open_nursery() as nursery:
            for index, sandbox_id in ids.items():
                nursery.start_soon(one, index, sandbox_id)
        rows.sort(key=lambda row: (-math.inf if row.score is None else row.score, -row.seconds), reverse=True)
        for row in [row for row in rows if row.score is not None][: request.keep]:
            row.kept = True
            kept.add(row.id)
    finally:
        await end_sandboxes(runtime.sandboxes[each] for each in set(ids.values()) & set(runtime.sandboxes) - kept)
    return rows


def _command(request: FanoutRequest, index: int) -> ExecRequest:
    env = {**request.env, "FORKD_INDEX": str(index)}
    return ExecRequest(args=request.args, shell=request.shell, timeout_secs=request.timeout_secs, env=env)


def _number(text: str) -> float:
    """The last line of what a command printed, if it is a number."""
    try:
        return float(text.strip().rpartition("\n")[2][:40])
    except ValueError:
        return math.nan
