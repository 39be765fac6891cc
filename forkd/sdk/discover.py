"""The daemon of this user's data directory, found by its socket."""

from __future__ import annotations

import os
import socket

from forkd.config import load_settings

LONGEST = 107
"""Bytes a socket's address may have."""


def own_socket() -> str | None:
    """Where the daemon of this data directory listens; None if nobody does."""
    path = str(load_settings().socket)
    if len(path.encode()) > LONGEST:
        try:
            # Through a descriptor, kept for good, any path fits.
            directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        path = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except OSError:
        return None
    return path
