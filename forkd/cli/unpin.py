"""`forkd unpin`: snapshots that need not stay."""

from __future__ import annotations

import click

from forkd.cli.common import json_option
from forkd.cli.pin import note


@click.command("unpin")
@click.argument("tags", nargs=-1, required=True)
@json_option
def command(tags: tuple[str, ...], as_json: bool) -> None:
    """Let snapshots that were pinned be removed again."""
    note(tags, False, as_json)
