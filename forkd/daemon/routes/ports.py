"""Routes of ports: HTTP and WebSockets carried to a server in the guest, and plain TCP over a WebSocket."""

from __future__ import annotations

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from forkd.daemon.api import IN_SANDBOX, Errors, route
from forkd.daemon.channel import check_origin, converse, messages, send_event, websocket_routes
from forkd.daemon.proxy import CHUNK, ProxyResponse, proxy_websocket
from forkd.daemon.routes import runtime_of
from forkd.ops.ports import dial
from forkd.specs.errors import BadInput, PortClosed

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def proxy(request: Request) -> Response:
    """Carry the request to a server on this port in the guest; works with networking off."""
    return ProxyResponse(runtime_of(request), request.path_params["id"], _port(request), _prefix(request))


async def to_root(request: Request) -> Response:
    """To the root of the server on this port."""
    _port(request)
    return RedirectResponse(request.url.path + "/", 307)


async def proxy_socket(websocket: WebSocket) -> None:
    """Carry a WebSocket to a server on this port in the guest."""
    check_origin(websocket, or_confined=True)
    await proxy_websocket(runtime_of(websocket), websocket, _port(websocket), _prefix(websocket))


async def tcp(websocket: WebSocket) -> None:
    """A TCP connection to a port in the guest: binary messages both ways; ``{"eof": true}`` ends one direction."""
    async with dial(runtime_of(websocket), websocket.path_params["id"], _port(websocket)) as connection:
        await websocket.accept()

        async def talk() -> None:
            while data := await connection.receive_some(CHUNK):
                await websocket.send_bytes(data)
            await send_event(websocket, {"event": "eof"})

        async def hear() -> None:
            async for message in messages(websocket):
                if isinstance(message, bytes):
                    await connection.send_all(message)
                elif message.get("eof") is True:
                    await connection.send_eof()

        await converse(websocket, talk, hear)


def _port(request: HTTPConnection) -> int:
    port = request.path_params["port"]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise BadInput(f"there is no port {port[:40]!r}", hint="give 1 to 65535")
    return int(port)


def _prefix(request: HTTPConnection) -> bytes:
    """The path up to and without the slash behind the port, as the client wrote it."""
    raw: bytes = request.scope.get("raw_path", request.scope["path"].encode())
    return b"/".join(raw.split(b"?")[0].split(b"/")[:6])


PORT = "/v1/sandboxes/{id}/ports/{port}"
ERRORS: Errors = (BadInput, PortClosed, *IN_SANDBOX)
routes: list[BaseRoute] = [
    WebSocketRoute(f"{PORT}/{{path:path}}", proxy_socket),
    *(
        route(method, f"{PORT}/{{path:path}}", proxy, {200: bytes}, upload=method != "GET", errors=ERRORS)
        for method in METHODS
    ),
    route("GET", PORT, to_root, {307: None}, errors=ERRORS),
    *websocket_routes("/v1/sandboxes/{id}/tcp/{port}", tcp, errors=ERRORS),
]
