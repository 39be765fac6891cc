"""`forkd rmi`: remove snapshots."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from forkd.cli.common import with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("rmi")
@click.argument("tags", nargs=-1, required=True)
@click.option("--cascade", is_flag=True, help="Remove the snapshots that build on it too.")
@click.option("--force", is_flag=True, help="Remove it although others build on it; they stay, unusable.")
def command(tags: tuple[str, ...], cascade: bool, force: bool) -> None:
    """Remove snapshots by tag."""
    if cascade and force:
        raise click.UsageError("--cascade and --force exclude each other")

    async def work(controller: AsyncController) -> int:
        from forkd.sdk.errors import ControllerError

        failures = 0
        for tag in tags:
            try:
                await controller.delete_snapshot(tag, cascade=cascade, force=force)
                click.echo(f"✓ {tag}")
            except ControllerError as error:
                failures += 1
                click.echo(f"✗ {tag} ({error})", err=True)
                if error.hint:
                    click.echo(f"  hint: {error.hint}", err=True)
        return failures

    sys.exit(1 if with_controller(work) else 0)
