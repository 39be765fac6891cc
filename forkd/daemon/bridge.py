"""The agent's port: each sandbox also answers the reference's JSON-line protocol on a loopback address of its own.

One JSON object a connection: ``{"action": "ping" | "exec" | "eval", …}`` and a newline, answered by one line. The port
has no authentication, so a daemon with tokens offers it only if told to.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import trio

from forkd.daemon.wire import error_body
from forkd.ops import execute
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import ForkdError
from forkd.specs.requests import EvalRequest, ExecRequest

HOST = "127.0.0.1"
MAX_LINE = 2 << 20
LINE_SECS = 60.0
AT_ONCE = 64
log = logging.getLogger("forkd")


class _Message(msgspec.Struct):
    action: str
    args: list[str] = []
    timeout: float = 30
    code: str = ""


class Bridge:
    """Opens a port for each sandbox that comes up, and closes it with the sandbox."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def open(self, sandbox: Sandbox) -> None:
        """Listen and note the address; an adopted sandbox gets its old port back if it is free."""
        host, _, before = sandbox.info.guest_addr.rpartition(":")
        sandbox.info.guest_addr = ""
        for port in dict.fromkeys((int(before) if host == HOST else 0, 0)):  # a networked one has its own address there
            try:
                (listener,) = await trio.open_tcp_listeners(port, host=HOST)
                break
            except OSError as error:
                log.warning("sandbox %s: no agent port: %s", sandbox.id, error)
        else:
            return
        sandbox.info.guest_addr = f"{HOST}:{listener.socket.getsockname()[1]}"
        self._runtime.nursery.start_soon(self._serve, sandbox, listener)

    async def _serve(self, sandbox: Sandbox, listener: trio.SocketListener) -> None:
        limit = trio.CapacityLimiter(AT_ONCE)

        async def talk(stream: trio.SocketStream) -> None:
            async with limit, stream:
                await self._talk(sandbox.id, stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, talk, [listener])
            await sandbox.stop.wait()
            nursery.cancel_scope.cancel()

    async def _talk(self, sandbox_id: str, stream: trio.SocketStream) -> None:
        try:
            answer = await self._answer(sandbox_id, await _line(stream))
        except ForkdError as error:
            answer = {"error": error.message, "code": error.code, "exit_code": 1}
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            answer = {"error": f"not a request: {error}", "exit_code": 1}
        except trio.BrokenResourceError:
            return
        except Exception as error:  # the process edge: one client's request must not end the daemon
            answer = {**error_body(error)[0], "exit_code": 1}
        try:
            await stream.send_all(msgspec.json.encode(answer) + b"\n")
        except trio.BrokenResourceError:
            return  # the client did not wait

    async def _answer(self, sandbox_id: str, line: bytes) -> dict[str, Any]:
        message = msgspec.json.decode(line, type=_Message)
        if message.action == "ping":
            return await execute.ping(self._runtime, sandbox_id)
        if message.action == "eval":
            asked = EvalRequest(code=message.code, timeout_secs=message.timeout)
            return _present(await execute.eval_code(self._runtime, sandbox_id, asked))
        if message.action == "exec":
            command = ExecRequest(args=message.args, timeout_secs=message.timeout)
            result = await execute.exec_command(self._runtime, sandbox_id, command)
            told = _present(result)
            if result.signal is not None:
                told["exit_code"] = -result.signal
            return told | ({"error": f"timed out after {message.timeout:g} s"} if result.timed_out else {})
        return {"error": f"unknown action: {message.action[:80]}", "exit_code": 1}


def _present(result: Any) -> dict[str, Any]:
    """Only what there is: clients of the protocol ask whether a key is there."""
    return {key: value for key, value in msgspec.to_builtins(result).items() if value is not None}


async def _line(stream: trio.SocketStream) -> bytes:
    """One line. Raises ValueError for one that is too long or too late."""
    data = bytearray()
    with trio.move_on_after(LINE_SECS):
        while b"\n" not in data:
            piece = await stream.receive_some(65536)
            data += piece
            if not piece:
                break
            if len(data) > MAX_LINE:
                raise ValueError(f"longer than {MAX_LINE} bytes")
        return bytes(data.partition(b"\n")[0])
    raise ValueError(f"no line within {LINE_SECS:g} s")
