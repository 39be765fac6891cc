"""`forkd cp`: copy files and directories to and from a sandbox."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

REMOTE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*):(/.*)", re.DOTALL)
Count = Callable[[int], None]


@click.command("cp")
@click.argument("source")
@click.argument("target")
@json_option
def command(source: str, target: str, as_json: bool) -> None:
    """Copy a file or a directory; one of the two is SANDBOX:/path.

    What is there is replaced only when all of the new one has arrived. Into an existing directory means below it.

    \b
    forkd cp data.csv sb-1234:/root/
    forkd cp sb-1234:/root/results ./results
    """
    ends = REMOTE.fullmatch(source), REMOTE.fullmatch(target)
    if (ends[0] is None) == (ends[1] is None):
        raise click.UsageError("one of the two must be SANDBOX:/path, the other a path of this host")

    async def work(controller: AsyncController) -> dict[str, Any]:
        from forkd.cli import transfer

        with transfer.told():
            if ends[1] is not None:
                return await transfer.upload(controller, source, ends[1][1], ends[1][2], bar)
            assert ends[0] is not None
            return await transfer.download(controller, ends[0][1], ends[0][2], target, bar)

    report = with_controller(work)
    if as_json:
        print_json(report)
    else:
        click.echo(f"copied {report['bytes']} bytes to {report['target']}", err=True)
    for name in report.get("skipped", []):
        click.echo(f"forkd: left out {name}", err=True)


@contextmanager
def bar(what: str, total: int | None) -> Iterator[Count]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
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
        task = bars.add_task(os.path.basename(what.rstrip("/")) or what, total=total)
        yield lambda count: bars.update(task, advance=count)
