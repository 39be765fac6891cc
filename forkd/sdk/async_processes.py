"""Processes, terminals and ports of a sandbox, as methods of a controller."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from forkd.sdk.async_caller import Caller, flags, part
from forkd.sdk.async_channel import Channel

OnOutput = Callable[[str, bytes], None]


class ProcessMethods(Caller):
    """Commands that outlive the request that started them, and connections to what they serve."""

    async def start_process(
        self, sandbox_id: str, args: list[str] | None = None, *, shell: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Start a command (``env=``, ``cwd=``, ``user=``, ``stdin=True``, ``pty={"rows", "cols"}``, ``timeout_secs=``,
        ``tag=``) and return at once; with ``attach=True`` its output is kept for whoever attaches or follows next."""
        body = {"args": args or [], "shell": shell, **fields}
        return await self._call("POST", self._processes(sandbox_id), body)

    async def list_processes(self, sandbox_id: str) -> list[dict[str, Any]]:
        """Processes that run, and the last that ended."""
        return await self._call("GET", self._processes(sandbox_id))

    async def get_process(self, sandbox_id: str, process: int | str) -> dict[str, Any]:
        """One process, by pid or tag."""
        return await self._call("GET", self._processes(sandbox_id, process))

    async def process_output(self, sandbox_id: str, process: int | str) -> dict[str, Any]:
        """What is buffered of its output: ``stdout`` and ``stderr`` as bytes, and the ``process``."""
        answer = await self._call("GET", self._processes(sandbox_id, process) + "/output")
        return {**answer, **{name: base64.b64decode(answer[name]) for name in ("stdout", "stderr")}}

    async def follow_process(
        self, sandbox_id: str, process: int | str, on_output: OnOutput, position: int = 0
    ) -> dict[str, Any]:
        """Its output from ``position`` on as it comes, until it ends; how it ended.

        ``lost`` in the answer is the number of bytes that were no longer there to be given.
        """
        lost = 0

        def on_event(event: dict[str, Any]) -> None:
            nonlocal lost
            if "data" in event:
                on_output(event["event"], base64.b64decode(event["data"]))
            elif event["event"] == "lost":
                lost += event["count"]

        path = self._processes(sandbox_id, process) + "/output"
        done = await self._events(path, None, on_event, method="GET", params={"from": str(position)})
        return {**done, "lost": lost}

    async def send_stdin(self, sandbox_id: str, process: int | str, data: bytes = b"", eof: bool = False) -> None:
        """Send input; with ``eof`` that was all."""
        path = self._processes(sandbox_id, process) + "/stdin"
        request = self._client.build_request("POST", path, content=data, params=flags(eof=eof))
        response = await self._bytes(request)
        await response.aclose()

    async def signal_process(self, sandbox_id: str, process: int | str, signal: int | str = "TERM") -> None:
        """Signal its whole group."""
        await self._call("POST", self._processes(sandbox_id, process) + "/signal", {"signal": signal})

    async def kill_process(self, sandbox_id: str, process: int | str) -> None:
        """SIGKILL to its whole group."""
        await self._call("DELETE", self._processes(sandbox_id, process))

    async def resize_terminal(self, sandbox_id: str, process: int | str, rows: int, cols: int) -> None:
        """Tell its terminal a new size."""
        await self._call("POST", self._processes(sandbox_id, process) + "/resize", {"rows": rows, "cols": cols})

    async def attach_process(
        self, sandbox_id: str, process: int | str, position: int = 0, hangup: bool = False
    ) -> Channel:
        """Its output, input and signals on one channel (the messages are in the API's description)."""
        path = self._processes(sandbox_id, process) + "/attach"
        return await self._channel(path, {"from": str(position), **flags(hangup=hangup)})

    async def connect_port(self, sandbox_id: str, port: int) -> Channel:
        """A TCP connection to a port in the guest: binary messages both ways."""
        return await self._channel(f"/v1/sandboxes/{part(sandbox_id)}/tcp/{port}")

    def _processes(self, sandbox_id: str, process: int | str | None = None) -> str:
        path = f"/v1/sandboxes/{part(sandbox_id)}/processes"
        return path if process is None else f"{path}/{part(str(process))}"
