"""`forkd pause`: stop the CPUs of sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("pause")
@click.argument("sandbox_ids", metavar="SANDBOX...", nargs=-1, required=True)
@json_option
def command(sandbox_ids: tuple[str, ...], as_json: bool) -> None:
    """Stop the CPUs of sandboxes; everything in them stands still until they are resumed."""

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        return [await controller.pause_sandbox(each) for each in sandbox_ids]

    rows = with_controller(work)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"✓ {row['id']} {row['status']}")
