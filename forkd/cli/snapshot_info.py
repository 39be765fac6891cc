"""`forkd snapshot-info`: lineage and sizes of a snapshot."""

from __future__ import annotations

from typing import Any

import click

from forkd.cli.common import json_option, mib, print_json, with_controller
from forkd.cli.images import from_where


@click.command("snapshot-info")
@click.argument("tag")
@json_option
def command(tag: str, as_json: bool) -> None:
    """Show what a snapshot builds on, what builds on it, and what it takes on disk."""
    info: dict[str, Any] = with_controller(lambda controller: controller.snapshot_info(tag))
    if as_json:
        print_json(info)
        return
    rows = [
        ("tag", info["tag"]),
        ("dir", info["dir"]),
        ("chain depth", info["chain_depth"]),
        ("parent", info["parent_tag"] or "-"),
        ("memory", f"{mib(info['memory_logical_bytes'])}, on disk {mib(info['memory_physical_bytes'])}"),
        ("vmstate", f"{info['vmstate_bytes'] / 1024:.1f} KiB"),
        ("its own / shared", f"{mib(info['unique_bytes'])} / {mib(info['shared_bytes'])}"),
        ("runs on", f"{info['engine']} {info['engine_version']}, {info['accelerator']}, {info['cpu']}"),
        ("from", from_where(info["source"])),
        ("ancestors", " -> ".join(info["ancestors"]) or "-"),
        ("dependents", ", ".join(info["dependents"]) or "-"),
    ]
    for name, value in rows:
        click.echo(f"{name:18}{value}")
