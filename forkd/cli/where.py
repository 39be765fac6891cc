"""`forkd where`: print the data directory."""

from __future__ import annotations

import click


@click.command("where")
def command() -> None:
    """Print the directory where forkd keeps snapshots, disks and kernels."""
    from forkd.config import load_settings

    click.echo(load_settings().data_dir)
