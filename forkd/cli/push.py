"""`forkd push`: send a snapshot to a registry."""

from __future__ import annotations

import os

import click

from forkd.cli.common import json_option, mib, print_json, with_controller
from forkd.cli.packs import hub_option, local_hub, local_url, sign_option, transfer_bar


@click.command("push")
@click.option("--tag", required=True, help="Snapshot to send.")
@click.argument("target")
@hub_option
@click.option("--description", default="", help="What it is, for people.")
@click.option("--base-image", default="", help="What it was built from, for people. [default: as recorded]")
@click.option("--since", metavar="TAG", help="Pack files only: leave out this ancestor and all below it.")
@sign_option
@json_option
def command(
    tag: str,
    target: str,
    hub: str | None,
    description: str,
    base_image: str,
    since: str | None,
    sign: str | None,
    as_json: bool,
) -> None:
    """Send a snapshot to TARGET: OWNER/NAME[@VERSION] of a registry, or the URL of a pack file (one PUT).

    A registry is sent only what it lacks.

    \b
    forkd push --tag py file:/srv/hub/acme/py
    forkd push --tag py acme/py@2 --hub oci://registry.example.com
    forkd push --tag py "https://bucket.example.com/py.forkd-snapshot.tar.zst?signature=…"
    """
    fields = {
        "hub": local_hub(hub),
        "description": description,
        "base_image": base_image,
        "since": since,
        "sign": os.path.abspath(sign) if sign and "/" in sign else sign,
    }
    with transfer_bar() as progress:
        done = with_controller(lambda controller: controller.push(tag, local_url(target), progress, **fields))
    if as_json:
        print_json(done)
        return
    click.echo(f"✓ sent {mib(done['sent_bytes'])} of {mib(done['total_bytes'])}", err=True)
    click.echo(done["to"])
