"""Host end of the agent protocol: one link to one guest, carrying any number of streams."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import trio

from forkd.guestframes import (
    MAX_FRAME,
    MAX_RESPONSE,
    MAX_WINDOW,
    NONCE_SIZE,
    PROTOCOL,
    TOKEN_SIZE,
    WINDOW,
    Frame,
    FrameReader,
    FrameType,
    Inbox,
    decode_credit,
    decode_object,
    encode_credit,
    encode_frame,
    encode_object,
)
from forkd.specs.errors import (
    BadInput,
    CapabilityMissing,
    CommandNotFound,
    Conflict,
    ForkdError,
    GuestDenied,
    GuestError,
    GuestFileNotFound,
    GuestProtocolError,
    GuestTimeout,
    GuestUnreachable,
    NoSpace,
    PortClosed,
    ProcessNotFound,
)
from forkd.specs.models import EvalResult, ExecResult

OUTPUT_LIMIT = 16 * 1024 * 1024
SLOW_RESUME_NS = 40_000_000
CLOCK_ERROR_NS = 10_000_000
GRACE = 10.0
"""Seconds an answer may be late beyond a time limit the guest itself keeps."""

_MAX_IDLE = 10_000
"""Frames a second that bring nothing: what they cost us is not theirs to give away, as no window counts them."""
_MIN_PROGRESS = 4096
"""What the agent gives or sends at least, but for the end of an answer: less does not count as progress."""
_READ_SIZE = 64 * 1024
_OUT_LIMIT = 1024 * 1024
_ERRORS: dict[str, type[ForkdError]] = {
    "no_such_file": GuestFileNotFound,
    "no_such_process": ProcessNotFound,
    "not_found": CommandNotFound,
    "not_executable": CommandNotFound,
    "denied": GuestDenied,
    "no_space": NoSpace,
    "exists": Conflict,
    "not_empty": Conflict,
    "refused": PortClosed,
    "bad_op": CapabilityMissing,
    "bad_name": BadInput,
    "is_dir": BadInput,
    "not_dir": BadInput,
    "bad_cwd": BadInput,
    "unknown_user": BadInput,
    "bad_request": BadInput,
    "timed_out": GuestTimeout,
}
_HINTS = {
    "bad_op": "the snapshot was made by an older forkd: build it again",
    "is_dir": "ask for a directory as tar",
    "not_empty": "remove it recursively",
}
_NOT_STARTED = {"not_found": 127, "not_executable": 126}
_EVAL_ENDED = {"eval_error": 1, "interpreter_exited": 1, "cancelled": 1, "timed_out": 124}
_T = TypeVar("_T")
_NAMES = {FrameType.OUT: "stdout", FrameType.ERR: "stderr"}


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent says about itself at the start of a session."""

    nonce: str
    protocol: int
    agent: str
    python: str
    numpy: str
    pid: int
    lang: str
    locked: bool
    warmup_ready: bool = True
    notes: list[str] = []


class GuestCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command as the agent knows it; one of an older snapshot says neither its tag nor whether it takes input."""

    pid: int
    args: list[str]
    started: float
    running: bool
    attached: bool
    detached: bool
    pty: bool
    tag: str | None = None
    stdin: bool = True


@dataclass(frozen=True, slots=True)
class ResumeInfo:
    """What makes a restored guest a new individual; what is None stays as it is in the guest."""

    entropy: bytes | None = None
    hostname: str | None = None
    machine_id: str | None = None
    env: Mapping[str, str] | None = None
    network: Mapping[str, object] | None = None

    @classmethod
    def fresh(cls, sandbox_id: str, env: Mapping[str, str] | None = None) -> ResumeInfo:
        """A new identity: for a guest that was booted, restored or cloned."""
        return cls(os.urandom(64), sandbox_id, secrets.token_hex(16), {} if env is None else env)

    def request(self, now_ns: int) -> dict[str, Any]:
        values = {
            "time_ns": now_ns,
            "entropy": self.entropy.hex() if self.entropy is not None else None,
            "hostname": self.hostname,
            "machine_id": self.machine_id,
            "env": dict(self.env) if self.env is not None else None,
            "network": dict(self.network) if self.network is not None else None,
        }
        return {"op": "resume"} | {key: value for key, value in values.items() if value is not None}


def fresh_identity(sandbox_id: str, env: Mapping[str, str] | None = None) -> ResumeInfo:
    """64 bytes of entropy, a random machine id and the sandbox id as host name."""
    return ResumeInfo.fresh(sandbox_id, env)


def guest_failure(answer: Mapping[str, Any]) -> ForkdError:
    """The exception for an answer with ``ok`` false; ``details["guest_code"]`` keeps the agent's own code."""
    code, text = str(answer.get("code")), str(answer.get("error"))[:4096]
    return _ERRORS.get(code, GuestError)(text, hint=_HINTS.get(code), guest_code=code)


class GuestStream:
    """One request and what belongs to it; an async context manager that is left when the caller has what it wants.

    Iterating yields ``("stdout" | "stderr", bytes)`` until the request is answered; an empty piece is the end of a
    dialled connection's output. A failed request raises from the iteration and from ``result``. Leaving early sends
    CANCEL: the guest ends the command, and what it still sends is dropped.
    """

    def __init__(self, link: GuestLink, op: Mapping[str, Any], window: int) -> None:
        self._link = link
        self._op = op
        self._window = window
        self._inbox = Inbox(window)
        self._wake = trio.lowlevel.ParkingLot()
        self._id = 0
        self._input_credit = WINDOW
        self._parts = bytearray()
        self._received = 0
        """Bytes of an answer nobody waits for any more."""
        self._started: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self._left = False
        self._cancels = True

    def leave_running(self) -> None:
        """Leaving early shall not end the command: it goes on, and can be attached to in a later session."""
        self._cancels = False

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        self._inbox.clear()
        self._received, self._parts, self._op = len(self._parts), bytearray(), {}
        if self._answer is None and self._cancels:
            # Queued, not awaited: leaving neither blocks nor can be cancelled.
            self._link._post(encode_frame(FrameType.CANCEL, self._id))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        await trio.lowlevel.checkpoint()
        while (piece := self._inbox.take()) is None:
            if self._answer is not None:
                if self._answer["ok"]:
                    raise StopAsyncIteration
                raise guest_failure(self._answer)
            await self._wait()
        if count := self._inbox.credit_due():
            self._link._post(encode_credit(self._id, count))
        return _NAMES[piece[0]], piece[1]

    async def started(self) -> dict[str, Any]:
        """What the agent said when a command ran or a connection stood: ``{"pid": …}`` or ``{}``."""
        while self._started is None:
            if self._answer is not None:
                raise guest_failure(self._answer)
            await self._wait()
        return self._started

    async def begun(self) -> None:
        """Wait for the first output or the answer; a request that failed at once raises."""
        while not self._inbox and self._answer is None:
            await self._wait()
        if not self._inbox and self._answer is not None and not self._answer["ok"]:
            raise guest_failure(self._answer)

    async def result(self) -> dict[str, Any]:
        """The successful answer, without ``ok``; output not taken until now is dropped."""
        async for _ in self:
            pass
        assert self._answer is not None
        return {key: value for key, value in self._answer.items() if key != "ok"}

    @property
    def answer(self) -> dict[str, Any] | None:
        """The answer as it came, once there is one."""
        return self._answer

    async def send_data(self, data: bytes) -> None:
        """Send input, as fast as the guest takes it. Input for a stream that has ended goes nowhere."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view and self._answer is None:
            if not self._input_credit:
                await self._wait()
                continue
            await self._link._room()
            size = min(len(view), self._input_credit, MAX_FRAME)
            self._input_credit -= size
            self._link._post(encode_frame(FrameType.DATA_IN, self._id, bytes(view[:size])))
            view = view[size:]

    async def end_input(self) -> None:
        await trio.lowlevel.checkpoint()
        self._post(FrameType.DATA_IN)

    def control(self, message: dict[str, Any]) -> None:
        """Send ``{"signal": number}`` or ``{"resize": [rows, columns]}``."""
        self._post(FrameType.CONTROL, encode_object(message))

    def _post(self, kind: FrameType, payload: bytes = b"") -> None:
        if self._answer is None:
            self._link._post(encode_frame(kind, self._id, payload))

    def _begin(self) -> None:
        extra = {} if self._window == WINDOW else {"window": self._window}
        payload = encode_object({**self._op, **extra})
        if len(payload) > MAX_FRAME:
            raise BadInput(f"a request of {len(payload)} bytes is too long", hint=f"the limit is {MAX_FRAME} bytes")
        self._id = self._link._register(self)
        self._link._post(encode_frame(FrameType.REQUEST, self._id, payload))

    async def _wait(self) -> None:
        self._link._check()
        await self._wake.park()
        self._link._check()

    def _on_frame(self, frame: Frame) -> bool:
        """Take a frame of this stream; True when it was the last one. Raises GuestProtocolError."""
        if frame.type in _NAMES:
            self._inbox.put(frame.type, frame.payload, drop=self._left)
        elif frame.type == FrameType.CREDIT:
            credit = decode_credit(frame.payload)
            if credit < _MIN_PROGRESS:
                self._link._idle()
            self._input_credit += credit
            if self._input_credit > MAX_WINDOW:
                raise GuestProtocolError("the guest granted more input than anybody has")
        elif frame.type == FrameType.STARTED and self._started is None:
            self._started = decode_object(frame.payload)
        elif frame.type in (FrameType.MORE, FrameType.RESPONSE):
            self._on_answer(frame)
        else:
            raise GuestProtocolError(f"the guest sent {frame.type.name} where it makes no sense")
        self._wake.unpark_all()
        return self._answer is not None

    def _on_answer(self, frame: Frame) -> None:
        last = frame.type == FrameType.RESPONSE
        if not last and (self._left or len(frame.payload) < _MIN_PROGRESS):
            self._link._idle()
        if self._left:
            self._received += len(frame.payload)
        else:
            self._parts += frame.payload
        if max(self._received, len(self._parts)) > MAX_RESPONSE:
            raise GuestProtocolError(f"the guest sent an answer of more than {MAX_RESPONSE} bytes")
        if not last:
            return
        answer = {"ok": False, "code": "cancelled"} if self._left else decode_object(bytes(self._parts))
        if not isinstance(answer.get("ok"), bool):
            raise GuestProtocolError("the guest sent an answer without ok")
        self._parts.clear()
        self._answer = answer


class GuestLink:
    """A session with one guest. Opened on a connected stream, which it owns from then on.

    Its tasks run in the caller's nursery and never raise into it: why a link ended is kept and raised from every
    pending and later call: GuestProtocolError, or GuestUnreachable, whose ``details["closed_by"]`` is ``us`` or
    ``peer``. Requests may be made at once, before the guest has answered anything, and go out with the first bytes.
    """

    def __init__(self, stream: trio.abc.Stream, sync: bytes, resume: ResumeInfo | None) -> None:
        if len(sync) != TOKEN_SIZE:
            raise ValueError(f"a sync token has {TOKEN_SIZE} bytes, not {len(sync)}")
        self._stream = stream
        self._nonce = os.urandom(NONCE_SIZE)
        self._frames = FrameReader(self._nonce)
        self._streams: dict[int, GuestStream] = {}
        self._last_id = 0
        self._out = bytearray(sync + self._nonce)
        self._out_wake = trio.lowlevel.ParkingLot()
        self._out_room = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._hello: Hello | None = None
        self._greeted = trio.Event()
        self._ready = trio.Event()
        self._reason: ForkdError | None = None
        self.closed = trio.Event()
        self._owns_stream = True
        self._idle_frames = 0
        self._idle_since = -math.inf
        self._opened_ns = time.time_ns()
        self._resume: GuestStream | None = None
        if resume is not None:
            self._resume = GuestStream(self, resume.request(self._opened_ns), WINDOW)
            self._resume._begin()

    @classmethod
    async def open(
        cls, stream: trio.abc.Stream, sync: bytes, nursery: trio.Nursery, *, resume: ResumeInfo | None
    ) -> GuestLink:
        """Start a session; returns at once, before anything is sent.

        Without ``resume`` the guest stays locked: it answers ping and nothing else.
        """
        link = cls(stream, sync, resume)
        nursery.start_soon(link._run, name="guest link")
        return link

    async def ready(self) -> Hello:
        """Wait until the guest has greeted, was resumed and has the right time."""
        await self._ready.wait()
        self._check()
        assert self._hello is not None
        return self._hello

    @property
    def reason(self) -> ForkdError | None:
        """Why the link ended; None while it works."""
        return self._reason

    async def aclose(self) -> None:
        """End the session and close the stream; pending calls raise GuestUnreachable."""
        self._fail(GuestUnreachable("the guest link was closed", closed_by="us"))
        await trio.aclose_forcefully(self._stream)

    async def let_go(self) -> None:
        """End the session and leave the stream open, for another session on it."""
        self._owns_stream = False
        self._fail(GuestUnreachable("the guest link was let go", closed_by="us"))
        await self.closed.wait()

    # -- requests ----------------------------------------------------------------------------------------------------

    def open_stream(self, op: Mapping[str, Any], *, window: int = WINDOW) -> GuestStream:
        """A request with input or output of its own, to be entered with ``async with``."""
        return GuestStream(self, op, window)

    async def request(self, op: Mapping[str, Any], *, timeout: float | None) -> dict[str, Any]:
        """A request that is answered in one piece. Raises GuestTimeout, or what ``guest_failure`` says."""
        async with self.open_stream(op) as stream:
            with trio.move_on_after(math.inf if timeout is None else timeout):
                return await stream.result()
        raise GuestTimeout(f"the guest did not answer {op.get('op')} within {timeout:g} s")

    def exec(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        clear_env: bool = False,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout: float | None = None,
        pty: tuple[int, int] | None = None,
        detach: bool = False,
        tag: str | None = None,
        window: int = WINDOW,
    ) -> GuestStream:
        """A command as a stream; ``pty`` is rows and columns of a terminal, ``tag`` what ``procs`` shall call it."""
        op: dict[str, Any] = {"op": "exec", "args": list(args), "env": dict(env or {})}
        op |= {"clear_env": clear_env, "stdin": stdin, "detach": detach}
        extras = {"cwd": cwd, "user": user, "timeout": timeout, "tag": tag}
        op |= {key: value for key, value in extras.items() if value is not None}
        if pty is not None:
            op["pty"] = {"rows": pty[0], "cols": pty[1]}
        return self.open_stream(op, window=window)

    def attach(self, pid: int, *, window: int = WINDOW) -> GuestStream:
        """Listen again to a command of an earlier session: what was kept of its output, what comes, how it ends."""
        return self.open_stream({"op": "attach", "pid": pid}, window=window)

    async def procs(self, *, timeout: float | None = None) -> list[GuestCommand]:
        """The commands that run, and those that ended with nobody listening."""
        answer = await self.request({"op": "procs"}, timeout=timeout)
        return _checked(answer.get("procs"), list[GuestCommand])

    def dial(self, port: int, host: str = "localhost") -> GuestStream:
        """A TCP connection made inside the guest."""
        return self.open_stream({"op": "dial", "port": port, "host": host})

    async def run(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        clear_env: bool = False,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        on_output: Callable[[str, bytes], Awaitable[None]] | None = None,
        limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a command to its end.

        Keeps at most ``limit`` bytes each of stdout and stderr, drops the rest and says so; with ``on_output(name,
        bytes)`` it keeps nothing and hands over pieces as they come. Cancelling it ends the command.
        """
        stream = self.exec(
            args, env=env, clear_env=clear_env, cwd=cwd, user=user, stdin=stdin is not None, timeout=timeout
        )
        kept = _Kept(limit, on_output)
        async with stream, trio.open_nursery() as nursery:
            if stdin is not None:
                nursery.start_soon(_send_input, stream, stdin)
            failure = await _collect(stream, kept, timeout)
            nursery.cancel_scope.cancel()
        if failure is None:
            return kept.result(_checked(stream.answer, _Ended))
        code = _NOT_STARTED.get(str(failure.details.get("guest_code"))) if isinstance(failure, ForkdError) else None
        if code is None:
            raise failure
        return ExecResult(stdout="", stderr="", exit_code=code, reason="not_found", error=str(failure))

    async def eval(self, code: str, timeout: float | None = None) -> EvalResult:
        """Evaluate code in the warm interpreter; what the code raises is in the result."""
        op: dict[str, Any] = {"op": "eval", "code": code}
        if timeout is not None:
            op["timeout"] = timeout
        async with self.open_stream(op) as stream:
            with trio.move_on_after(math.inf if timeout is None else timeout + GRACE):
                try:
                    await stream.result()
                except GuestError as error:
                    if error.details.get("guest_code") not in _EVAL_ENDED:
                        raise
                return _checked(stream.answer, _Evaluated).result_value()
        raise GuestTimeout(f"the guest did not answer eval within {timeout:g} s")

    # -- files -------------------------------------------------------------------------------------------------------

    def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> GuestStream:
        """A file's bytes as a stream."""
        op: dict[str, Any] = {"op": "read", "path": path, "offset": offset}
        return self.open_stream(op if length is None else {**op, "length": length})

    async def write_file(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
        make_parents: bool = False,
        user: str | None = None,
    ) -> int:
        """Write a file whole or not at all; returns its size. If ``data`` raises, nothing is written."""
        op: dict[str, Any] = {"op": "write", "path": path, "append": append, "make_parents": make_parents}
        op |= {key: value for key, value in {"mode": mode, "user": user}.items() if value is not None}
        async with self.open_stream(op) as stream:
            if isinstance(data, bytes):
                await stream.send_data(data)
            else:
                async for piece in data:
                    await stream.send_data(piece)
            await stream.end_input()
            return _checked((await stream.result()).get("size"), int)

    def read_tree(self, path: str, *, user: str | None = None) -> GuestStream:
        """A directory as a tar stream; errors are judged by ``tree_done``."""
        op: dict[str, Any] = {"op": "pack", "path": path}
        return self.open_stream(op if user is None else {**op, "user": user})

    async def write_tree(
        self, path: str, data: AsyncIterable[bytes], *, make_parents: bool = False, user: str | None = None
    ) -> None:
        """A tar stream becomes a directory; a new one appears whole or not at all."""
        op: dict[str, Any] = {"op": "unpack", "path": path, "make_parents": make_parents}
        async with self.open_stream(op if user is None else {**op, "user": user}) as stream:
            async for piece in data:
                await stream.send_data(piece)
            await stream.end_input()
            said = b""
            async for _, piece in stream:
                said = (said + piece)[-MAX_FRAME:]
            tree_done(stream, said)

    def watch(self, path: str, *, recursive: bool = False) -> GuestStream:
        """Changes below a directory as JSON lines."""
        return self.open_stream({"op": "watch", "path": path, "recursive": recursive})

    async def list_dir(self, path: str, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The entries of a directory, at most 10 000."""
        answer = await self.request({"op": "list", "path": path}, timeout=timeout)
        return _checked(answer.get("entries"), list[dict[str, Any]])

    async def stat(self, path: str, *, follow: bool = False, timeout: float | None = None) -> dict[str, Any]:
        answer = await self.request({"op": "stat", "path": path, "follow": follow}, timeout=timeout)
        return _checked(answer.get("entry"), dict[str, Any])

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False, timeout: float | None = None) -> None:
        await self.request({"op": "mkdir", "path": path, "mode": mode, "parents": parents}, timeout=timeout)

    async def remove(self, path: str, *, recursive: bool = False, timeout: float | None = None) -> None:
        await self.request({"op": "remove", "path": path, "recursive": recursive}, timeout=timeout)

    async def move(self, source: str, target: str, *, timeout: float | None = None) -> None:
        await self.request({"op": "move", "from": source, "to": target}, timeout=timeout)

    async def chmod(self, path: str, mode: int, *, timeout: float | None = None) -> None:
        await self.request({"op": "chmod", "path": path, "mode": mode}, timeout=timeout)

    # -- what streams use --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise why the link ended, if it did: a new exception each time, as many tasks may raise it."""
        if self._reason is not None:
            raise type(self._reason)(self._reason.message, hint=self._reason.hint, **self._reason.details)

    def _register(self, stream: GuestStream) -> int:
        self._check()
        self._last_id += 1
        self._streams[self._last_id] = stream
        return self._last_id

    def _post(self, frame: bytes) -> None:
        """Queue a whole frame; frames queued before the writer runs leave in one write."""
        if self._reason is None:
            self._out += frame
            self._out_wake.unpark_all()

    async def _room(self) -> None:
        """Wait while much is queued already."""
        while len(self._out) > _OUT_LIMIT:
            self._check()
            await self._out_room.park()
        self._check()

    # -- the tasks ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._greet)
                    await self._read()
        finally:
            self._fail(GuestUnreachable("the guest link was closed", closed_by="us"))
            if self._owns_stream:
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(self._stream)
            self.closed.set()

    def _fail(self, reason: ForkdError) -> None:
        """End the link for the first reason given and wake everybody who waits."""
        if self._reason is not None:
            return
        self._reason = reason
        self._out.clear()
        self._scope.cancel()
        self._greeted.set()
        self._ready.set()
        self._out_room.unpark_all()
        for stream in self._streams.values():
            stream._wake.unpark_all()
        self._streams.clear()

    async def _write(self) -> None:
        try:
            while True:
                while not self._out:
                    await self._out_wake.park()
                out, self._out = self._out, bytearray()
                await self._stream.send_all(out)
                self._out_room.unpark_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(_unreachable(error))

    async def _read(self) -> None:
        try:
            while data := await self._stream.receive_some(_READ_SIZE):
                for frame in self._frames.feed(data):
                    self._on_frame(frame)
            self._fail(GuestUnreachable("the guest end of the link is closed", closed_by="peer"))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(_unreachable(error))
        except GuestProtocolError as error:
            self._fail(error)

    def _on_frame(self, frame: Frame) -> None:
        if self._hello is None:
            self._on_hello(frame)
        elif frame.type == FrameType.NOOP:
            self._idle()
        elif frame.stream in self._streams:
            if self._streams[frame.stream]._on_frame(frame):
                del self._streams[frame.stream]
        elif frame.stream == 0 and frame.type == FrameType.RESPONSE:
            why = decode_object(frame.payload).get("error")
            raise GuestProtocolError(f"the guest gave up the session: {why!s:.200}")
        else:
            raise GuestProtocolError(f"the guest sent {frame.type.name} on stream {frame.stream}, which is not open")

    def _idle(self) -> None:
        """Count a frame that brings nothing. Raises GuestProtocolError where a second has too many."""
        self._idle_frames += 1
        if self._idle_frames > _MAX_IDLE:
            now = trio.current_time()
            if now - self._idle_since < 1.0:
                raise GuestProtocolError(f"the guest sent {_MAX_IDLE} frames that say nothing within a second")
            self._idle_frames, self._idle_since = 0, now

    def _on_hello(self, frame: Frame) -> None:
        if frame.type != FrameType.HELLO or frame.stream != 0:
            raise GuestProtocolError(f"the guest began with {frame.type.name} in place of HELLO")
        try:
            hello = msgspec.convert(decode_object(frame.payload), Hello)
        except msgspec.ValidationError as error:
            raise GuestProtocolError(f"the guest's HELLO is malformed: {error}") from error
        if hello.protocol != PROTOCOL:
            raise GuestProtocolError(f"the guest speaks protocol {hello.protocol}, forkd speaks {PROTOCOL}")
        if hello.nonce != self._nonce.hex():
            raise GuestProtocolError("the guest's HELLO is for another session")
        self._hello = hello
        self._greeted.set()

    async def _greet(self) -> None:
        await self._greeted.wait()
        try:
            if self._resume is not None:
                await self._resume.result()
                if time.time_ns() - self._opened_ns > SLOW_RESUME_NS:
                    await self._correct_clock()
        except ForkdError as error:
            self._fail(error)
        self._ready.set()

    async def _correct_clock(self) -> None:
        """The guest has the time at which resume was sent: measure how far it is off, and correct that."""
        sent = time.time_ns()
        answer = await self.request({"op": "clock", "delta_ns": 0}, timeout=None)
        ahead = _checked(answer.get("time_ns"), int) - (sent + time.time_ns()) // 2
        if abs(ahead) > CLOCK_ERROR_NS:
            await self.request({"op": "clock", "delta_ns": -ahead}, timeout=None)


def tree_done(stream: GuestStream, said: bytes) -> None:
    """Raise what the guest said on stderr if packing or unpacking failed."""
    if _checked(stream.answer, _Ended).exit_code == 0:
        return
    try:
        answer = decode_object(said.strip().rsplit(b"\n", 1)[-1])
    except GuestProtocolError as error:
        raise GuestError("the guest could not move the directory: " + said[-500:].decode(errors="replace")) from error
    raise guest_failure(answer)


def _unreachable(error: Exception) -> GuestUnreachable:
    """Translate a stream's failure: closed by this process, or broken by the peer."""
    ours = isinstance(error, trio.ClosedResourceError)
    words = "the guest link was closed" if ours else f"the guest link broke: {error}"
    reason = GuestUnreachable(words, closed_by="us" if ours else "peer")
    reason.__cause__ = error
    return reason


class _Ended(msgspec.Struct, frozen=True):
    """The answer to exec, as far as it matters here."""

    reason: str
    exit_code: int
    signal: int | None = None


class _Evaluated(msgspec.Struct, frozen=True):
    """The answer to eval."""

    ok: bool
    result: str | None = None
    result_json: Any = None
    code: str = ""
    error: str | None = None
    stdout: str = ""
    traceback: str | None = None

    def result_value(self) -> EvalResult:
        return EvalResult(
            result=self.result,
            error=None if self.ok else self.error or self.code,
            exit_code=0 if self.ok else _EVAL_ENDED[self.code],
            stdout=self.stdout,
            traceback=self.traceback,
            result_json=self.result_json,
        )


def _checked(value: Any, kind: type[_T]) -> _T:
    """What the guest answered, if it has the documented shape."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise GuestProtocolError(f"the guest's answer is malformed: {error}") from error


@dataclass(slots=True)
class _Kept:
    """A command's output, up to a limit for each of the two."""

    limit: int
    on_output: Callable[[str, bytes], Awaitable[None]] | None
    buffers: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    truncated: bool = False

    async def add(self, name: str, data: bytes) -> None:
        if self.on_output is not None:
            await self.on_output(name, data)
            return
        buffer = self.buffers[name]
        room = self.limit - len(buffer)
        self.truncated = self.truncated or len(data) > room
        buffer += data[:room]

    def result(self, ended: _Ended) -> ExecResult:
        return ExecResult(
            stdout=self.buffers["stdout"].decode(errors="replace"),
            stderr=self.buffers["stderr"].decode(errors="replace"),
            exit_code=ended.exit_code,
            reason=ended.reason,
            signal=ended.signal,
            timed_out=ended.reason == "timed_out",
            truncated=self.truncated,
        )


async def _collect(stream: GuestStream, kept: _Kept, timeout: float | None) -> Exception | None:
    """Take all output; returns what went wrong, if anything did: raised in a nursery it would become a group.

    The guest keeps the time limit; this one is for a guest that does not answer at all. A slow taker of the output
    does not run into it, as each wait has the grace time for itself.
    """
    deadline = trio.current_time() + (math.inf if timeout is None else timeout)
    try:
        while True:
            piece = None
            with trio.move_on_after(max(0.0, deadline - trio.current_time()) + GRACE):
                piece = await anext(stream)
            if piece is None:
                return GuestTimeout(f"the guest did not end the command within {timeout:g} s")
            await kept.add(*piece)
    except StopAsyncIteration:
        return None
    except Exception as error:
        return error


async def _send_input(stream: GuestStream, data: bytes) -> None:
    try:
        await stream.send_data(data)
        await stream.end_input()
    except GuestError:
        return  # the link ended: who takes the output hears why
