"""`forkd bench`: how quick is forkd here?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("bench")
@click.option("--tag", help="Snapshot to use; default the first that can be forked.")
@click.option("-n", "--n", "count", type=click.IntRange(1, 1000), default=5, show_default=True, help="Grandchildren.")
@click.option("--per-child-netns", type=bool, default=False, show_default=True, help="Own networks; as root.")
@json_option
def command(tag: str | None, count: int, per_child_netns: bool, as_json: bool) -> None:
    """Spawn, exec, branch, fan out from the branch, clean up; how long each step takes for a client."""

    async def work(controller: AsyncController) -> dict[str, Any]:
        chosen = tag or await _first_tag(controller)
        return {"tag": chosen, "n": count, "per_child_netns": per_child_netns} | await measure(
            controller, chosen, count, per_child_netns
        )

    report = with_controller(work)
    if as_json:
        print_json(report)
        return
    click.echo(f"forkd bench against snapshot {report['tag']}")
    click.echo(f"  fanout n={count} per_child_netns={str(per_child_netns).lower()}\n")
    for row in report["steps"]:
        click.echo(f"  {row['step']:22}{row['ms']:5.0f} ms  {row['detail']}")
    click.echo(f"{'':26}-----\n  {'total':22}{report['total_ms']:5.0f} ms")


async def _first_tag(controller: AsyncController) -> str:
    for row in await controller.list_snapshots():
        if row["bootable"]:
            return str(row["tag"])
    from forkd.specs.errors import SnapshotNotFound

    raise SnapshotNotFound("there is no snapshot to bench with", hint="make one: forkd quickstart")


async def measure(controller: AsyncController, tag: str, count: int, netns: bool) -> dict[str, Any]:
    """The steps, timed; everything they make is removed again."""
    import trio

    steps: list[dict[str, Any]] = []
    clock = began = time.monotonic()

    def done(step: str, detail: str) -> None:
        nonlocal clock
        now = time.monotonic()
        steps.append({"step": step, "ms": round((now - clock) * 1000, 1), "detail": detail})
        clock = now

    made: list[str] = []
    branch: str | None = None
    try:
        source = (await controller.spawn_sandboxes(tag, 1, per_child_netns=netns))[0]["id"]
        made.append(source)
        done("spawn (n=1)", source)
        result = await controller.exec_command(source, ["sh", "-c", "echo bench"], 30)
        done("exec round-trip", f"exit={result['exit_code']}")
        info = await controller.branch_sandbox(source, diff=True)
        branch = info["tag"]
        done("branch (diff=true)", f"pause_ms={info['pause_ms']} diff_physical_bytes={info['diff_physical_bytes']}")
        clock = time.monotonic()
        made += [row["id"] for row in await controller.spawn_sandboxes(branch, count, per_child_netns=netns)]
        done(f"fanout (n={count})", f"{(time.monotonic() - clock) * 1000 / count:.0f}ms/child")
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for sandbox_id in made:
                    nursery.start_soon(controller.kill_sandbox, sandbox_id)
            if branch is not None:
                await controller.delete_snapshot(branch)
    done("cleanup", f"{len(made)} sandboxes")
    return {"steps": steps, "total_ms": round((time.monotonic() - began) * 1000, 1)}
