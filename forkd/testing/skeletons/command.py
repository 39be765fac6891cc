"""A verb: ``forkd skeleton_command`` prints how much memory all snapshots take, by image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import click

from forkd.specs.hookspecs import hookimpl

forkd_contract = 1


@click.command("skeleton_command")
def verb() -> None:
    """Print what snapshots take on disk, by image."""
    from forkd.cli.common import mib, with_controller

    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.list_snapshots())
    for image, size in by_image(rows).most_common():
        click.echo(f"{mib(size):>12}  {image}")


def by_image(rows: list[dict[str, Any]]) -> Counter[str]:
    """Bytes on disk by the image that snapshots came from."""
    total: Counter[str] = Counter()
    for row in rows:
        total[row.get("image") or "(a file)"] += row.get("physical_bytes") or 0
    return total


@hookimpl
def forkd_register_commands(commands: Callable[[str, str, str], None]) -> None:
    """Called when the CLI looks for its verbs; the module is imported when the verb runs."""
    commands("skeleton_command", f"{__name__}:verb", "What snapshots take on disk, by image.")
