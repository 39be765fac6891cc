"""A person's terminal joined to a process in a guest: raw mode, window size, input, output, exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trio

    from forkd.sdk.async_channel import Channel
    from forkd.sdk.async_controller import AsyncController

CHUNK = 64 * 1024


def terminal_size() -> dict[str, int]:
    """Rows and columns of this terminal."""
    size = os.get_terminal_size(sys.stdout.fileno()) if sys.stdout.isatty() else os.terminal_size((80, 24))
    return {"rows": max(1, size.lines), "cols": max(1, size.columns)}


@contextmanager
def raw_terminal(wanted: bool) -> Iterator[None]:
    """Keys go through as they are typed, Ctrl-C included; the terminal is as before on leaving."""
    if not wanted or not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed already is not lost
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def join(
    controller: AsyncController, sandbox_id: str, pid: int, *, tty: bool, stdin: bool, hangup: bool, position: int = 0
) -> dict[str, Any]:
    """Join this terminal (or these pipes) to a process until it ends; the process as it was last."""
    import signal

    import trio

    ended: dict[str, Any] = {}
    async with await controller.attach_process(sandbox_id, pid, position, hangup) as channel:
        with raw_terminal(tty):
            async with trio.open_nursery() as nursery:
                if stdin:
                    nursery.start_soon(_send_input, channel)
                if tty:
                    await nursery.start(_send_size, channel)
                else:
                    await nursery.start(_send_signals, channel, (signal.SIGINT, signal.SIGTERM))
                async for message in channel:
                    if isinstance(message, bytes):
                        _write(2 if message[:1] == b"\x02" else 1, message[1:])
                    elif (event := json.loads(message))["event"] in ("end", "error"):
                        ended = event
                    elif event["event"] == "lost":
                        line_end = b"\r\n" if tty else b"\n"
                        _write(2, f"forkd: {event['count']} bytes of earlier output are lost".encode() + line_end)
                nursery.cancel_scope.cancel()
    if "process" in ended:
        process: dict[str, Any] = ended["process"]
        return process
    return {"exit_code": 255, "error": ended.get("error", "the connection was lost"), "running": True, "pid": pid}


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _send_input(channel: Channel) -> None:
    import trio

    while data := await trio.to_thread.run_sync(os.read, 0, CHUNK, abandon_on_cancel=True):
        await channel.send(data)
    await channel.send(json.dumps({"eof": True}))


async def _send_size(channel: Channel, task_status: trio.TaskStatus[None]) -> None:
    import signal

    import trio

    with trio.open_signal_receiver(signal.SIGWINCH) as signals:
        task_status.started()
        size = terminal_size()
        await channel.send(json.dumps({"resize": [size["rows"], size["cols"]]}))
        async for _ in signals:
            size = terminal_size()
            await channel.send(json.dumps({"resize": [size["rows"], size["cols"]]}))


async def _send_signals(channel: Channel, numbers: tuple[int, ...], task_status: trio.TaskStatus[None]) -> None:
    """Without a terminal in the guest, Ctrl-C here is its SIGINT there."""
    import trio

    with trio.open_signal_receiver(*numbers) as signals:
        task_status.started()
        async for number in signals:
            await channel.send(json.dumps({"signal": number}))
