"""Channels: messages both ways, over a WebSocket that httpx opened or straight to an app in this process."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import httpx
import wsproto
from wsproto import events
from wsproto.connection import Connection
from wsproto.utilities import LocalProtocolError, RemoteProtocolError, generate_accept_token, generate_nonce

DIRECT = "forkd_channel"
"""The response extension by which a transport hands over a channel of its own."""
_READ_SIZE = 64 * 1024
Message = bytes | str


class Pipe(Protocol):
    """What carries a channel's messages."""

    async def send(self, message: Message) -> None:
        """Send one message; waits while the other end is slow."""

    async def receive(self) -> Message | None:
        """The next message; None at the end."""

    async def aclose(self) -> None:
        """End it."""


class Channel:
    """An async context manager; iterating yields messages, bytes or text, until the other end closes."""

    def __init__(self, pipe: Pipe, response: httpx.Response) -> None:
        self._pipe = pipe
        self._response = response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = await self._pipe.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def send(self, message: Message) -> None:
        """Send one message; one to a channel that is closed goes nowhere."""
        await self._pipe.send(message)

    async def aclose(self) -> None:
        """Close the channel."""
        await self._pipe.aclose()
        await self._response.aclose()


def upgrade_headers() -> dict[str, str]:
    """The headers that ask for a WebSocket."""
    key = generate_nonce().decode()
    return {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": key,
    }


def channel_of(response: httpx.Response) -> Channel:
    """The channel behind an answer with status 101."""
    if DIRECT in response.extensions:
        return Channel(response.extensions[DIRECT], response)
    key = response.request.headers["sec-websocket-key"].encode()
    if response.headers.get("sec-websocket-accept", "").encode() != generate_accept_token(key):
        raise httpx.RemoteProtocolError("what answered is no WebSocket", request=response.request)
    return Channel(WebSocketPipe(response.extensions["network_stream"]), response)


class WebSocketPipe:
    """A WebSocket after its handshake, on the connection httpx hands over."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ws = Connection(wsproto.ConnectionType.CLIENT)
        self._pieces: list[Any] = []
        self._ended = False

    async def send(self, message: Message) -> None:
        """Send one message."""
        event: events.Event = (
            events.TextMessage(data=message) if isinstance(message, str) else events.BytesMessage(data=message)
        )
        await self._write(event)

    async def receive(self) -> Message | None:
        """The next whole message; pings are answered on the way."""
        while not self._ended:
            for event in self._ws.events():
                if isinstance(event, events.Ping):
                    await self._write(event.response())
                elif isinstance(event, events.CloseConnection):
                    await self._write(event.response())
                    self._ended = True
                    return None
                elif isinstance(event, events.TextMessage | events.BytesMessage):
                    self._pieces.append(event.data)
                    if event.message_finished:
                        pieces, self._pieces = self._pieces, []
                        return "".join(pieces) if isinstance(event, events.TextMessage) else b"".join(pieces)
            try:
                data = await self._stream.read(_READ_SIZE, timeout=None)
                self._ws.receive_data(data or None)
            except (httpx.TransportError, OSError, RemoteProtocolError):
                self._ended = True
            except Exception as error:
                if type(error).__module__.partition(".")[0] != "httpcore":
                    raise
                self._ended = True
            else:
                self._ended = not data
        return None

    async def aclose(self) -> None:
        """Say goodbye and hang up."""
        await self._write(events.CloseConnection(code=1000))
        self._ended = True
        await self._stream.aclose()

    async def _write(self, event: events.Event) -> None:
        try:
            await self._stream.write(self._ws.send(event), timeout=None)
        except LocalProtocolError:
            return  # closed already
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "httpcore":
                raise  # httpcore's own: the other end is gone, as reading will say
