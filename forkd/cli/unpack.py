"""`forkd unpack`: take in a pack file."""

from __future__ import annotations

import os

import click

from forkd.cli.common import json_option, print_json, with_controller
from forkd.cli.packs import force_option, show_installed, transfer_bar, trust_option


@click.command("unpack")
@click.argument("file")
@click.option("--tag", help="Tag of the snapshot here. [default: the pack's]")
@force_option
@trust_option
@json_option
def command(file: str, tag: str | None, force: bool, trust: str | None, as_json: bool) -> None:
    """Take in a pack file. Everything in it is checked before anything is kept."""
    fields = {"tag": tag, "force": force, "trust": trust}
    with transfer_bar() as progress:
        done = with_controller(lambda controller: controller.unpack(os.path.abspath(file), progress, **fields))
    if as_json:
        print_json(done)
    else:
        show_installed(done)
