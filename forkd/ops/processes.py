"""Processes in a sandbox that outlive the request that started them: start, list, listen, feed, signal."""

from __future__ import annotations

import signal as signals

from forkd.ops.awake import awake
from forkd.ops.execute import check_command
from forkd.processtable import Output, Process
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import BadInput, Conflict, ProcessNotFound
from forkd.specs.models import ProcessInfo
from forkd.specs.requests import StartProcess
from forkd.specs.tags import check_tag

MAX_SIZE = 1000
ASK_TIMEOUT = 30.0


async def start_process(runtime: Runtime, sandbox_id: str, request: StartProcess) -> Process:
    """Start a command and return once it runs; it goes on whoever listens or not."""
    args = check_command(request.args, request.shell)
    if request.timeout_secs is not None and not 0 < request.timeout_secs <= 365 * 86400:
        raise BadInput(f"a timeout of {request.timeout_secs:g} s is not possible", hint="give a positive number")
    size = None if request.pty is None else check_size(request.pty.rows, request.pty.cols)
    async with awake(runtime, sandbox_id) as sandbox:
        table = sandbox.processes
        table.check_room()
        if request.tag is not None:
            check_tag(request.tag)
            await _adopt(runtime, sandbox)
        with table.starting(request.tag):
            process = Process(
                args,
                request.tag,
                pty=size is not None,
                stdin=request.stdin or size is not None,
                output=Output(attach=request.attach),
            )
            stream = sandbox.link.exec(
                args,
                env=request.env,
                cwd=request.cwd,
                user=request.user,
                stdin=request.stdin,
                timeout=request.timeout_secs,
                pty=size,
                tag=request.tag,
            )
            await runtime.nursery.start(process.run, stream)
            table.add(process)
    runtime.observe("process", id=sandbox_id, pid=process.pid, args=args[:1])
    return process


async def list_processes(runtime: Runtime, sandbox_id: str) -> list[ProcessInfo]:
    """All that run, also those a fork or an earlier daemon left, and the last that ended."""
    async with awake(runtime, sandbox_id) as sandbox:
        await _adopt(runtime, sandbox)
        return [process.info() for process in sandbox.processes]


async def find_process(runtime: Runtime, sandbox_id: str, reference: str) -> Process:
    """By pid or tag. Raises ProcessNotFound."""
    async with awake(runtime, sandbox_id) as sandbox:
        process = sandbox.processes.find(reference)
        if process is None:
            await _adopt(runtime, sandbox)
            process = sandbox.processes.find(reference)
        if process is None:
            raise ProcessNotFound(
                f"sandbox {sandbox_id} has no process {reference[:80]!r}", hint=f"forkd ps {sandbox_id} lists them"
            )
        return process


async def send_input(process: Process, data: bytes) -> None:
    """Give a process input, as fast as it takes it. Raises Conflict if it reads none."""
    if not process.stdin:
        raise Conflict(f"process {process.pid} was started without stdin", hint="start it with stdin: true, or a pty")
    await process.connected().send_data(data)


async def close_input(process: Process) -> None:
    """End its input; on a terminal, type its end-of-file character."""
    await process.connected().end_input()


def send_signal(process: Process, number: int) -> None:
    """Signal its whole group; one that has ended needs none."""
    if process.stream is not None:
        process.stream.control({"signal": number})


def resize(process: Process, rows: int, cols: int) -> None:
    """Tell its terminal the new size."""
    if not process.pty:
        raise Conflict(f"process {process.pid} has no terminal")
    rows, cols = check_size(rows, cols)
    process.connected().control({"resize": [rows, cols]})


def signal_number(signal: str | int) -> int:
    """A signal by number or name, with or without SIG. Raises BadInput."""
    try:
        if isinstance(signal, int) or signal.isdigit():
            return int(signals.Signals(int(signal)))
        name = signal.upper()
        return int(signals.Signals[name if name.startswith("SIG") else f"SIG{name}"])
    except (KeyError, ValueError):
        raise BadInput(f"there is no signal {str(signal)[:40]!r}", hint="for example TERM, INT or 9") from None


def check_size(rows: int, cols: int) -> tuple[int, int]:
    """The size of a terminal. Raises BadInput."""
    if not (1 <= rows <= MAX_SIZE and 1 <= cols <= MAX_SIZE):
        raise BadInput(f"a terminal of {rows} x {cols} is not possible", hint=f"give 1 to {MAX_SIZE}")
    return rows, cols


async def _adopt(runtime: Runtime, sandbox: Sandbox) -> None:
    """Listen to the processes that came with the guest: of a fork's source, or of an earlier daemon."""
    async with sandbox.processes.adopting:
        for row in await sandbox.link.procs(timeout=ASK_TIMEOUT):
            if row.attached or row.detached or sandbox.processes.find(str(row.pid)) is not None:
                continue
            process = Process(row.args, row.tag, pty=row.pty, stdin=row.stdin, started=row.started)
            try:
                await runtime.nursery.start(process.run, sandbox.link.attach(row.pid))
            except ProcessNotFound:
                continue  # ended, and was forgotten, meanwhile
            sandbox.processes.add(process)
