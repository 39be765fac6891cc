"""`forkd snapshot-compact`: flatten a chain."""

from __future__ import annotations

import click

from forkd.cli.common import json_option, print_json, with_controller


@click.command("snapshot-compact")
@click.option("--from", "source", required=True, help="Snapshot whose chain to flatten.")
@click.option("--to", required=True, help="Tag of the new snapshot.")
@json_option
def command(source: str, to: str, as_json: bool) -> None:
    """Write a chain of deltas as one snapshot that stands alone."""
    info = with_controller(lambda controller: controller.compact_snapshot(source, to))
    if as_json:
        print_json(info)
    else:
        click.echo(f"tag: {info['tag']}\ndir: {info['dir']}\nfrom: {source}")
