"""The one app: every client, the CLI included, speaks to this."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from forkd.daemon import wire
from forkd.daemon.routes import host, sandboxes, snapshots
from forkd.runtime import Runtime
from forkd.specs.errors import ForkdError


def make_app(runtime: Runtime) -> Starlette:
    """The app over one runtime."""
    routes: list[BaseRoute] = [*host.routes, *snapshots.routes, *sandboxes.routes]
    handlers = {ForkdError: wire.on_error, HTTPException: wire.on_error, Exception: wire.on_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.runtime = runtime
    return app
