"""`forkd rollback`: go back to a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("rollback")
@click.argument("sandbox_id", metavar="SANDBOX")
@click.argument("tag")
@json_option
def command(sandbox_id: str, tag: str, as_json: bool) -> None:
    """Put a sandbox back to a snapshot it was forked from or branched into; its id, name and details stay.

    \b
    forkd snapshot --from-sandbox SANDBOX --tag before --live
    forkd rollback SANDBOX before
    """

    async def work(controller: AsyncController) -> dict[str, Any]:
        return await controller.rollback(sandbox_id, tag)

    row = with_controller(work)
    if as_json:
        print_json(row)
    else:
        click.echo(f"✓ {row['id']} is back at {tag}")
