"""`forkd prune`: remove the snapshots that rules let go."""

from __future__ import annotations

import re
import time
from typing import Any

import click

from forkd.cli.common import json_option, mib, print_json, table, with_controller
from forkd.cli.images import age

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def duration(text: str) -> float:
    """Seconds of 90s, 30m, 12h, 7d or 2w."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration; for example 12h or 7d")
    return float(found[1]) * SECONDS[found[2]]


def size(text: str) -> int:
    """Bytes of 500MiB, 10GiB or 10G; units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{text!r} is no size; for example 500MiB or 10GiB")
    return int(float(found[1]) * BYTES[found[2].upper()])


@click.command("prune")
@click.option("--keep-last", type=click.IntRange(min=0), help="The newest N stay.")
@click.option("--older-than", type=duration, metavar="AGE", help="Of the others, those older go: 12h, 7d, 2w.")
@click.option("--max-size", type=size, metavar="SIZE", help="Of the others, the oldest go until the rest fits: 10GiB.")
@click.option("--label", "labels", multiple=True, help="Only those with KEY=VALUE, or KEY (each value apart).")
@click.option("-y", "--yes", is_flag=True, help="Remove them; without it, only list.")
@json_option
def command(
    keep_last: int | None,
    older_than: float | None,
    max_size: int | None,
    labels: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """List (and with --yes remove) the snapshots that rules let go, and say why the others stay.

    With --keep-last alone all others go. What is pinned, in use or built on always stays. SIZE is on the disk.

    \b
    forkd prune --label session --keep-last 3 --older-than 7d
    forkd prune --max-size 10GiB --yes
    """
    given = {"keep_last": keep_last, "older_than_secs": older_than, "max_bytes": max_size}
    rule: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if not rule:
        raise click.UsageError("give --keep-last, --older-than or --max-size")
    rule["labels"] = list(labels)
    done: dict[str, Any] = with_controller(lambda controller: controller.prune_snapshots([rule], dry_run=not yes))
    if as_json:
        print_json(done)
        return
    cells = [
        [row["tag"], row["action"], mib(row["bytes"]), age(time.time() - row["created_at_unix"]), row["reason"]]
        for row in done["rows"]
    ]
    if cells:
        table(["TAG", "ACTION", "SIZE", "CREATED", "WHY"], cells)
    going = sum(row["action"] == "remove" for row in done["rows"])
    words = f"{going} snapshots, {mib(done['freed_bytes'])}"
    if not going:
        click.echo("nothing to remove", err=True)
    else:
        click.echo(f"removed {words}" if yes else f"would remove {words}; run again with --yes", err=True)
