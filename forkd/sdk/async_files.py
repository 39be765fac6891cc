"""Files of a sandbox, as methods of a controller: in pieces, so that any size needs little memory."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from forkd.sdk.async_caller import Caller, flags, part

OnChange = Callable[[dict[str, Any]], None]


class FileMethods(Caller):
    """Read, write, look, change, watch."""

    async def write_file(
        self, sandbox_id: str, path: str, data: bytes | AsyncIterable[bytes], **options: Any
    ) -> dict[str, Any]:
        """Write a file, whole or not at all (``mode=``, ``append=``, ``make_parents=``, ``user=``)."""
        return await self._upload(sandbox_id, path, data, options)

    async def write_tree(
        self, sandbox_id: str, path: str, data: bytes | AsyncIterable[bytes], **options: Any
    ) -> dict[str, Any]:
        """Make a directory of a tar stream (``make_parents=``, ``user=``)."""
        return await self._upload(sandbox_id, path, data, {**options, "format": "tar"})

    async def read_file(self, sandbox_id: str, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """A file's bytes, or a part of them, in memory."""
        async with self.open_file(sandbox_id, path, offset, length) as data:
            return b"".join([piece async for piece in data])

    @asynccontextmanager
    async def open_file(
        self, sandbox_id: str, path: str, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A file's bytes, or a part of them, as they come."""
        headers = {}
        if offset or length is not None:
            headers["range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        request = self._client.build_request("GET", self._files(sandbox_id), params={"path": path}, headers=headers)
        response = await self._bytes(request)
        try:
            yield response.aiter_raw()
        finally:
            await response.aclose()

    @asynccontextmanager
    async def open_tree(self, sandbox_id: str, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """A directory as a tar stream."""
        params = {"path": path, "format": "tar"}
        response = await self._bytes(self._client.build_request("GET", self._files(sandbox_id), params=params))
        try:
            yield response.aiter_raw()
        finally:
            await response.aclose()

    async def stat_file(self, sandbox_id: str, path: str, follow: bool = False) -> dict[str, Any]:
        """What is at a path."""
        return await self._call("GET", self._files(sandbox_id, "stat"), params={"path": path, **flags(follow=follow)})

    async def list_files(self, sandbox_id: str, path: str, depth: int = 1) -> list[dict[str, Any]]:
        """The entries of a directory."""
        return await self._call("GET", self._files(sandbox_id, "list"), params={"path": path, "depth": str(depth)})

    async def make_directory(
        self, sandbox_id: str, path: str, mode: int = 0o755, parents: bool = False
    ) -> dict[str, Any]:
        """Make a directory."""
        return await self._call(
            "POST", self._files(sandbox_id, "mkdir"), {"path": path, "mode": mode, "parents": parents}
        )

    async def move_file(self, sandbox_id: str, source: str, target: str) -> dict[str, Any]:
        """Give a file or directory another name."""
        return await self._call("POST", self._files(sandbox_id, "move"), {"source": source, "target": target})

    async def change_mode(self, sandbox_id: str, path: str, mode: int) -> dict[str, Any]:
        """Change permission bits."""
        return await self._call("POST", self._files(sandbox_id, "chmod"), {"path": path, "mode": mode})

    async def remove_file(self, sandbox_id: str, path: str, recursive: bool = False) -> None:
        """Remove a file or directory."""
        await self._call("DELETE", self._files(sandbox_id), params={"path": path, **flags(recursive=recursive)})

    async def watch_files(
        self,
        sandbox_id: str,
        path: str,
        on_change: OnChange,
        recursive: bool = False,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Tell ``on_change`` every change below a directory until it is gone; ``on_ready`` when watching began."""

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "change":
                on_change(event["change"])
            else:
                on_ready()

        params = {"path": path, **flags(recursive=recursive)}
        await self._events(self._files(sandbox_id, "watch"), None, on_event, method="GET", params=params)

    async def _upload(
        self, sandbox_id: str, path: str, data: bytes | AsyncIterable[bytes], options: dict[str, Any]
    ) -> dict[str, Any]:
        params = {"path": path, **flags(**options)}
        request = self._client.build_request("PUT", self._files(sandbox_id), params=params, content=data, timeout=None)
        response = await self._bytes(request)
        await response.aread()
        answer: dict[str, Any] = response.json()
        return answer

    def _files(self, sandbox_id: str, verb: str | None = None) -> str:
        path = f"/v1/sandboxes/{part(sandbox_id)}/files"
        return path if verb is None else f"{path}/{verb}"
