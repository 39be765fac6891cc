"""The one app: every client, the CLI included, speaks to this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from forkd.daemon import wire
from forkd.daemon.routes import (
    about,
    events,
    files,
    host,
    hub,
    look,
    ports,
    processes,
    sandboxes,
    snapshots,
    workspaces,
)
from forkd.runtime import Runtime
from forkd.specs.errors import ForkdError

if TYPE_CHECKING:
    from forkd.daemon.metrics import Metrics


def make_app(runtime: Runtime, metrics: Metrics | None = None) -> Starlette:
    """The app over one runtime; a served one counts with ``metrics``."""
    routes: list[BaseRoute] = [*about.routes, *host.routes, *snapshots.routes, *sandboxes.routes, *workspaces.routes]
    routes += [*processes.routes, *files.routes, *ports.routes, *events.routes, *look.routes, *hub.routes]
    kinds = (ForkdError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, wire.on_error))
    app.router.redirect_slashes = False
    app.state.runtime = runtime
    app.state.metrics = metrics
    return app
