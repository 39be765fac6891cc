"""`forkd ls`: list running sandboxes."""

from __future__ import annotations

from typing import Any

import click

from forkd.cli.common import json_option, print_json, table, with_controller


@click.command("ls")
@json_option
def command(as_json: bool) -> None:
    """List the daemon's running sandboxes."""
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.list_sandboxes())
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo("no live sandboxes", err=True)
        return
    cells = [
        [
            row["id"],
            row["snapshot_tag"],
            str(row["pid"]),
            row["netns"] or "-",
            str(row["branch_count"]),
            row["guest_addr"] or "-",
            row["status"],
        ]
        for row in rows
    ]
    table(["ID", "SNAPSHOT", "PID", "NETNS", "BRANCHES", "GUEST_ADDR", "STATUS"], cells)
    click.echo(f"{len(rows)} sandboxes", err=True)
