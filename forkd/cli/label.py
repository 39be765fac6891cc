"""`forkd label`: names and labels of a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("label")
@click.argument("sandbox_id", metavar="SANDBOX")
@click.argument("changes", metavar="KEY=VALUE|KEY-...", nargs=-1)
@click.option("--name", help="Call it so.")
@json_option
def command(sandbox_id: str, changes: tuple[str, ...], name: str | None, as_json: bool) -> None:
    """Give a sandbox labels, or take them away with KEY-; the others stay. Prints those it has then.

    \b
    forkd label SANDBOX team=red try-
    """
    given = dict(each.split("=", 1) for each in changes if "=" in each)
    taken = {each[:-1] for each in changes if "=" not in each and each.endswith("-")}
    if len(given) + len(taken) != len(changes):
        raise click.UsageError("give KEY=VALUE or KEY-, each key once")

    async def work(controller: AsyncController) -> dict[str, Any]:
        row = await controller.get_sandbox(sandbox_id)
        if not changes and name is None:
            return row
        labels = {key: value for key, value in row["labels"].items() if key not in taken} | given
        fields = {"labels": labels, **({} if name is None else {"name": name})}
        return await controller.update_sandbox(sandbox_id, **fields)

    row = with_controller(work)
    if as_json:
        print_json(row)
        return
    for key, value in sorted(row["labels"].items()):
        click.echo(f"{key}={value}")
