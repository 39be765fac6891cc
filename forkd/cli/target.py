"""Which sandbox a verb works on: one that runs, by id, or a fresh child of a tag for just this command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

F = TypeVar("F", bound=Callable[..., Any])


def target_options(function: F) -> F:
    """``--sandbox ID`` or ``--tag TAG``."""
    function = click.option("--sandbox", "sandbox_id", help="A running sandbox.")(function)
    return click.option("--tag", help="Fork one child of this snapshot for the command, and end it after.")(function)


def check_target(sandbox_id: str | None, tag: str | None) -> None:
    """Exactly one of the two."""
    if (sandbox_id is None) == (tag is None):
        raise click.UsageError("give --tag TAG, or --sandbox ID")


@asynccontextmanager
async def target(controller: AsyncController, sandbox_id: str | None, tag: str | None) -> AsyncIterator[str]:
    """The id to work on; a child forked for it is ended on leaving."""
    if sandbox_id is not None:
        yield sandbox_id
        return
    assert tag is not None
    child = (await controller.spawn_sandboxes(tag, 1))[0]
    try:
        yield child["id"]
    finally:
        import trio

        with trio.CancelScope(shield=True):
            await controller.kill_sandbox(child["id"])
