"""`forkd rmi`: remove snapshots."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("rmi")
@click.argument("tags", nargs=-1, required=True)
@click.option("--cascade", is_flag=True, help="Remove the snapshots that build on it too.")
@click.option("--force", is_flag=True, help="Remove it although others build on it; they stay, unusable.")
@json_option
def command(tags: tuple[str, ...], cascade: bool, force: bool, as_json: bool) -> None:
    """Remove snapshots by tag."""
    if cascade and force:
        raise click.UsageError("--cascade and --force exclude each other")

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        from forkd.sdk.errors import ControllerError

        rows: list[dict[str, Any]] = []
        for tag in tags:
            try:
                await controller.delete_snapshot(tag, cascade=cascade, force=force)
                rows.append({"tag": tag, "removed": True, "error": None, "hint": None})
            except ControllerError as error:
                rows.append({"tag": tag, "removed": False, "error": str(error), "hint": error.hint})
        return rows

    rows = with_controller(work)
    if as_json:
        print_json(rows)
    for row in rows if not as_json else ():
        click.echo(f"✓ {row['tag']}" if row["removed"] else f"✗ {row['tag']} ({row['error']})", err=not row["removed"])
        if row["hint"]:
            click.echo(f"  hint: {row['hint']}", err=True)
    sys.exit(0 if all(row["removed"] for row in rows) else 1)
