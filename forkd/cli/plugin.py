"""`forkd plugin`: what plugins there are and what became of them."""

from __future__ import annotations

import sys
from typing import Any

import click

from forkd.cli.common import json_option, print_json, table, with_controller


@click.group("plugin")
def command() -> None:
    """List plugins and what they bring.

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
