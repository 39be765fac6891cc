"""`forkd parent build`: image reference to root file system."""

from __future__ import annotations

import os
import re

import click

from forkd.cli.common import json_option, local_reference, print_json, progress_bar, with_controller


@click.group("parent")
def command() -> None:
    """Build root file systems."""


@command.command("build")
@click.argument("image")
@click.option("-o", "--output", help="File to write; default ./<image>.ext4.")
@click.option("--size-mib", default=1536, show_default=True, help="Size of the image.")
@click.option("--extra", "extras", multiple=True, help="Package to add; repeatable.")
@json_option
def build(image: str, output: str | None, size_mib: int, extras: tuple[str, ...], as_json: bool) -> None:
    """Build a root file system from IMAGE as an ext4 file, for `forkd snapshot --rootfs`."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", image).strip("-")
    target = os.path.abspath(output or f"./{slug}.ext4")
    fields = {"extras": list(extras), "size_mib": size_mib, "output": target}
    with progress_bar() as progress:
        info = with_controller(lambda controller: controller.build_rootfs(local_reference(image), progress, **fields))
    if as_json:
        print_json(info)
    else:
        click.echo(info["path"])
