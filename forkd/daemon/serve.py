"""The daemon: the app served on TCP and on a unix socket until it is told to stop."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.utils import wrap_app

from forkd.config import Settings
from forkd.daemon.api import ApiRoute
from forkd.daemon.app import make_app
from forkd.daemon.audit import AuditLog
from forkd.daemon.auth import Tokens
from forkd.daemon.bridge import Bridge
from forkd.daemon.config import NONE, DaemonConfig
from forkd.daemon.connections import serve_connections
from forkd.daemon.gate import Gate
from forkd.daemon.listening import addresses, listening
from forkd.daemon.metrics import Metrics
from forkd.ops.adopt import adopt_all
from forkd.ops.pool import fill_pools
from forkd.ops.prune import keep_pruned
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import end_sandboxes
from forkd.specs.errors import BadInput, ForkdError

log = logging.getLogger("forkd")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Say = Callable[[str], None]


async def run_daemon(settings: Settings, config: DaemonConfig, say: Say) -> None:
    """Serve until SIGTERM or SIGINT; ``say`` gets the lines a person wants to see. Raises before it serves."""
    if not config.loopback() and not config.token_file:
        raise BadInput(
            f"binding to {config.bind} would let anybody who reaches this host run things",
            hint="give --token-file, or bind to 127.0.0.1",
        )
    tokens = Tokens(config.token_file) if config.token_file else None
    http = _http(config)
    secure = _tls(http)
    settings = dataclasses.replace(settings, branch_concurrency=config.branch_concurrency)
    audit = None if config.audit_log == NONE else AuditLog(Path(config.audit_log or settings.data_dir / "audit.log"))
    async with open_runtime(settings, daemon=True) as runtime:
        with listening(settings, config) as sockets, trio.open_signal_receiver(*SIGNALS) as signals:
            if config.opens_agent_ports():
                runtime.on_up = Bridge(runtime).open
            await adopt_all(runtime)
            runtime.nursery.start_soon(fill_pools, runtime, config.pools())
            for where in addresses(settings, config, sockets):
                say(f"listening on {where}")
            say(f"stop it with Ctrl-C or: kill {os.getpid()}")

            async def until_signal() -> None:
                async for number in signals:
                    if number != signal.SIGHUP:
                        log.info("stopping on %s", signal.Signals(number).name)
                        return
                    _reopen(tokens, audit)

            if config.retention is not None:
                runtime.nursery.start_soon(keep_pruned, runtime, config.retention)
            metrics = Metrics(runtime)
            app = make_app(runtime, metrics)
            public = frozenset(route.path for route in app.routes if isinstance(route, ApiRoute) and route.public)
            served = wrap_app(cast(Any, Gate(app, public, tokens, audit, metrics)), 0, "asgi")
            await serve_connections(served, http, secure, sockets, until_signal)
        await _leave(runtime, config, say)


def _reopen(tokens: Tokens | None, audit: AuditLog | None) -> None:
    """SIGHUP: read the tokens and open the log again."""
    try:
        if audit is not None:
            audit.reopen()
        if tokens is not None:
            tokens.reload()
        log.info("tokens read and audit log opened again")
    except ForkdError as error:
        log.error("as before: %s", error.message)


async def _leave(runtime: Runtime, config: DaemonConfig, say: Say) -> None:
    sandboxes = list(runtime.sandboxes.values())
    if config.end_sandboxes:
        await end_sandboxes(sandboxes)
    elif sandboxes:
        say(f"{len(sandboxes)} sandboxes go on; the next daemon adopts them (forkd cleanup --yes ends them)")


def _http(config: DaemonConfig) -> Config:
    http = Config()
    http.errorlog = logging.getLogger("forkd.http")
    http.graceful_timeout = config.drain_secs
    http.keep_alive_timeout = 75.0  # longer than clients keep idle connections, so that they close first
    http.keep_alive_max_requests = 1 << 62
    http.include_server_header = False
    http.certfile = config.tls_cert or None
    http.keyfile = config.tls_key or None
    return http


def _tls(http: Config) -> ssl.SSLContext | None:
    try:
        return http.create_ssl_context()
    except OSError as error:  # ssl's own errors are of this kind
        raise BadInput(
            f"TLS with {http.certfile} and {http.keyfile} is not possible: {error.strerror or error}",
            hint="give a PEM certificate and its unencrypted key",
        ) from error
