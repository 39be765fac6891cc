"""Hub transport plugin: static web servers, WebDAV and presigned URLs (``http:``, ``https:``)."""

from __future__ import annotations

from collections.abc import Callable

from forkd.specs.hookspecs import hookimpl
from forkd.specs.transport import HubTransport


@hookimpl
def forkd_register_hub_transports(register: Callable[[HubTransport], None]) -> None:
    """Hand over the transport."""
    from forkd.plugins.hub_http.transport import HttpTransport

    register(HttpTransport())
