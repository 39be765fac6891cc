"""`forkd shell`: a terminal in a sandbox."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import with_controller
from forkd.cli.exec import finish

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

SHELL = "exec $(command -v bash || echo sh) -l"


@click.command("shell")
@click.argument("sandbox_id", metavar="SANDBOX", required=False)
@click.option("--tag", help="Fork one child of this snapshot for the shell, and end it after.")
@click.option("--user", help="User to be.")
@click.option("--attach", metavar="PID", help="Go back to a shell whose connection was lost (forkd ps lists them).")
def command(sandbox_id: str | None, tag: str | None, user: str | None, attach: str | None) -> None:
    """Open a shell in a sandbox. It lives on if the connection breaks: go back with --attach.

    \b
    forkd shell sb-1234
    forkd shell --tag python-numpy
    """
    from forkd.cli.target import check_target, target
    from forkd.cli.terminal import join, terminal_size

    check_target(sandbox_id, tag)

    async def work(controller: AsyncController) -> dict[str, Any]:
        async with target(controller, sandbox_id, tag) as chosen:
            if attach is not None:
                process = await controller.get_process(chosen, attach)
            else:
                process = await controller.start_process(
                    chosen, shell=SHELL, pty=terminal_size(), user=user, attach=True
                )
            begin = process["output_begin"]
            return await join(controller, chosen, process["pid"], tty=True, stdin=True, hangup=False, position=begin)

    result = with_controller(work)
    if result["running"]:
        click.echo(
            f"forkd: the shell lives on; back to it with: forkd shell {sandbox_id} --attach {result['pid']}", err=True
        )
    sys.exit(finish(result, as_json=False))
