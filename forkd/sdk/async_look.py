"""Looking into sandboxes, as methods of a controller: logs, differences, fan-outs."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from forkd.sdk.async_caller import Caller, part


class LookMethods(Caller):
    """What sandboxes say."""

    async def sandbox_logs(self, sandbox_id: str, source: str = "console") -> dict[str, Any]:
        """What is kept of a log as ``text``; ``source`` is console (the guest's kernel and agent) or vmm."""
        return await self._call("GET", f"/v1/sandboxes/{part(sandbox_id)}/logs", params={"source": source})

    async def follow_logs(self, sandbox_id: str, on_data: Callable[[bytes], None], source: str = "console") -> None:
        """What is kept of a log, and what comes, until the sandbox ends."""

        def on_event(event: dict[str, Any]) -> None:
            on_data(base64.b64decode(event["data"]))

        path = f"/v1/sandboxes/{part(sandbox_id)}/logs"
        await self._events(path, None, on_event, method="GET", params={"source": source, "follow": "true"})

    async def diff_sandbox(self, sandbox_id: str, against: str | None = None) -> dict[str, Any]:
        """Files, processes, ports and memory by which a sandbox, or a snapshot, differs from another one; if not given,
        from the snapshot it came from."""
        params = {} if against is None else {"against": against}
        return await self._call("GET", f"/v1/sandboxes/{part(sandbox_id)}/diff", params=params)

    async def fanout(self, source: str, n: int, args: list[str], **fields: Any) -> list[dict[str, Any]]:
        """Fork ``n`` children, run a command in each, end all but the best ``keep=``; rows, the best first.

        ``best=`` scores them, as in ``"-seconds if exit_code == 0 else -1000"`` or ``"value"`` (``env=``,
        ``timeout_secs=``, ``network=``).
        """
        body = {"source": source, "n": n, "args": args, **fields}
        return await self._call("POST", "/v1/fanout", body, lasts=float(fields.get("timeout_secs", 30)))
