"""`forkd renew`: time limits of a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("renew")
@click.argument("sandbox_id", metavar="SANDBOX")
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds it may live from now on; 0 for no limit.")
@click.option("--idle-pause", type=click.FloatRange(min=0), help="Seconds without use until it dozes; 0 for never.")
@json_option
def command(sandbox_id: str, timeout: float | None, idle_pause: float | None, as_json: bool) -> None:
    """Change how long a sandbox may live, and when it dozes; the next use wakes one that dozes."""
    given = {"timeout_secs": timeout, "idle_pause_secs": idle_pause}
    fields = {key: value for key, value in given.items() if value is not None}
    if not fields:
        raise click.UsageError("give --timeout SECONDS, --idle-pause SECONDS, or both")

    async def work(controller: AsyncController) -> dict[str, Any]:
        return await controller.update_sandbox(sandbox_id, **fields)

    row = with_controller(work)
    if as_json:
        print_json(row)
        return
    limit = "no time limit" if row["timeout_secs"] is None else f"ends in {row['timeout_secs']:g} s"
    doze = "" if row["idle_pause_secs"] is None else f", dozes after {row['idle_pause_secs']:g} s without use"
    click.echo(f"✓ {row['id']} {limit}{doze}")
