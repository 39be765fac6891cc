"""`forkd ps`: the processes of a sandbox."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, table, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("ps")
@click.argument("sandbox_id", metavar="SANDBOX")
@json_option
def command(sandbox_id: str, as_json: bool) -> None:
    """List the processes forkd started in a sandbox, also those inherited by a fork."""

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        return await controller.list_processes(sandbox_id)

    rows = with_controller(work)
    if as_json:
        print_json(rows)
        return
    cells = [
        [
            str(row["pid"]),
            row["tag"] or "-",
            "running" if row["running"] else f"{row['reason']} ({row['exit_code']})",
            f"{time.time() - row['started_at_unix']:.0f} s ago",
            shlex.join(row["args"])[:80],
        ]
        for row in rows
    ]
    table(["PID", "TAG", "STATE", "STARTED", "COMMAND"], cells)
