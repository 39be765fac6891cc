"""`forkd fanout`: one command in many forks, the best of which stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, table, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("fanout")
@click.argument("source")
@click.argument("args", metavar="COMMAND...", nargs=-1, required=True)
@click.option("-n", "--n", "count", type=click.IntRange(1, 1000), default=4, show_default=True, help="How many forks.")
@click.option("--keep", type=click.IntRange(0), default=0, show_default=True, help="How many of the best stay.")
@click.option(
    "--best", default="-exit_code", show_default=True, help="Score over exit_code, seconds, value; highest wins."
)
@click.option("--timeout", type=float, default=30, show_default=True, help="Seconds for each command.")
@json_option
def command(
    source: str, args: tuple[str, ...], count: int, keep: int, best: str, timeout: float, as_json: bool
) -> None:
    """Fork a sandbox or snapshot, run a command in each fork, show the best first, end all but --keep.

    Each command finds its number in FORKD_INDEX; value is the last line it printed, as a number.

    \b
    forkd fanout main -n 8 --keep 1 --best "-seconds if exit_code == 0 else -1000" -- make test
    """

    async def work(controller: AsyncController) -> list[dict[str, Any]]:
        return await controller.fanout(source, count, list(args), keep=keep, best=best, timeout_secs=timeout)

    rows = with_controller(work)
    if as_json:
        print_json(rows)
        return
    cells = [
        [
            row["id"],
            str(row["index"]),
            "-" if row["score"] is None else f"{row['score']:g}",
            row["error"] or str(row["result"]["exit_code"]),
            f"{row['seconds']:.2f} s",
            "yes" if row["kept"] else "no",
        ]
        for row in rows
    ]
    table(["ID", "INDEX", "SCORE", "EXIT", "TIME", "KEPT"], cells)
