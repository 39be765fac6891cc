"""The children of one fork: a row each, which become what was asked for or are ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from forkd.ops.lifecycle import dress
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox, end_sandbox, end_sandboxes
from forkd.specs.errors import ForkdError
from forkd.specs.models import SandboxInfo
from forkd.specs.requests import SandboxDetails


@dataclass(frozen=True, slots=True)
class Child:
    """One row of a fork: a sandbox, or why there is none."""

    index: int
    sandbox: Sandbox | None
    error: ForkdError | None
    pause_ms: float | None = None
    """How long a running source stood still for it."""

    @property
    def info(self) -> SandboxInfo | None:
        """What the API shows of it."""
        return None if self.sandbox is None else self.sandbox.info


@dataclass(frozen=True, slots=True)
class Told:
    """A child as whoever asked is told of it; it may be kept when the sandbox and all its buffers are gone."""

    index: int
    info: SandboxInfo | None
    error: ForkdError | None


@asynccontextmanager
async def or_ended(children: Sequence[Child]) -> AsyncIterator[None]:
    """What fails in here, or is cancelled, ends the children: nobody was told of them yet."""
    try:
        yield
    except BaseException:
        await end_sandboxes(child.sandbox for child in children if child.sandbox is not None)
        raise


async def dress_children(
    runtime: Runtime, children: list[Child], details: Callable[[int], Sequence[SandboxDetails]]
) -> None:
    """Every child with its details; one that cannot have them is ended, and its row says why."""

    async def one(index: int, sandbox: Sandbox) -> None:
        try:
            for each in details(index):
                await dress(runtime, sandbox, each)
        except ForkdError as error:
            await end_sandbox(sandbox)
            children[index] = Child(index, None, error)

    async with or_ended(children), trio.open_nursery() as nursery:
        for row in list(children):
            if row.sandbox is not None:
                nursery.start_soon(one, row.index, row.sandbox)
