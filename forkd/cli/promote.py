"""`forkd promote`: a fork takes over from its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("promote")
@click.argument("sandbox_id", metavar="SANDBOX")
@json_option
def command(sandbox_id: str, as_json: bool) -> None:
    """Let a fork take over the id, name and details of the sandbox it was forked from, which ends."""

    async def work(controller: AsyncController) -> dict[str, Any]:
        return await controller.promote(sandbox_id)

    row = with_controller(work)
    if as_json:
        print_json(row)
    else:
        click.echo(f"✓ {sandbox_id} is now {row['id']}")
