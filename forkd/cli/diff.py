"""`forkd diff`: how a sandbox or a snapshot differs from another one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, mib, plain, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("diff")
@click.argument("sandbox_id", metavar="ONE")
@click.argument("against", required=False)
@json_option
def command(sandbox_id: str, against: str | None, as_json: bool) -> None:
    """Show what ONE, a sandbox or a snapshot, has otherwise than AGAINST; without that, than the snapshot it came from.

    Files and directories: + added, ~ changed, - removed, ? could not be compared. Then processes, TCP ports, memory.
    """

    async def work(controller: AsyncController) -> dict[str, Any]:
        return await controller.diff_sandbox(sandbox_id, against)

    found = with_controller(work)
    if as_json:
        print_json(found)
        return
    for mark, name in (("+", "added"), ("~", "changed"), ("-", "removed"), ("?", "unread")):
        for path in found[name]:
            click.echo(f"{mark} {plain(path)}")
    for mark, name in (("+", "processes_started"), ("-", "processes_ended")):
        for row in found[name]:
            click.echo(f"{mark} process {row['pid']} {plain(shlex.join(row['args']))}")
    for mark, name in (("+", "ports_opened"), ("-", "ports_closed")):
        for port in found[name]:
            click.echo(f"{mark} port {port}")
    own, other = found["changed_memory_bytes"], found["against_changed_memory_bytes"]
    click.echo(f"memory written: {mib(own)}" + ("" if other is None else f"; {found['against']}: {mib(other)}"))
    if found["truncated"]:
        click.echo("forkd: warning: there is more than this", err=True)
