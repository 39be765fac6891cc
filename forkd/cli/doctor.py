"""`forkd doctor`: is this host fit?"""

from __future__ import annotations

import sys
from typing import Any

import click

from forkd.cli.common import json_option, print_json, with_controller

GLYPHS = {"PASS": ("✓", "green"), "WARN": ("⚠", "yellow"), "FAIL": ("✗", "red"), "SKIP": ("·", "bright_black")}


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Check the host: each row passes, warns, fails or is skipped, with a hint for what to do.

    Exits with 1 if a row fails. Changes nothing; `forkd setup --host` does what the hints say.
    """
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.doctor())
    counts = {status: sum(row["status"] == status for row in rows) for status in GLYPHS}
    if as_json:
        print_json({"checks": rows, **{status.lower(): count for status, count in counts.items()}})
    else:
        show(rows)
        click.echo("  ".join(f"{status.lower()}={count}" for status, count in counts.items()))
    sys.exit(1 if counts["FAIL"] else 0)


def show(rows: list[dict[str, Any]]) -> None:
    """One line a check; what needs doing has its hint below."""
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        glyph, colour = GLYPHS[row["status"]]
        click.echo(f"  {click.style(glyph, fg=colour)}  {row['name']:{width}}  {row['detail']}")
        if row["hint"] and row["status"] != "PASS":
            click.echo(click.style(f"     {'':{width}}  → {row['hint']}", fg="bright_black"))
