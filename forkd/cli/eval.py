"""`forkd eval`: evaluate code in a sandbox's warm interpreter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller
from forkd.cli.target import check_target, target, target_options

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("eval", context_settings={"allow_interspersed_args": False})
@target_options
@click.option("--timeout-secs", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True)
@json_option
@click.argument("code", nargs=-1, required=True, type=click.UNPROCESSED)
def command(sandbox_id: str | None, tag: str | None, timeout_secs: float, as_json: bool, code: tuple[str, ...]) -> None:
    """Evaluate CODE (its words joined by spaces) and print what it printed and its value; exit 1 on an error.

    \b
    forkd eval --tag python-numpy -- 'numpy.zeros(5).tolist()'
    """
    check_target(sandbox_id, tag)

    async def work(controller: AsyncController) -> dict[str, Any]:
        async with target(controller, sandbox_id, tag) as chosen:
            return await controller.eval_code(chosen, " ".join(code), timeout_secs)

    result = with_controller(work)
    if as_json:
        print_json(result)
    else:
        click.echo(result["stdout"], nl=False)
        if result["result"] is not None:
            click.echo(result["result"])
        if result["error"] is not None:
            click.echo(result.get("traceback") or result["error"], err=True)
    sys.exit(1 if result["error"] is not None else 0)
