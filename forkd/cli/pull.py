"""`forkd pull`: fetch a snapshot from a registry."""

from __future__ import annotations

import click

from forkd.cli.common import json_option, mib, print_json, with_controller
from forkd.cli.packs import (
    force_option,
    hub_option,
    local_hub,
    local_url,
    show_installed,
    transfer_bar,
    trust_option,
)


@click.command("pull")
@click.argument("target")
@click.option("--tag", help="Tag of the snapshot here. [default: the pack's]")
@hub_option
@force_option
@trust_option
@json_option
def command(target: str, tag: str | None, hub: str | None, force: bool, trust: str | None, as_json: bool) -> None:
    """Fetch TARGET: OWNER/NAME[@VERSION] of a registry, or the URL of a pack file.

    What is here already is not fetched; a pull that was interrupted goes on where it stopped.

    \b
    forkd pull oci://registry.example.com/acme/py
    forkd pull local/python-numpy --hub http://other-host:8889/hub
    """
    fields = {"tag": tag, "hub": local_hub(hub), "force": force, "trust": trust}
    with transfer_bar() as progress:
        done = with_controller(lambda controller: controller.pull(local_url(target), progress, **fields))
    if as_json:
        print_json(done)
        return
    click.echo(f"✓ fetched {mib(done['fetched_bytes'])}", err=True)
    show_installed(done)
