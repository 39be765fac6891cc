"""Network namespaces, links and packet filters, through iproute2 and nft in batches: one process for many changes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_TIMEOUT = 30.0
T = TypeVar("T")


class NetworkError(Exception):
    """The kernel, ``ip`` or ``nft`` refused; the message has its words."""


def path_of(name: str) -> Path:
    """Where a named namespace is."""
    return FOLDER / name


def exists(name: str) -> bool:
    """Whether there is a namespace of this name."""
    return path_of(name).exists()


def within(name: str, work: Callable[[], T]) -> T:
    """Run ``work`` inside a namespace: in a thread of its own that ends with it, so no other is ever moved."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _enter(name)
            results.append(work())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name=f"netns {name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open(path_of(name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(f"network namespace {name} is gone: {error.strerror}") from error
    try:
        # SAFETY: a descriptor and a number; only the calling thread changes its namespace.
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise NetworkError(f"network namespace {name} cannot be entered: {os.strerror(number)}")
    finally:
        os.close(fd)


def ip(lines: Sequence[str]) -> None:
    """Run ``ip`` commands in order, stopping at the first that fails. Raises NetworkError."""
    _feed(["ip", "-batch", "-"], "\n".join(lines) + "\n")


def nft(rules: str) -> None:
    """Load rules; all of them or none. Raises NetworkError."""
    _feed(["nft", "-f", "-"], rules)


def forward_packets() -> None:
    """Let this thread's namespace pass packets on."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def links(prefix: str) -> list[str]:
    """Names of links of this thread's namespace that begin with ``prefix``."""
    return sorted(name for _, name in socket.if_nameindex() if name.startswith(prefix))


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Change what all share (links, the host's rules) alone on this host; blocks its thread until it may."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _feed(command: list[str], text: str) -> None:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except FileNotFoundError as error:
        raise NetworkError(f"{command[0]} is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"{command[0]} did not end within {_TIMEOUT:g} s") from error
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
