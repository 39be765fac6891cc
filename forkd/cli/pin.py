"""`forkd pin`: snapshots that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("pin")
@click.argument("tags", nargs=-1, required=True)
@json_option
def command(tags: tuple[str, ...], as_json: bool) -> None:
    """Keep snapshots: neither prune nor rmi (without --force) removes one that is pinned."""
    note(tags, True, as_json)


def note(tags: tuple[str, ...], pinned: bool, as_json: bool) -> None:
    """Pin or unpin snapshots, and say so."""

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        return [await controller.update_snapshot(tag, pinned=pinned) for tag in tags]

    rows = with_controller(work)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"✓ {row['tag']} {'is pinned' if pinned else 'is not pinned'}")
