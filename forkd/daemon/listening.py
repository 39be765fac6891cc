"""The daemon's listening sockets: TCP, and a unix socket that only its owner may use."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypercorn.config import Sockets

from forkd.config import Settings
from forkd.daemon.config import NONE, DaemonConfig
from forkd.specs.errors import BadInput, Conflict, HostNotReady


@contextmanager
def listening(settings: Settings, config: DaemonConfig) -> Iterator[Sockets]:
    """Listening sockets, closed on leaving; the unix socket's file goes too, if it is ours still."""
    made: list[socket.socket] = []
    path = None if config.socket == NONE else Path(config.socket or settings.socket)
    ours: tuple[int, int] | None = None
    try:
        tcp = [_listen_tcp(config)] if config.address() is not None else []
        made += tcp
        unix = [_listen_unix(path)] if path is not None else []
        made += unix
        ours = None if path is None else _identity(path)
        if not made:
            raise BadInput("there is nothing to listen on", hint="give --bind or --socket")
        secure = tcp if config.tls_cert else []
        yield Sockets(secure, [sock for sock in made if sock not in secure], [])
    finally:
        for sock in made:
            sock.close()
        if path is not None and ours is not None and _identity(path) == ours:  # not another's that took its place
            path.unlink(missing_ok=True)


def _listen_tcp(config: DaemonConfig) -> socket.socket:
    address = config.address()
    assert address is not None
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise HostNotReady(
            f"cannot listen on {config.bind}: {error.strerror or error}", hint="another --bind, or --bind none"
        ) from error
    sock.setblocking(False)
    return sock


def _listen_unix(path: Path) -> socket.socket:
    """A socket only its owner may use. One that an earlier daemon left is replaced, once it is known that it is dead.

    Raises Conflict if somebody listens on it, or if it is something else; HostNotReady.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _short(path) as address:
            _remove_dead(path, address)
            before = os.umask(0o177)
            try:
                sock.bind(address)
            finally:
                os.umask(before)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise HostNotReady(f"cannot listen on {path}: {error.strerror or error}", hint="another --socket") from error
    except Conflict:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address for a socket that stays short however deep its path is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _remove_dead(path: Path, address: str) -> None:
    """Remove the socket of a daemon that is no more; whose data directory it had does not matter."""
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise Conflict(f"{path} is not a socket", hint="give another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its queue is full, so somebody listens
    raise Conflict(f"another process listens on {path}", hint="stop it first, or give another --socket")


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file a path leads to, if to any."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def addresses(settings: Settings, config: DaemonConfig, sockets: Sockets) -> Iterator[str]:
    """What people connect to, in words."""
    for sock in (*sockets.secure_sockets, *sockets.insecure_sockets):
        if sock.family == socket.AF_UNIX:
            yield f"{config.socket or settings.socket} (unix socket)"
        else:
            host, port = sock.getsockname()[:2]
            scheme = "https" if config.tls_cert else "http"
            yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
