"""AsyncSandbox: one sandbox as an object. The sync twin is generated from this file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import CommandResult, ControllerError


class AsyncCommands:
    """``sandbox.commands``."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, cmd: str | Sequence[str], timeout: float = 30, **fields: Any) -> CommandResult:
        """Run a command to its end: a string in a shell, a list as it is; ``env=``, ``cwd=``, ``user=``, ``stdin=``."""
        answer = await self._sandbox.controller.exec_command(self._sandbox.id, _args(cmd), timeout, **fields)
        error = answer.get("error") or (f"timed out after {timeout:g} s" if answer.get("timed_out") else None)
        stderr = answer["stderr"] or (error or "")
        return CommandResult(answer["stdout"], stderr, answer["exit_code"], error)


class AsyncSandbox:
    """A sandbox: a fresh child of ``tag``, or one that runs, named by ``target`` (its id, or its ``guest_addr``).

    ``fields`` are those of ``AsyncController.spawn_sandboxes``; ``info`` is what is known of one just forked. As a
    context manager it ends what it has spawned, or what was forked.
    """

    DEFAULT_TAG = os.environ.get("FORKD_TAG") or "pyagent"

    def __init__(
        self,
        tag: str | None = None,
        target: str | None = None,
        timeout: float = 30,
        *,
        spawn: bool = True,
        controller: AsyncController | None = None,
        info: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.controller = controller or AsyncController()
        self.timeout = timeout
        self.commands = AsyncCommands(self)
        self.info: dict[str, Any] = info or {}
        self._tag = tag or self.DEFAULT_TAG
        self._target = target or os.environ.get("FORKD_TARGET")
        self._spawns = spawn and (info is not None or self._target is None)
        self._owns_controller = controller is None
        self._fields = fields
        # sync: self._begin()

    @classmethod
    async def create(cls, *args: Any, **fields: Any) -> Self:
        """As the constructor, and ready when it returns."""
        made = cls(*args, **fields)
        await made._begin()
        return made

    async def _begin(self) -> None:
        if self.info:
            return
        if self._spawns:
            self.info = (await self.controller.spawn_sandboxes(self._tag, 1, **self._fields))[0]
            return
        for row in await self.controller.list_sandboxes():
            if self._target is not None and self._target in (row["id"], row["guest_addr"]):
                self.info = row
                return
        body = {"error": f"no running sandbox is {self._target!r}", "code": "sandbox_not_found", "hint": None}
        raise ControllerError(404, body, self.controller.base_url)

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.info["id"])

    @property
    def guest_addr(self) -> str:
        """Where its agent can be reached over TCP; empty if the daemon offers that to nobody."""
        return str(self.info["guest_addr"])

    async def eval(self, code: str) -> Any:
        """Evaluate code in the warm interpreter: the repr of its value, or for other languages the value itself.

        Raises RuntimeError with what the code raised.
        """
        answer = await self.controller.eval_code(self.id, code, self.timeout)
        if answer["error"] is not None:
            raise RuntimeError(f"forkd eval: {answer['error']}")
        if answer.get("result_json") is not None:
            value = answer["result_json"]
            return json.loads(value) if isinstance(value, str) else value
        return answer["result"]

    async def ping(self) -> dict[str, Any]:
        """Ask its agent."""
        return await self.controller.ping_sandbox(self.id)

    async def branch(self, tag: str | None = None, mode: str | None = None, wait: bool = True) -> dict[str, Any]:
        """Capture it into a new snapshot while it goes on."""
        return await self.controller.branch_sandbox(self.id, tag=tag, mode=mode, wait=wait)

    async def fork(self, n: int = 1, **fields: Any) -> list[Self]:
        """Fork ``n`` children that go on from this very instant; ``fields`` are those of ``AsyncController.fork``.

        They live on when this sandbox ends; each is a context manager that ends it.
        """
        rows = await self.controller.fork(self.id, n, **fields)
        return [type(self)(timeout=self.timeout, controller=self.controller, info=row) for row in rows]

    async def rollback(self, tag: str) -> None:
        """Go back to one of its snapshots; id, name and details stay."""
        self.info = await self.controller.rollback(self.id, tag)

    async def promote(self) -> None:
        """Take over the id and name of the sandbox this one was forked from, which ends."""
        self.info = await self.controller.promote(self.id)

    async def diff(self, against: AsyncSandbox | str | None = None) -> dict[str, Any]:
        """Files, processes, ports and memory by which it differs from a sandbox or a snapshot; its own if not given."""
        other = against.id if isinstance(against, AsyncSandbox) else against
        return await self.controller.diff_sandbox(self.id, other)

    async def fanout(self, cmd: str | Sequence[str], n: int, **fields: Any) -> list[dict[str, Any]]:
        """Run a command in ``n`` forks and end all but the best; ``fields`` are those of ``AsyncController.fanout``."""
        return await self.controller.fanout(self.id, n, _args(cmd), **fields)

    async def kill(self) -> None:
        """End it; harmless if it has ended."""
        try:
            await self.controller.kill_sandbox(self.id)
        except ControllerError as error:
            if error.status != 404:
                raise

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._spawns:
                await self.kill()
        finally:
            if self._owns_controller:
                await self.controller.aclose()


def _args(cmd: str | Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
