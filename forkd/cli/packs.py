"""What pack, unpack, push and pull share: a bar with rate and time left, local paths, and who signed what."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from forkd.sdk.async_controller import OnTransfer

hub_option = click.option("--hub", help="Registry for OWNER/NAME: file:/DIR, https://…, oci://… [env: FORKD_HUB_URL]")
sign_option = click.option("--sign", metavar="KEY", help="Sign with this key: its name, or the path of its file.")
trust_option = click.option(
    "--trust",
    type=click.Choice(["off", "warn", "require"]),
    help="What signatures must be [env: FORKD_HUB_TRUST; warn]",
)
force_option = click.option("--force", is_flag=True, help="Replace a snapshot that has the tag already.")


@contextmanager
def transfer_bar() -> Iterator[OnTransfer]:
    """Progress on stderr: a live bar with rate and time left on a terminal, one plain line a step elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def plain(step: str, fraction: float | None, total: int | None) -> None:
            if step not in seen:
                seen.add(step)
                click.echo(f"==> {step}", err=True)

        yield plain
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def live(step: str, fraction: float | None, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            if total is not None and fraction is not None:
                bars.update(tasks[step], total=max(1, total), completed=fraction * max(1, total))

        yield live


def local_url(url: str) -> str:
    """A reference for a daemon, whose working directory is another: relative ``file:`` paths made absolute."""
    if url.startswith("file:") and not url.startswith("file:/"):
        return f"file:{os.path.abspath(url.removeprefix('file:'))}"
    return url


def local_hub(hub: str | None) -> str | None:
    """The same for a registry that may not be given."""
    return local_url(hub) if hub is not None else None


def show_installed(result: dict[str, Any]) -> None:
    """Say what is here now and who vouches for it."""
    if warning := result.get("warning"):
        click.echo(f"⚠ {warning}", err=True)
    signed = f", signed by {', '.join(result['signed_by'])}" if result["trust"] == "trusted" else ""
    if not result["added"]:
        click.echo(f"✓ {result['tag']} is here already{signed}", err=True)
    else:
        click.echo(f"✓ {' -> '.join(result['added'])}{signed}", err=True)
    click.echo(f"tag: {result['tag']}")
