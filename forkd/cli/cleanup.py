"""`forkd cleanup`: what killed commands left behind."""

from __future__ import annotations

from typing import Any

import click

from forkd.cli.common import json_option, mib, print_json, with_controller


@click.command("cleanup")
@click.option("-y", "--yes", is_flag=True, help="Remove what is marked DEL; without it, only list.")
@json_option
def command(yes: bool, as_json: bool) -> None:
    """List (and with --yes remove) machines, directories and half-made files of forkd processes that are gone.

    Anything a living process works on is skipped.
    """
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.cleanup(remove=yes))
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['action']:4}  {mib(row['bytes']):>10}  {row['path']}  ({row['reason']})")
    doomed = sum(row["action"] == "DEL" for row in rows)
    if not doomed:
        click.echo("nothing to clean up", err=True)
    elif yes:
        click.echo(f"removed {doomed}", err=True)
    else:
        click.echo(f"{doomed} to remove; run again with --yes", err=True)
