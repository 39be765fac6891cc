"""`forkd fork`: fork N children and show what they cost."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.children import checked, child_options
from forkd.cli.common import json_option, mib, ms, print_json, table, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

SHOWN = 20
NOT_OF_A_SANDBOX = ("live_fork", "hugepages", "spawn", "per_child_netns")


@click.command("fork")
@click.option("--tag", help="Snapshot to fork from.")
@click.option("--from-sandbox", "sandbox", help="Running sandbox to fork, in place of a snapshot.")
@click.option("-n", "--n", "count", type=click.IntRange(1, 1000), required=True, help="How many children.")
@click.option("--settle-secs", type=click.FloatRange(0), default=2.0, show_default=True, help="How long they live.")
@click.option("--eval", "code", help="Code each child evaluates in its warm interpreter.")
@click.option("--keep-workdir", is_flag=True, help="Keep the work directories (logs, sockets); cleanup removes them.")
@click.option("--prewarm", is_flag=True, help="Capture each child once for nothing, so that its first branch is quick.")
@child_options
@json_option
def command(
    tag: str | None,
    sandbox: str | None,
    count: int,
    settle_secs: float,
    code: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Fork N children from a snapshot or a running sandbox, let them run, report, and end them.

    Children of a running sandbox all start from the same instant of it.

    \b
    forkd fork --tag python-numpy -n 10 --eval 'numpy.zeros(5).tolist()'
    forkd fork --from-sandbox sb-6afd9008-c5137307 -n 10
    """
    if (tag is None) == (sandbox is None):
        raise click.UsageError("give either --tag or --from-sandbox")
    asked = checked(fields)
    if sandbox is not None and any([asked.pop(name) for name in NOT_OF_A_SANDBOX]):
        raise click.UsageError(
            "--from-sandbox clones it as it is: without --live-fork, --hugepages, --spawn or a netns"
        )

    async def work(controller: AsyncController) -> dict[str, Any]:
        return await fork_and_measure(controller, tag, count, code, settle_secs, asked, sandbox)

    report = with_controller(work)
    if as_json:
        print_json(report)
    else:
        show(report)
    failed = count - report["alive"]
    sys.exit(1 if failed else 0)


async def fork_and_measure(
    controller: AsyncController,
    tag: str | None,
    count: int,
    code: str | None,
    settle: float,
    fields: dict[str, Any],
    sandbox: str | None = None,
) -> dict[str, Any]:
    """Fork a snapshot or a sandbox, evaluate ``code`` in every child, measure, settle, count the living, end them."""
    import trio

    from forkd.sdk.errors import ControllerError

    began = time.monotonic()
    failed: list[dict[str, Any]] = []
    try:
        if sandbox is not None:
            children = await controller.fork_sandbox(sandbox, count, **fields)
        else:
            assert tag is not None
            children = await controller.spawn_sandboxes(tag, count, partial=True, **fields)
    except ControllerError as error:
        if error.status != 207:
            raise
        children, failed = error.body["sandboxes"], error.body["failed"]
    forked = time.monotonic()
    try:
        answers = await _ask_all(controller, children, code) if code is not None else {}
        answered = time.monotonic()
        rows = []
        for child in children:
            rows.append({**child, **await controller.sandbox_stats(child["id"]), "answer": answers.get(child["id"])})
        await trio.sleep(settle)
        alive = {child["id"] for child in await controller.list_sandboxes()}
    finally:
        await _end_all(controller, children)
    return {
        "tag": tag,
        "from_sandbox": sandbox,
        "n": count,
        "fork_ms": round((forked - began) * 1000, 1),
        "answer_ms": round((answered - began) * 1000, 1) if code is not None else None,
        "alive": sum(row["id"] in alive for row in rows),
        "children": rows,
        "failed": failed,
    }


async def _ask_all(controller: AsyncController, children: list[dict[str, Any]], code: str) -> dict[str, Any]:
    import trio

    answers: dict[str, Any] = {}

    async def ask(child: dict[str, Any]) -> None:
        answers[child["id"]] = await controller.eval_code(child["id"], code)

    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(ask, child)
    return answers


async def _end_all(controller: AsyncController, children: list[dict[str, Any]]) -> None:
    """End what was forked, wherever it runs; one that has ended by itself is no news."""
    import trio

    from forkd.sdk.errors import ControllerError

    async def end(child: dict[str, Any]) -> None:
        try:
            await controller.kill_sandbox(child["id"])
        except ControllerError as error:
            if error.status != 404:
                raise

    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(end, child)


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    cells = [
        [
            row["id"],
            str(row["pid"]),
            f"{row['spawn_ms']:.0f} ms",
            row["spawned_by"],
            mib(row["guest_private_bytes"]),
            mib(row["vmm_private_bytes"]),
            _answer(row["answer"]),
        ]
        for row in report["children"][:SHOWN]
    ]
    table(["CHILD", "PID", "UP AFTER", "BY", "GUEST RAM", "ALL PRIVATE", "ANSWER"], cells)
    if len(report["children"]) > SHOWN:
        click.echo(f"… and {len(report['children']) - SHOWN} more")
    for row in report["failed"]:
        click.echo(f"✗ child {row['index']}: {row['error']}", err=True)
    for warning in sorted({warning for row in report["children"] for warning in row["warnings"]}):
        click.echo(f"forkd: warning: {warning}", err=True)
    click.echo(f"{report['n']} children forked in {ms(report['fork_ms'] / 1000)}")
    if report["answer_ms"] is not None:
        click.echo(f"all answers after {ms(report['answer_ms'] / 1000)}")
    click.echo(f"{report['alive']} / {report['n']} children alive")


def _answer(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "-"
    return str(answer["result"] if answer["error"] is None else answer["error"])[:60]
