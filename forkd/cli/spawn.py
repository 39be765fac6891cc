"""`forkd spawn`: fork children that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.children import checked, child_options
from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("spawn")
@click.option("--tag", required=True, help="Snapshot to fork from.")
@click.option("-n", "--n", "count", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many.")
@click.option("--prewarm", is_flag=True, help="Capture each child once for nothing, so that its first branch is quick.")
@child_options
@json_option
def command(tag: str, count: int, as_json: bool, **fields: Any) -> None:
    """Fork children in the daemon; they run until they are killed.

    \b
    forkd spawn --tag python-numpy -n 3
    forkd ls
    """
    asked = checked(fields)

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        from forkd.specs.errors import DaemonUnreachable

        if not (await controller.version()).get("daemon", True):
            raise DaemonUnreachable(
                "no daemon is running, and without one sandboxes end with the command",
                hint="start one: forkd daemon; or see: forkd fork --help",
            )
        return await controller.spawn_sandboxes(tag, count, **asked)

    rows = with_controller(work)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"✓ {row['id']} guest={row['guest_addr'] or '-'} netns={row['netns'] or '-'}")
    for warning in {warning for row in rows for warning in row["warnings"]}:
        click.echo(f"forkd: warning: {warning}", err=True)
