"""``sandbox.commands`` in E2B's shape: to the end with callbacks, or in the background with a handle."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Literal, overload

from forkd.sdk.controller import Controller
from forkd.sdk.errors import CommandResult, ControllerError

OnText = Callable[[str], Any]


class CommandExitException(RuntimeError):
    """A command ended with something else than 0."""

    def __init__(self, result: CommandResult) -> None:
        self.stdout, self.stderr = result.stdout, result.stderr
        self.exit_code, self.error = result.exit_code, result.error
        super().__init__(f"the command ended with {result.exit_code}: {(result.error or result.stderr).strip()}")


class TimeoutException(RuntimeError):
    """A command took longer than it was given, and was killed."""


class CommandHandle:
    """A command that runs: ``wait`` for it, ``kill`` it, ``send_stdin``."""

    def __init__(self, controller: Controller, sandbox_id: str, pid: int) -> None:
        self.pid = pid
        self._controller = controller
        self._sandbox_id = sandbox_id

    def wait(self, *, on_stdout: OnText | None = None, on_stderr: OnText | None = None) -> CommandResult:
        """Its output from the beginning (at least the last of it, if there was much; ``error`` says so) and its end.

        Raises CommandExitException if that is not 0, TimeoutException if it ran out of time.
        """
        texts = {"stdout": _Text(on_stdout), "stderr": _Text(on_stderr)}
        done = self._controller.follow_process(
            self._sandbox_id, self.pid, lambda kind, data: texts[kind if kind in texts else "stdout"].feed(data)
        )
        stdout, stderr = (texts[name].end() for name in ("stdout", "stderr"))
        if done["reason"] == "timed_out":
            raise TimeoutException(f"process {self.pid} was killed: it took longer than it was given")
        error = done["error"] or (f"the first {done['lost']} bytes of output are lost" if done["lost"] else None)
        result = CommandResult(stdout, stderr, done["exit_code"], error)
        if done["exit_code"] != 0:
            raise CommandExitException(result)
        return result

    def send_stdin(self, data: str | bytes, eof: bool = False) -> None:
        """Send input to a command started with ``stdin=True``; with ``eof`` that was all."""
        sent = data.encode() if isinstance(data, str) else data
        self._controller.send_stdin(self._sandbox_id, self.pid, sent, eof)

    def kill(self) -> bool:
        """SIGKILL to its whole group; False if it had ended."""
        try:
            running = bool(self._controller.get_process(self._sandbox_id, self.pid)["running"])
            if running:
                self._controller.kill_process(self._sandbox_id, self.pid)
        except ControllerError as error:
            if error.status != 404:
                raise
            return False
        return running


class Commands:
    """``sandbox.commands``."""

    def __init__(self, controller: Controller, sandbox_id: str) -> None:
        self._controller = controller
        self._sandbox_id = sandbox_id

    @overload
    def run(self, cmd: str, background: Literal[False] | None = None, *more: Any, **options: Any) -> CommandResult: ...
    @overload
    def run(self, cmd: str, background: Literal[True], *more: Any, **options: Any) -> CommandHandle: ...
    def run(
        self,
        cmd: str,
        background: bool | None = None,
        envs: dict[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        stdin: bool | None = None,
        timeout: float | None = 60,
    ) -> CommandResult | CommandHandle:
        """Run a line of shell to its end, or in the background; ``timeout`` in seconds, 0 or None for none.

        Raises CommandExitException and TimeoutException, as ``CommandHandle.wait`` does.
        """
        started = self._controller.start_process(
            self._sandbox_id,
            shell=cmd,
            env=envs or {},
            user=user,
            cwd=cwd,
            stdin=bool(stdin),
            attach=not background,
            timeout_secs=timeout or None,
        )
        handle = self.connect(started["pid"])
        return handle if background else handle.wait(on_stdout=on_stdout, on_stderr=on_stderr)

    def connect(self, pid: int) -> CommandHandle:
        """A handle on a command that was started before."""
        return CommandHandle(self._controller, self._sandbox_id, pid)

    def list(self) -> list[dict[str, Any]]:
        """Commands that run."""
        return [row for row in self._controller.list_processes(self._sandbox_id) if row["running"]]

    def kill(self, pid: int) -> bool:
        """As ``CommandHandle.kill``."""
        return self.connect(pid).kill()

    def send_stdin(self, pid: int, data: str | bytes) -> None:
        """As ``CommandHandle.send_stdin``."""
        self.connect(pid).send_stdin(data)


class _Text:
    """Bytes as text, whole characters at a time."""

    def __init__(self, on_text: OnText | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._on_text = on_text

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        if text:
            self._pieces.append(text)
            if self._on_text is not None:
                self._on_text(text)

    def end(self) -> str:
        self.feed(b"", final=True)
        return "".join(self._pieces)
