"""`forkd images`: list local snapshots."""

from __future__ import annotations

import time
from typing import Any

import click

from forkd.cli.common import json_option, mib, print_json, table, with_controller

AGES = ((60, "s"), (3600, "m"), (86400, "h"), (30 * 86400, "d"))


@click.command("images")
@json_option
def command(as_json: bool) -> None:
    """List local snapshots, newest first.

    SIZE is what a snapshot takes on disk itself, SHARED what it uses together with others (its disk, the snapshots it
    builds on), LOGICAL what it would take alone and without holes.
    """
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.list_snapshots())
    rows.sort(key=lambda row: row["created_at_unix"], reverse=True)
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo("no snapshots yet; make one: forkd from-image debian:bookworm --tag py", err=True)
        return
    cells = [
        [
            row["tag"],
            mib(row.get("physical_bytes")),
            mib(row.get("shared_bytes")),
            mib(row.get("logical_bytes")),
            f"{row.get('mem_mib', '-')} MiB",
            age(time.time() - row["created_at_unix"]),
            row.get("parent_tag", "-"),
            row["status"] + (", pinned" if row.get("pinned") else ""),
            from_where(row.get("source")),
        ]
        for row in rows
    ]
    table(["TAG", "SIZE", "SHARED", "LOGICAL", "MEMORY", "CREATED", "PARENT", "STATUS", "FROM"], cells)
    for row in rows:
        if warning := row.get("warning"):
            click.echo(f"{row['tag']}: {warning}", err=True)
    click.echo(f"{len(rows)} snapshots, {mib(sum(row.get('physical_bytes') or 0 for row in rows))}", err=True)


def age(seconds: float) -> str:
    """A rough age: 5s, 3m, 2h, 9d, 4mo ago."""
    unit = 1
    for limit, name in AGES:
        if seconds < limit:
            return f"{int(seconds / unit)}{name} ago"
        unit = limit
    return f"{int(seconds / unit)}mo ago"


def from_where(source: dict[str, Any] | None) -> str:
    """Where a snapshot came from and who vouches for it; made here if it came from nowhere."""
    if source is None:
        return "-"
    signed = f" ({', '.join(source['signed_by'])})" if source.get("trust") == "trusted" else f" ({source.get('trust')})"
    return f"{source.get('from')}{signed}"
