"""The MCP server: tools and resources over a controller, on stdio or streamable HTTP."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import trio
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.types import ToolAnnotations

from forkd import __version__
from forkd.mcp.files import FileTools
from forkd.mcp.tools import SandboxTools
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.connect import find_controller
from forkd.sdk.errors import ControllerError
from forkd.specs.errors import HostNotReady

INSTRUCTIONS = """\
forkd runs virtual machines that are forked in milliseconds from warm snapshots. Usual order: list_snapshots, \
spawn_sandboxes, then exec_command, eval_code and the file tools in a sandbox. Before trying something risky, \
fork_sandbox or branch_sandbox keeps the present state, so that several ways can be tried from it. kill_sandbox when \
done. A sandbox is its own machine: nothing in it can change the host or another sandbox."""


def make_server(controller: AsyncController) -> MCPServer:
    """The server with all its tools and resources; it owns nothing."""
    server = MCPServer(
        "forkd", title="forkd sandboxes", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    for tools in (SandboxTools(controller), FileTools(controller)):
        for name, reads_only in tools.NAMES.items():
            hints = ToolAnnotations(
                read_only_hint=reads_only,
                destructive_hint=name in ("kill_sandbox", "delete_snapshot"),
                open_world_hint=False,
            )
            server.tool(annotations=hints)(getattr(tools, name))

    @server.resource("forkd://snapshots", title="All snapshots", mime_type="application/json")
    async def snapshots() -> str:
        """What can be forked."""
        return json.dumps(await _told(controller.list_snapshots()), indent=2)

    @server.resource("forkd://snapshots/{tag}", title="One snapshot", mime_type="application/json")
    async def snapshot(tag: str) -> str:
        """One snapshot: its lineage and sizes."""
        return json.dumps(await _told(controller.snapshot_info(tag)), indent=2)

    return server


async def serve_stdio(url: str | None, token: str | None) -> None:
    """Serve one client on standard input and output until it leaves. Sandboxes made without a daemon end with it."""
    _quiet_logs()
    async with find_controller(url, token) as controller:
        await make_server(controller).run_stdio_async()


async def serve_http(url: str | None, token: str | None, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve any number of clients at ``http://HOST:PORT/mcp`` until cancelled. Raises HostNotReady for a port taken."""
    _quiet_logs()
    name = host.strip("[]")
    config = Config()
    config.loglevel = "WARNING"
    config.graceful_timeout = 1
    with _listen(name, port) as sock:
        async with find_controller(url, token) as controller, trio.open_nursery() as nursery:
            # the name without brackets: with them the library does not know this machine, and lets every web page in
            app = wrap_app(cast(Any, make_server(controller).streamable_http_app(host=name)), 0, "asgi")
            serve = partial(worker_serve, app, config, sockets=Sockets([], [sock], []))
            bound = await nursery.start(serve)
            say(f"listening on {bound[0]}/mcp")


def _listen(host: str, port: int) -> socket.socket:
    """A socket to be served. Made here: in the server's hands a port that is taken becomes a group of groups."""
    try:
        if port > 65535:
            raise OSError("ports end at 65535")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family)
    except OSError as error:
        hint = "another port; 0 is any that is free"
        raise HostNotReady(f"cannot listen on {host}:{port}: {error.strerror or error}", hint=hint) from error
    sock.setblocking(False)
    return sock


async def _told(answer: Any) -> Any:
    """A controller's answer; its refusal in the protocol's own words."""
    try:
        return await answer
    except ControllerError as error:
        raise (ResourceNotFoundError if error.status == 404 else ResourceError)(str(error)) from error


def _quiet_logs() -> None:
    """Standard output belongs to the protocol; what there is to say goes to standard error, and is little."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)
