"""Routes of processes: start, list, listen (events or WebSocket), feed, signal, resize."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from forkd.daemon.api import IN_SANDBOX, Errors, route
from forkd.daemon.channel import converse, messages, send_event, websocket_routes
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import (
    Emit,
    EventStream,
    body_pieces,
    query_flag,
    query_number,
    read_body,
    reply,
    stream_media,
    wants_stream,
)
from forkd.ops import processes
from forkd.ops.awake import awake
from forkd.processtable import Process
from forkd.specs.errors import BadInput, CommandNotFound, Conflict, ProcessNotFound
from forkd.specs.models import ProcessInfo, ProcessOutput
from forkd.specs.requests import SignalProcess, StartProcess, TerminalSize

MARKS = {"stdout": b"\x01", "stderr": b"\x02"}
HANGUP, KILL = 1, 9


async def create(request: Request) -> Response:
    """Start a process that outlives the request. Asked for events, the answer is its output as it comes."""
    body = await read_body(request, StartProcess)
    body.attach = body.attach or wants_stream(request)
    process = await processes.start_process(runtime_of(request), request.path_params["id"], body)
    if wants_stream(request):
        return _output_events(request, process, 0)
    return reply(process.info(), 201)


async def index(request: Request) -> Response:
    """All processes: those that run, also ones inherited by a fork, and the last that ended."""
    return reply(await processes.list_processes(runtime_of(request), request.path_params["id"]))


async def get(request: Request) -> Response:
    """One process, by pid or tag."""
    return reply((await _find(request)).info())


async def output(request: Request) -> Response:
    """Output from position ``from`` on: as events until it ends, or what is buffered of it now.

    A dropped listener asks again from where it was (``from``, or the header Last-Event-ID of server-sent events); what
    the bounded buffer lost meanwhile is told as an event ``lost``, or by ``truncated``.
    """
    process = await _find(request)
    position = query_number(request, "from", default=_last_seen(request))
    if wants_stream(request):
        return _output_events(request, process, position)
    kept: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    for kind, data in process.output.kept(position):
        kept[kind] += data
    told = {name: base64.b64encode(data).decode() for name, data in kept.items()}
    return reply(ProcessOutput(process=process.info(), stdout=told["stdout"], stderr=told["stderr"]))


async def stdin(request: Request) -> Response:
    """Send the body as input, taken as fast as the process reads; with ``eof`` that was all."""
    process = await _find(request)
    end = query_flag(request, "eof")
    async with awake(runtime_of(request), request.path_params["id"]), body_pieces(request) as pieces:
        async for data in pieces:
            await processes.send_input(process, data)
    if end:
        await processes.close_input(process)
    return Response(status_code=204)


async def signal(request: Request) -> Response:
    """Signal the process's whole group."""
    body = await read_body(request, SignalProcess)
    processes.send_signal(await _find(request), processes.signal_number(body.signal))
    return Response(status_code=204)


async def resize(request: Request) -> Response:
    """Tell its terminal a new size."""
    body = await read_body(request, TerminalSize)
    processes.resize(await _find(request), body.rows, body.cols)
    return Response(status_code=204)


async def delete(request: Request) -> Response:
    """Kill the process's whole group."""
    processes.send_signal(await _find(request), KILL)
    return Response(status_code=204)


async def attach(websocket: WebSocket) -> None:
    """Attach to a process: its output from position ``from`` on, and its input.

    From the server: binary messages, first byte 1 for stdout or 2 for stderr; texts ``{"event": …}``: started, lost,
    end, error. To the server: binary messages are input; texts ``{"signal": …}``, ``{"resize": [rows, cols]}`` or
    ``{"eof": true}``. With ``hangup`` the process gets SIGHUP when the connection ends.
    """
    process = await _find(websocket)
    position = query_number(websocket, "from")
    hangup = query_flag(websocket, "hangup")
    await websocket.accept()
    await _serve(websocket, process, position, hangup=hangup)


async def terminal(websocket: WebSocket) -> None:
    """Start a shell with a terminal of ``rows`` and ``cols``, and attach to it as above."""
    size = TerminalSize(rows=query_number(websocket, "rows", 24), cols=query_number(websocket, "cols", 80))
    shell = websocket.query_params.get("shell") or "exec $(command -v bash || echo sh) -l"
    body = StartProcess(shell=shell, pty=size, user=websocket.query_params.get("user"), cwd="/", attach=True)
    process = await processes.start_process(runtime_of(websocket), websocket.path_params["id"], body)
    hangup = query_flag(websocket, "hangup")
    await websocket.accept()
    await _serve(websocket, process, 0, hangup=hangup)


async def _serve(websocket: WebSocket, process: Process, position: int, *, hangup: bool) -> None:
    async def talk() -> None:
        with process.output.listen(position) as listener:
            await send_event(websocket, {"event": "started", "process": process.info(), "at": listener.position})
            if listener.lost:
                await send_event(websocket, {"event": "lost", "count": listener.lost, "at": listener.position})
            async for kind, data in listener:
                await websocket.send_bytes(MARKS[kind] + data)
        await send_event(websocket, {"event": "end", "process": process.info()})

    async def hear() -> None:
        async for message in messages(websocket):
            if isinstance(message, bytes):
                if process.stream is not None:
                    await processes.send_input(process, message)
            elif process.stream is not None:
                await _control(process, message)

    async with awake(runtime_of(websocket), websocket.path_params["id"]):
        await converse(websocket, talk, hear)
    if hangup:
        processes.send_signal(process, HANGUP)


async def _control(process: Process, message: dict[str, Any]) -> None:
    if isinstance(signal := message.get("signal"), str | int):
        processes.send_signal(process, processes.signal_number(signal))
    if message.get("eof") is True:
        await processes.close_input(process)
    size = message.get("resize")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) for each in size):
        processes.resize(process, *size)


def _output_events(request: Request, process: Process, position: int) -> Response:
    runtime, sandbox_id = runtime_of(request), request.path_params["id"]

    async def work(emit: Emit) -> Any:
        async with awake(runtime, sandbox_id):
            with process.output.listen(position) as listener:
                await emit({"event": "started", "process": process.info(), "at": listener.position})
                if listener.lost:
                    await emit({"event": "lost", "count": listener.lost, "at": listener.position})
                async for kind, data in listener:
                    await emit({"event": kind, "data": base64.b64encode(data).decode(), "at": listener.position})
        return process.info()

    return EventStream(work, stream_media(request))


async def _find(request: Request | WebSocket) -> Process:
    return await processes.find_process(runtime_of(request), request.path_params["id"], request.path_params["process"])


def _last_seen(request: Request) -> int:
    told = request.headers.get("last-event-id", "")
    return int(told) if told.isascii() and told.isdigit() and len(told) < 19 else 0


ALL = "/v1/sandboxes/{id}/processes"
ONE = f"{ALL}/{{process}}"
ERRORS: Errors = (BadInput, ProcessNotFound, Conflict, *IN_SANDBOX)
routes = [
    route("GET", ALL, index, {200: list[ProcessInfo]}, errors=ERRORS),
    route("POST", ALL, create, {201: ProcessInfo}, body=StartProcess, events=True, errors=(CommandNotFound, *ERRORS)),
    route("GET", ONE, get, {200: ProcessInfo}, errors=ERRORS),
    route("DELETE", ONE, delete, {204: None}, errors=ERRORS),
    route("GET", f"{ONE}/output", output, {200: ProcessOutput}, query={"from": int}, events=True, errors=ERRORS),
    route("POST", f"{ONE}/stdin", stdin, {204: None}, query={"eof": bool}, upload=True, errors=ERRORS),
    route("POST", f"{ONE}/signal", signal, {204: None}, body=SignalProcess, errors=ERRORS),
    route("POST", f"{ONE}/resize", resize, {204: None}, body=TerminalSize, errors=ERRORS),
    *websocket_routes(f"{ONE}/attach", attach, query={"from": int, "hangup": bool}, errors=ERRORS),
    *websocket_routes(
        "/v1/sandboxes/{id}/terminal",
        terminal,
        query={"rows": int, "cols": int, "shell": str, "user": str, "hangup": bool},
        errors=ERRORS,
    ),
]
