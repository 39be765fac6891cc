"""`forkd kill`: end sandboxes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("kill")
@click.argument("ids", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every sandbox.")
@click.option("--tag", help="Every sandbox forked from this snapshot.")
@json_option
def command(ids: tuple[str, ...], every: bool, tag: str | None, as_json: bool) -> None:
    """End sandboxes by id, by snapshot, or all of them."""
    if sum((bool(ids), every, tag is not None)) != 1:
        raise click.UsageError("give ids, or --tag TAG, or --all")

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        from forkd.sdk.errors import ControllerError

        rows = [] if ids else await controller.list_sandboxes()
        chosen = list(ids) or [row["id"] for row in rows if every or row["snapshot_tag"] == tag]
        results: list[dict[str, Any]] = []
        for sandbox_id in chosen:
            try:
                await controller.kill_sandbox(sandbox_id)
                results.append({"id": sandbox_id, "killed": True, "error": None})
            except ControllerError as error:
                results.append({"id": sandbox_id, "killed": False, "error": str(error)})
        return results

    results = with_controller(work)
    if as_json:
        print_json(results)
    else:
        for row in results:
            click.echo(f"✓ {row['id']}" if row["killed"] else f"✗ {row['id']} ({row['error']})", err=not row["killed"])
        if not results:
            click.echo("no matching sandboxes", err=True)
    sys.exit(0 if all(row["killed"] for row in results) else 1)
