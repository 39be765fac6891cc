"""`forkd where`: print the data directory."""

from __future__ import annotations

import click

from forkd.cli.common import json_option, print_json


@click.command("where")
@json_option
def command(as_json: bool) -> None:
    """Print the directory where forkd keeps snapshots, disks and kernels."""
    from forkd.config import load_settings

    path = str(load_settings().data_dir)
    if as_json:
        print_json({"data_dir": path})
    else:
        click.echo(path)
