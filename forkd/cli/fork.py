"""`forkd fork`: fork N children and show what they cost."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, mib, ms, print_json, table, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

SHOWN = 20


@click.command("fork")
@click.option("--tag", required=True, help="Snapshot to fork from.")
@click.option("-n", "--n", "count", type=click.IntRange(1, 1000), required=True, help="How many children.")
@click.option("--settle-secs", type=click.FloatRange(0), default=2.0, show_default=True, help="How long they live.")
@click.option("--eval", "code", help="Code each child evaluates in its warm interpreter.")
@click.option("--live-fork", is_flag=True, help="Hold the memory image in a sealed memfd.")
@click.option("--hugepages", is_flag=True, help="Back that memfd with 2 MiB pages; needs --live-fork.")
@click.option("--memory-limit-mib", type=click.IntRange(1), help="Memory limit of each child.")
@click.option("--cpu-limit", type=click.FloatRange(0.01), help="CPUs each child may use, 0.5 for half of one.")
@click.option("--pids-limit", type=click.IntRange(1), help="Threads the VMM of each child may have.")
@click.option("--io-limit-mibps", type=click.IntRange(1), help="MiB a second each child may read, and write.")
@click.option("--best-effort", is_flag=True, help="A limit this host cannot apply is a warning, not an error.")
@json_option
def command(
    tag: str,
    count: int,
    settle_secs: float,
    code: str | None,
    live_fork: bool,
    hugepages: bool,
    memory_limit_mib: int | None,
    cpu_limit: float | None,
    pids_limit: int | None,
    io_limit_mibps: int | None,
    best_effort: bool,
    as_json: bool,
) -> None:
    """Fork N children from a snapshot, let them run, report, and end them.

    \b
    forkd fork --tag python-numpy -n 10 --eval 'numpy.zeros(5).tolist()'
    """
    if hugepages and not live_fork:
        raise click.UsageError("--hugepages needs --live-fork")
    fields: dict[str, Any] = {
        "live_fork": live_fork,
        "hugepages": hugepages,
        "memory_limit_mib": memory_limit_mib,
        "cpu_limit": cpu_limit,
        "pids_limit": pids_limit,
        "io_limit_mibps": io_limit_mibps,
        "best_effort": best_effort,
    }

    async def work(controller: AsyncController) -> dict[str, Any]:
        return await fork_and_measure(controller, tag, count, code, settle_secs, fields)

    report = with_controller(work)
    if as_json:
        print_json(report)
    else:
        show(report)
    failed = count - report["alive"]
    sys.exit(1 if failed else 0)


async def fork_and_measure(
    controller: AsyncController, tag: str, count: int, code: str | None, settle: float, fields: dict[str, Any]
) -> dict[str, Any]:
    """Fork, evaluate ``code`` in every child at once, measure, settle, count who is alive."""
    import trio

    from forkd.sdk.errors import ControllerError

    began = time.monotonic()
    failed: list[dict[str, Any]] = []
    try:
        children = await controller.spawn_sandboxes(tag, count, partial=True, **fields)
    except ControllerError as error:
        if error.status != 207:
            raise
        children, failed = error.body["sandboxes"], error.body["failed"]
    forked = time.monotonic()
    answers: dict[str, Any] = {}

    async def ask(child: dict[str, Any]) -> None:
        assert code is not None
        answers[child["id"]] = await controller.eval_code(child["id"], code)

    if code is not None:
        async with trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(ask, child)
    answered = time.monotonic()
    rows = []
    for child in children:
        rows.append({**child, **await controller.sandbox_stats(child["id"]), "answer": answers.get(child["id"])})
    await trio.sleep(settle)
    alive = {child["id"] for child in await controller.list_sandboxes()}
    return {
        "tag": tag,
        "n": count,
        "fork_ms": round((forked - began) * 1000, 1),
        "answer_ms": round((answered - began) * 1000, 1) if code is not None else None,
        "alive": sum(row["id"] in alive for row in rows),
        "children": rows,
        "failed": failed,
    }


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    cells = [
        [
            row["id"],
            str(row["pid"]),
            f"{row['spawn_ms']:.0f} ms",
            mib(row["guest_private_bytes"]),
            mib(row["vmm_private_bytes"]),
            _answer(row["answer"]),
        ]
        for row in report["children"][:SHOWN]
    ]
    table(["CHILD", "PID", "UP AFTER", "GUEST RAM", "ALL PRIVATE", "ANSWER"], cells)
    if len(report["children"]) > SHOWN:
        click.echo(f"… and {len(report['children']) - SHOWN} more")
    for row in report["failed"]:
        click.echo(f"✗ child {row['index']}: {row['error']}", err=True)
    click.echo(f"{report['n']} children forked in {ms(report['fork_ms'] / 1000)}")
    if report["answer_ms"] is not None:
        click.echo(f"all answers after {ms(report['answer_ms'] / 1000)}")
    click.echo(f"{report['alive']} / {report['n']} children alive")


def _answer(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "-"
    return str(answer["result"] if answer["error"] is None else answer["error"])[:60]
