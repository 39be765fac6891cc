"""`forkd label`: names and labels of a sandbox, labels of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("label")
@click.argument("reference", metavar="SANDBOX|TAG")
@click.argument("changes", metavar="KEY=VALUE|KEY-...", nargs=-1)
@click.option("--name", help="Call it so.")
@click.option("--snapshot", is_flag=True, help="It is a snapshot, by tag.")
@json_option
def command(reference: str, changes: tuple[str, ...], name: str | None, snapshot: bool, as_json: bool) -> None:
    """Give a sandbox labels, or take them away with KEY-; the others stay. Prints those it has then.

    \b
    forkd label SANDBOX team=red try-
    forkd label --snapshot TAG session=5
    """
    if snapshot and name is not None:
        raise click.UsageError("a snapshot has no name besides its tag")
    given = dict(each.split("=", 1) for each in changes if "=" in each)
    taken = {each[:-1] for each in changes if "=" not in each and each.endswith("-")}
    if len(given) + len(taken) != len(changes):
        raise click.UsageError("give KEY=VALUE or KEY-, each key once")

    async def work(controller: AsyncController) -> dict[str, Any]:
        row = await (controller.get_snapshot if snapshot else controller.get_sandbox)(reference)
        if not changes and name is None:
            return row
        labels = {key: value for key, value in row.get("labels", {}).items() if key not in taken} | given
        if snapshot:
            return await controller.update_snapshot(reference, labels=labels)
        fields = {"labels": labels, **({} if name is None else {"name": name})}
        return await controller.update_sandbox(reference, **fields)

    row = with_controller(work)
    if as_json:
        print_json(row)
        return
    for key, value in sorted(row.get("labels", {}).items()):
        click.echo(f"{key}={value}")
