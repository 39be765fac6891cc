"""Which sandbox a verb works on: one that runs, by id, or a fresh child of a tag for just this command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

TARGET, CHILD = "target", "child"
F = TypeVar("F", bound=Callable[..., Any])


def target_options(function: F) -> F:
    """``--sandbox ID``, ``--target ADDR`` or ``--child NETNS``, or ``--tag TAG``."""
    for name, about in ((CHILD, "The sandbox in this network namespace."), (TARGET, "The one at this address.")):
        help_text = f"{about} See `forkd ls`."
        function = click.option(f"--{name}", help=help_text, callback=_keep, expose_value=False)(function)
    function = click.option("--sandbox", "sandbox_id", help="A running sandbox.")(function)
    return click.option("--tag", help="Fork one child of this snapshot for the command, and end it after.")(function)


def check_target(sandbox_id: str | None, tag: str | None) -> None:
    """Exactly one way to name it."""
    if len([each for each in (sandbox_id, tag, *_place()) if each is not None]) != 1:
        raise click.UsageError("give --tag TAG, or --sandbox ID")


def _keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    ctx.meta[f"forkd.target.{param.name}"] = value


def _place() -> tuple[str | None, str | None]:
    """``--target`` and ``--child``."""
    meta = click.get_current_context().meta
    return meta.get(f"forkd.target.{TARGET}"), meta.get(f"forkd.target.{CHILD}")


@asynccontextmanager
async def target(controller: AsyncController, sandbox_id: str | None, tag: str | None) -> AsyncIterator[str]:
    """The id to work on; a child forked for it is ended on leaving."""
    if tag is None:
        yield sandbox_id or await _found(controller)
        return
    child = (await controller.spawn_sandboxes(tag, 1))[0]
    try:
        yield child["id"]
    finally:
        import trio

        with trio.CancelScope(shield=True):
            await controller.kill_sandbox(child["id"])


async def _found(controller: AsyncController) -> str:
    """The sandbox that ``--target`` or ``--child`` names."""
    from forkd.specs.errors import SandboxNotFound

    address, netns = _place()
    for row in await controller.list_sandboxes():
        if (row["guest_addr"] if address is not None else row["netns"]) == (address or netns):
            return str(row["id"])
    raise SandboxNotFound(f"there is no sandbox at {address or netns!r}", hint="forkd ls lists them")
