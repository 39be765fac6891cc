"""`forkd logs`: what a sandbox's console or VMM says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("logs")
@click.argument("sandbox_id", metavar="SANDBOX")
@click.option("-f", "--follow", is_flag=True, help="Go on until the sandbox ends.")
@click.option(
    "--source",
    type=click.Choice(["console", "vmm"]),
    default="console",
    show_default=True,
    help="The guest's console (kernel and agent), or the messages of its VMM.",
)
@json_option
def command(sandbox_id: str, follow: bool, source: str, as_json: bool) -> None:
    """Print what a sandbox's console or VMM said; the newest 256 KiB are kept."""
    if follow and as_json:
        raise click.UsageError("--follow prints text, not JSON")

    def on_data(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    async def work(controller: AsyncController) -> dict[str, Any]:
        if follow:
            await controller.follow_logs(sandbox_id, on_data, source)
            return {"text": ""}
        return await controller.sandbox_logs(sandbox_id, source)

    answer = with_controller(work)
    if as_json:
        print_json(answer)
    else:
        click.echo(answer["text"], nl=False)
