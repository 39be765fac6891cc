"""`forkd ping`: ask a sandbox's agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, print_json, with_controller
from forkd.cli.target import check_target, target, target_options

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("ping")
@target_options
@json_option
def command(sandbox_id: str | None, tag: str | None, as_json: bool) -> None:
    """Ask a sandbox's agent whether it is there; its answer is JSON with or without --json."""
    check_target(sandbox_id, tag)

    async def work(controller: AsyncController) -> dict[str, Any]:
        async with target(controller, sandbox_id, tag) as chosen:
            return await controller.ping_sandbox(chosen)

    print_json(with_controller(work))
