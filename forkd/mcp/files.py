"""The tools about a sandbox's files."""

from __future__ import annotations

import base64
import shlex
import time
from typing import Annotated, Any

import trio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from forkd.mcp.tools import EXCERPT, TAIL, Row, SandboxId, Seconds, since, told
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError

MAX_READ = 1 << 20
Path = Annotated[str, Field(description="Absolute path in the sandbox")]


class FileTools:
    """Read, write, list, compare, wait; a name maps to whether the tool only looks."""

    NAMES = {
        "read_file": True,
        "write_file": False,
        "list_files": True,
        "diff_sandboxes": True,
        "wait_for_text": True,
    }

    def __init__(self, controller: AsyncController) -> None:
        self._controller = controller

    @told
    async def read_file(
        self,
        sandbox_id: SandboxId,
        path: Path,
        offset: Annotated[int, Field(ge=0)] = 0,
        length: Annotated[int, Field(ge=1, le=MAX_READ, description="At most 1 MiB a call")] = MAX_READ,
    ) -> Row:
        """Read a file of a sandbox: `text` if it is UTF-8, else `base64`; `size` is that of the whole file."""
        size = (await self._controller.stat_file(sandbox_id, path, follow=True))["size"]
        wanted = min(length, MAX_READ)
        data = await self._controller.read_file(sandbox_id, path, offset, wanted) if offset < size or not size else b""
        answer: dict[str, Any] = {"path": path, "size": size, "offset": offset, "length": len(data)}
        try:
            return {**answer, "text": data.decode("utf-8")}
        except UnicodeDecodeError:
            return {**answer, "base64": base64.b64encode(data).decode()}

    @told
    async def write_file(
        self,
        sandbox_id: SandboxId,
        path: Path,
        text: Annotated[str | None, Field(description="Contents as text; or give content_base64")] = None,
        content_base64: Annotated[str | None, Field(description="Contents as base64, for what is not text")] = None,
        mode: Annotated[str, Field(pattern="^0?[0-7]{3,4}$", description="Permission bits, octal")] = "0644",
    ) -> Row:
        """Write a file of a sandbox, whole or not at all; missing directories are made."""
        if (text is None) == (content_base64 is None):
            raise ToolError("give either text or content_base64")
        try:
            data = text.encode() if text is not None else base64.b64decode(content_base64 or "", validate=True)
        except ValueError as error:
            raise ToolError(f"content_base64 is not base64: {error}") from error
        return await self._controller.write_file(sandbox_id, path, data, mode=int(mode, 8), make_parents=True)

    @told
    async def list_files(
        self, sandbox_id: SandboxId, path: Path = "/", depth: Annotated[int, Field(ge=1, le=8)] = 1
    ) -> list[Row]:
        """List a directory of a sandbox, down to a depth."""
        return await self._controller.list_files(sandbox_id, path, depth)

    @told
    async def diff_sandboxes(
        self,
        first: SandboxId,
        second: SandboxId,
        path: Annotated[str, Field(description="Directory to compare")] = "/root",
    ) -> Row:
        """What two sandboxes differ in below a directory: files only in one of them, and files that differ."""
        one, two = await self._digests(first, path), await self._digests(second, path)
        return {
            "only_first": sorted(one.keys() - two.keys()),
            "only_second": sorted(two.keys() - one.keys()),
            "changed": sorted(name for name in one.keys() & two.keys() if one[name] != two[name]),
        }

    @told
    async def wait_for_text(
        self,
        sandbox_id: SandboxId,
        path: Path,
        marker: Annotated[str, Field(min_length=1, description="Text to wait for near the file's end")],
        ctx: Context,
        timeout_secs: Seconds = 60,
        poll_interval_ms: Annotated[int, Field(ge=10, le=60000)] = 200,
    ) -> Row:
        """Wait until a file of a sandbox (a log) has a marker in its last 4 KiB."""
        began, tail, said = time.monotonic(), "", 0.0
        with trio.move_on_after(timeout_secs):
            while True:
                tail = await self._tail(sandbox_id, path)
                if marker in tail:
                    return {"found": True, "elapsed_ms": since(began), "last_excerpt": tail[-EXCERPT:]}
                if time.monotonic() - said > 1:
                    said = time.monotonic()
                    await ctx.report_progress(said - began, timeout_secs, f"waiting for {marker[:40]!r}")
                await trio.sleep(poll_interval_ms / 1000)
        return {"found": False, "elapsed_ms": since(began), "last_excerpt": tail[-EXCERPT:]}

    async def _tail(self, sandbox_id: str, path: str) -> str:
        try:
            size = (await self._controller.stat_file(sandbox_id, path, follow=True))["size"]
            data = await self._controller.read_file(sandbox_id, path, max(0, size - TAIL), TAIL) if size else b""
        except ControllerError as error:
            if error.code == "guest_file_not_found":
                return ""  # not written yet
            raise
        return data.decode("utf-8", "replace")

    async def _digests(self, sandbox_id: str, path: str) -> dict[str, str]:
        script = f"cd {shlex.quote(path)} && find . -xdev -type f -exec sha256sum {{}} +"
        done = await self._controller.exec_command(sandbox_id, ["sh", "-c", script], 120)
        if done["timed_out"] or done["truncated"]:  # what is missing of a list would look like a difference
            raise ToolError(f"{path} of {sandbox_id} has too much to compare. Hint: compare a directory below it")
        if done["exit_code"] != 0 and not done["stdout"]:
            raise ToolError(f"{path} of {sandbox_id} cannot be read: {done['stderr'][-500:]}")
        rows = (line.split("  ", 1) for line in done["stdout"].splitlines() if "  " in line)
        return {name.removeprefix("./"): digest for digest, name in rows}
