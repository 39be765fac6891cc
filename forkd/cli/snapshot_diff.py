"""`forkd snapshot-diff`: run a command in a child and keep what it changed as a layer."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller
from forkd.cli.target import target

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("snapshot-diff")
@click.option("--from", "source", required=True, help="Snapshot to build on.")
@click.option("--tag", required=True, help="Tag of the new layer.")
@click.option("--exec", "line", required=True, help="Command to run, quoted as in a shell.")
@click.option(
    "--exec-timeout-secs", "timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True
)
@json_option
def command(source: str, tag: str, line: str, timeout: float, as_json: bool) -> None:
    """Fork a child, run a command in it, and keep the difference as a snapshot.

    \b
    forkd snapshot-diff --from python-numpy --tag with-notes --exec 'sh -c "echo hi > /root/notes"'
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--exec") from error
    if not words:
        raise click.BadParameter("it is empty", param_hint="--exec")

    async def work(controller: AsyncController) -> dict[str, Any]:
        async with target(controller, None, source) as child:
            result = await controller.exec_command(child, words, timeout)
            if result["exit_code"] != 0:
                return {"failed": result}
            return await controller.branch_sandbox(child, tag=tag, mode="diff", parent_tag=source)

    info = with_controller(work)
    if "failed" in info:
        result = info["failed"]
        click.echo(result["stdout"], nl=False)
        click.echo(result["stderr"], nl=False, err=True)
        click.echo(f"forkd: error: the command ended with code {result['exit_code']}; no snapshot was made", err=True)
        sys.exit(1)
    if as_json:
        print_json(info)
        return
    for key in ("tag", "dir", "parent_tag", "pause_ms", "diff_physical_bytes"):
        click.echo(f"{key}: {info[key]}")
