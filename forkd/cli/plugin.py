"""`forkd plugin`: what plugins there are and what became of them; check one, start a new one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from forkd.cli.common import fail, json_option, print_json, table, with_controller


@click.group("plugin")
def command() -> None:
    """List plugins and what they bring; check one; start a new one.

    Plugins come with forkd, from installed packages (entry points of group "forkd"), and from $FORKD_PLUGIN_DIR (by
    default "plugins" below the data directory). FORKD_DISABLE_PLUGINS=name,name leaves some out.
    """


@command.command("ls")
@json_option
def list_plugins(as_json: bool) -> None:
    """List every plugin, also those left out and why."""
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.list_plugins())
    if as_json:
        print_json(rows)
        return
    cells = [[row["name"], row["status"], row["source"], ", ".join(row["provides"])] for row in rows]
    table(["NAME", "STATUS", "SOURCE", "PROVIDES"], cells)


@command.command("info")
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Show one plugin: where it is, which hooks it implements, what it brings."""
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.list_plugins())
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        click.echo(f"forkd: error: there is no plugin {name!r}", err=True)
        click.echo("  hint: forkd plugin ls lists them", err=True)
        sys.exit(1)
    if as_json:
        print_json(row)
        return
    for key in ("name", "about", "status", "error", "version", "source", "origin"):
        if row[key]:
            click.echo(f"{key:<9} {row[key]}")
    for key in ("hooks", "provides"):
        for item in row[key]:
            click.echo(f"{key:<9} {item}")


@command.command("new")
@click.argument("kind", metavar="KIND")
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path), default=".", help="Where to make it; here by default.")
def new(kind: str, name: str, folder: Path) -> None:
    """Start a plugin that works: a package NAME with a test.

    KIND is branch-mode, memory-backend, rootfs-builder, hub-transport, engine, command or observer.
    """
    from forkd.specs.errors import ForkdError
    from forkd.testing.skeleton import write

    try:
        made = write(kind, name, folder)
    except ForkdError as error:
        fail(error)
    for path in made:
        click.echo(path)
    click.echo(f"next: forkd plugin check {made[0]}", err=True)
    click.echo(f"use it: pip install {made[0].parent}, or copy {made[0].name} into $FORKD_PLUGIN_DIR", err=True)


@command.command("check")
@click.argument("plugin")
@click.option("--image", help="For a rootfs builder: a reference it can build.")
@click.option("--bad-image", help="For a rootfs builder: a reference it accepts and must refuse to build.")
@click.option("--rootfs", help="For an engine: a disk to boot.")
@click.option("--url", help="For a hub transport: an empty registry it may write to.")
def check(plugin: str, **options: str | None) -> None:
    """Load PLUGIN (a name, a file or a package) and run the contract suite of its kind on it."""
    from forkd.specs.errors import ForkdError
    from forkd.testing import check as suites

    try:
        found = suites.find(plugin)
        for item in found.record.provides or found.record.hooks:
            click.echo(f"{found.record.name}: {item}")
        for note in suites.skipped(found, options):
            click.echo(f"{found.record.name}: {note}", err=True)
        status = suites.run(plugin, options)
    except ForkdError as error:
        fail(error)
    if status != 0:
        click.echo(f"forkd: error: plugin {found.record.name} breaks its contract", err=True)
        sys.exit(1)
    click.echo(f"{found.record.name}: in order")
