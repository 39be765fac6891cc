"""`forkd pack`: a snapshot as one portable file."""

from __future__ import annotations

import os

import click

from forkd.cli.common import json_option, mib, print_json, with_controller
from forkd.cli.packs import sign_option, transfer_bar

SUFFIX = ".forkd-snapshot.tar.zst"


@click.command("pack")
@click.option("--tag", required=True, help="Snapshot to pack.")
@click.option("-o", "--out", help=f"File to write. [default: ./TAG{SUFFIX}]")
@click.option("--description", default="", help="What it is, for people.")
@click.option("--base-image", default="", help="What it was built from, for people. [default: as recorded]")
@click.option("--since", metavar="TAG", help="Leave out this ancestor and all below it: the receiver has them.")
@click.option("--bundle", is_flag=True, help="Put the disk inside instead of beside the pack.")
@sign_option
@json_option
def command(
    tag: str,
    out: str | None,
    description: str,
    base_image: str,
    since: str | None,
    bundle: bool,
    sign: str | None,
    as_json: bool,
) -> None:
    """Write a snapshot, with all it builds on, as one file that can be carried anywhere.

    The disk it needs lies beside it under a name of its own, so that many packs of one image share it; --bundle puts it
    inside.

    \b
    forkd pack --tag python-numpy -o py.forkd-snapshot.tar.zst --sign default
    """
    path = os.path.abspath(out or f"{tag}{SUFFIX}")
    fields = {
        "description": description,
        "base_image": base_image,
        "since": since,
        "bundle": bundle,
        "sign": os.path.abspath(sign) if sign and "/" in sign else sign,
    }
    with transfer_bar() as progress:
        done = with_controller(lambda controller: controller.pack(tag, path, progress, **fields))
    if as_json:
        print_json(done)
        return
    times = done["memory_bytes"] / done["bytes"]
    click.echo(f"✓ {mib(done['bytes'])}, {times:.1f} times smaller than its RAM", err=True)
    for beside in done["beside"]:
        click.echo(
            f"✓ its disk: {beside} ({mib(os.path.getsize(beside) if os.path.exists(beside) else None)})", err=True
        )
    click.echo(done["path"])
