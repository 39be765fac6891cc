"""Logs of a sandbox: its guest's console, on which kernel and agent speak, and the messages of its VMM."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.engine import LoggedMachine
from forkd.specs.errors import BadInput, Conflict, MachineGone
from forkd.specs.models import LogText

SOURCES = ("console", "vmm")
LIMIT = 256 * 1024
PERIOD = 0.25
"""How often a log that is followed is looked at: neither a ring in a VMM nor a file says when it has grown."""


async def read_log(runtime: Runtime, reference: str, source: str) -> LogText:
    """What is kept of a log, 256 KiB at most. Works for a paused sandbox too, and does not wake it."""
    sandbox = runtime.sandbox(reference)
    end, data = await _read(sandbox, source, 0)
    return LogText(source=source, text=data.decode(errors="replace"), begin=end - len(data), end=end)


async def follow_log(
    runtime: Runtime, reference: str, source: str, on_data: Callable[[int, bytes], Awaitable[None]]
) -> None:
    """What is kept, then what comes, until the sandbox ends; ``on_data`` gets the position behind each piece too."""
    sandbox = runtime.sandbox(reference)
    position = 0
    while not sandbox.stop.is_set():
        try:
            position, data = await _read(sandbox, source, position)
        except MachineGone:
            return
        if data:
            await on_data(position, data)
        with trio.move_on_after(PERIOD):
            await sandbox.ended.wait()


async def _read(sandbox: Sandbox, source: str, position: int) -> tuple[int, bytes]:
    """The end of a log, and what is kept of it behind ``position``."""
    if source not in SOURCES:
        raise BadInput(f"there is no log {source[:40]!r}", hint="console or vmm")
    machine = sandbox.machine
    if not isinstance(machine, LoggedMachine):
        raise Conflict(f"the engine of {sandbox.id} keeps no logs")
    if source == "vmm":
        return _tail(machine.log, position)
    sandbox.console.add(await machine.console())
    return sandbox.console.end, sandbox.console.after(position)


def _tail(path: Path, position: int) -> tuple[int, bytes]:
    """The end of a file a VMM can write to, and perhaps replace: nothing but a plain file is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MachineGone(f"the VMM's log cannot be read: {error.strerror}") from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise Conflict("the VMM's log is no file")
        begin = max(min(position, about.st_size), about.st_size - LIMIT)
        data = os.pread(descriptor, LIMIT, begin)
        return begin + len(data), data
    finally:
        os.close(descriptor)
