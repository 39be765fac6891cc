"""`forkd setup`: fetch the guest kernel."""

from __future__ import annotations

from typing import Any

import click

from forkd.cli.common import json_option, print_json, progress_bar, with_controller


@click.command("setup")
@json_option
def command(as_json: bool) -> None:
    """Fetch the guest kernel by package name and make the initramfs.

    Nothing is installed on the host; everything goes below the data directory.
    """
    with progress_bar() as progress:
        facts: dict[str, Any] = with_controller(lambda controller: controller.setup(progress))
    if as_json:
        print_json(facts)
        return
    click.echo(f"kernel       {facts['kernel_version']}  {facts['kernel']}")
    click.echo(f"engine       {facts['engine']}")
    click.echo(f"accelerator  {facts['accelerator']} ({facts['why']})")
