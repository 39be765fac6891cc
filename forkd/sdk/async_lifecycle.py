"""The life of sandboxes, as methods of a controller: fork, pause, change, go back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forkd.sdk.async_caller import Caller, flags, part


class LifecycleMethods(Caller):
    """From fork to end."""

    async def fork(self, source: str, n: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Fork ``n`` children of a running sandbox or a snapshot (``per_child=[{"env", "labels", "name", "limits",
        "network", "allow", "timeout_secs"}]``, ``all_children=``, ``on_partial=``, ``deadline_secs=``,
        ``idempotency_key=``, ``mode=``).

        With ``on_partial="keep"`` and a failed child, ControllerError has status 207 and its body both lists.
        """
        return await self._call("POST", "/v1/fork", {"source": source, "n": n, **fields})

    async def pause_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """Stop its CPUs until it is resumed."""
        return await self._call("POST", f"/v1/sandboxes/{part(sandbox_id)}/pause")

    async def resume_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """Let it run on."""
        return await self._call("POST", f"/v1/sandboxes/{part(sandbox_id)}/resume")

    async def follow_events(
        self, on_event: Callable[[dict[str, Any]], None], since: int | None = None, sandbox_id: str | None = None
    ) -> None:
        """Tell ``on_event`` what happens, for ever; the first event is ``following``."""
        params = flags(since=since, sandbox=sandbox_id)
        await self._events("/v1/events", None, on_event, method="GET", params=params)

    async def rollback(self, sandbox_id: str, tag: str) -> dict[str, Any]:
        """Go back to one of its snapshots; id, name and details stay."""
        return await self._call("POST", f"/v1/sandboxes/{part(sandbox_id)}/rollback", {"tag": tag})

    async def promote(self, sandbox_id: str) -> dict[str, Any]:
        """Take over the id and name of the sandbox it was forked from, which ends."""
        return await self._call("POST", f"/v1/sandboxes/{part(sandbox_id)}/promote")
