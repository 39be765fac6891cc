"""Ports of a guest: TCP connections made inside it over the agent link, so they work with networking off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from forkd.guestlink import GuestStream
from forkd.ops.awake import awake
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, ForkdError, GuestTimeout

DIAL_TIMEOUT = 20.0


class GuestConnection(trio.abc.Stream):
    """A TCP connection to a port in the guest, as a trio stream."""

    def __init__(self, stream: GuestStream) -> None:
        self._stream = stream
        self._held = b""
        self._ended = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, as fast as the server takes it."""
        try:
            await self._stream.send_data(bytes(data))
        except ForkdError as error:
            raise trio.BrokenResourceError(error.message) from error

    async def wait_send_all_might_not_block(self) -> None:
        """Sending waits by itself."""
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """There is no more to send."""
        await self._stream.end_input()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What the server sent; empty at its end."""
        await trio.lowlevel.checkpoint()
        while not self._held and not self._ended:
            try:
                self._held = (await anext(self._stream))[1]
            except StopAsyncIteration:
                self._ended = True
            except ForkdError as error:
                raise trio.BrokenResourceError(error.message) from error
            else:
                self._ended = not self._held
        data, self._held = self._held[:max_bytes], self._held[len(self._held[:max_bytes]) :]
        return data

    async def aclose(self) -> None:
        """The connection ends with its context."""
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def dial(runtime: Runtime, sandbox_id: str, port: int) -> AsyncIterator[GuestConnection]:
    """A connection to ``port`` on the guest's loopback. Raises PortClosed if nothing listens there."""
    if not 1 <= port <= 65535:
        raise BadInput(f"there is no port {port}", hint="give 1 to 65535")
    async with awake(runtime, sandbox_id) as sandbox, sandbox.link.dial(port) as stream:
        with trio.move_on_after(DIAL_TIMEOUT) as limit:
            await stream.started()
        if limit.cancelled_caught:
            raise GuestTimeout(f"port {port} of {sandbox_id} did not answer within {DIAL_TIMEOUT:g} s")
        yield GuestConnection(stream)
