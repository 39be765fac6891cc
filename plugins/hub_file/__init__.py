"""Hub transport plugin: a directory as a registry (``file:``)."""

from __future__ import annotations

from collections.abc import Callable

from forkd.specs.hookspecs import hookimpl
from forkd.specs.transport import HubTransport


@hookimpl
def forkd_register_hub_transports(register: Callable[[HubTransport], None]) -> None:
    """Hand over the transport."""
    from forkd.plugins.hub_file.transport import FileTransport

    register(FileTransport())
