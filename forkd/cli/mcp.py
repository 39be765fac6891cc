"""`forkd mcp`: the MCP server."""

from __future__ import annotations

import os
import sys

import click

from forkd.cli.common import fail, first_of
from forkd.mcp.clients import CLIENTS, snippet


@click.command("mcp")
@click.option("--http", "address", metavar="HOST:PORT", help="Serve streamable HTTP at /mcp instead of stdio.")
@click.option("--daemon-url", envvar="FORKD_URL", help="Daemon to use; by default the one that runs, else none.")
@click.option("--daemon-token", envvar="FORKD_TOKEN", help="Its token.")
@click.option(
    "--print-config", type=click.Choice(sorted(CLIENTS)), help="Print what makes a client start this, and exit."
)
def command(address: str | None, daemon_url: str | None, daemon_token: str | None, print_config: str | None) -> None:
    """Serve forkd as tools to an agent, by the Model Context Protocol.

    On stdio the client starts this command itself; --print-config shows how. Without a daemon, sandboxes end with it.
    """
    if print_config is not None:
        where, text = snippet(print_config, _own_path())
        click.echo(f"# goes into {where}:", err=True)
        click.echo(text)
        return
    try:
        from forkd.mcp.server import serve_http, serve_stdio
    except ImportError as error:
        from forkd.specs.errors import HostNotReady

        fail(
            HostNotReady(f"the MCP server needs a package that is missing: {error.name}", hint="pip install forkd[mcp]")
        )
    import trio

    from forkd.sdk.errors import ControllerError
    from forkd.specs.errors import BadInput, ForkdError

    try:
        if address is None:
            trio.run(serve_stdio, daemon_url, daemon_token)
            return
        host, _, port = address.rpartition(":")
        if not port.isdigit() or host not in ("127.0.0.1", "localhost", "[::1]"):
            hint = "127.0.0.1:PORT; whoever reaches it can run things, so put a proxy with a login before it"
            raise BadInput(f"cannot serve at {address!r}", hint=hint)
        trio.run(serve_http, daemon_url, daemon_token, host, int(port), lambda line: click.echo(line, err=True))
    except* KeyboardInterrupt:
        sys.exit(130)
    except* (ControllerError, ForkdError) as group:
        fail(first_of(group))


def _own_path() -> str:
    """How this very program is started again: a client has another PATH."""
    program = sys.executable if getattr(sys, "frozen", False) else sys.argv[0]
    return os.path.abspath(program) if os.path.exists(program) else "forkd"
