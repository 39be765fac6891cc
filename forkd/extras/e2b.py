"""A ``Sandbox`` in the shape of E2B's Python SDK, on a forkd daemon: code written for that one runs on this one."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from forkd.extras.e2b_commands import CommandExitException, CommandHandle, Commands, TimeoutException
from forkd.extras.e2b_files import EntryInfo, Files
from forkd.sdk.controller import Controller
from forkd.sdk.errors import CommandResult, ControllerError
from forkd.sdk.sandbox import Sandbox as ForkdSandbox

__all__ = [
    "CommandExitException",
    "CommandHandle",
    "CommandResult",
    "EntryInfo",
    "Sandbox",
    "TimeoutException",
]


class Sandbox:
    """A running sandbox. Made by ``create`` or ``connect``; as a context manager it is killed at the end."""

    default_timeout = 300

    def __init__(self, info: dict[str, Any], controller: Controller, owns_controller: bool = False) -> None:
        self.sandbox_id = str(info["id"])
        self.controller = controller
        self.commands = Commands(controller, self.sandbox_id)
        self.files = Files(controller, self.sandbox_id)
        self._owns_controller = owns_controller

    @classmethod
    def create(
        cls,
        template: str | None = None,
        timeout: float | None = None,
        metadata: dict[str, str] | None = None,
        envs: dict[str, str] | None = None,
        *,
        controller: Controller | None = None,
        **fields: Any,
    ) -> Self:
        """A fresh child of the snapshot ``template``, which ends after ``timeout`` seconds (0: never).

        Further ``fields`` are those of ``Controller.spawn_sandboxes``.
        """
        asked = {"timeout_secs": cls.default_timeout if timeout is None else timeout, **fields}
        asked |= {name: value for name, value in (("metadata", metadata), ("env", envs)) if value}
        used = controller or Controller()
        try:
            rows = used.spawn_sandboxes(template or ForkdSandbox.DEFAULT_TAG, 1, **asked)
        except BaseException:
            if controller is None:
                used.close()
            raise
        return cls(rows[0], used, controller is None)

    @classmethod
    def connect(cls, sandbox_id: str, timeout: float | None = None, *, controller: Controller | None = None) -> Self:
        """A sandbox that runs, resumed if it was paused; with ``timeout`` it ends that many seconds from now."""
        used = controller or Controller()
        try:
            info = used.get_sandbox(sandbox_id)
            if info["status"] == "paused":
                info = used.resume_sandbox(sandbox_id)
            made = cls(info, used, controller is None)
            if timeout is not None:
                made.set_timeout(timeout)
        except BaseException:
            if controller is None:
                used.close()
            raise
        return made

    def fork(
        self, n: int = 1, *, count: int | None = None, timeout: float | None = None, **fields: Any
    ) -> Sequence[Self]:
        """``n`` (E2B's ``count``) children with its memory and files as they are now, all of them or none.

        With ``timeout`` they end after that many seconds. Further ``fields`` are those of ``Controller.fork``.
        """
        if timeout is not None:
            fields["all_children"] = {**fields.get("all_children", {}), "timeout_secs": timeout}
        n = n if count is None else count
        rows = self.controller.fork(self.sandbox_id, n, **fields)
        return [type(self)(row, self.controller) for row in rows]

    @staticmethod
    def list(metadata: dict[str, str] | None = None, *, controller: Controller | None = None) -> list[dict[str, Any]]:
        """Running sandboxes, or those whose metadata has every given pair."""
        wanted = (metadata or {}).items()
        used = controller or Controller()
        try:
            return [row for row in used.list_sandboxes() if wanted <= row["metadata"].items()]
        finally:
            if controller is None:
                used.close()

    def set_timeout(self, timeout: float) -> None:
        """End it ``timeout`` seconds from now; 0 means never."""
        self.controller.update_sandbox(self.sandbox_id, timeout_secs=timeout)

    def get_info(self) -> dict[str, Any]:
        """What the daemon knows of it."""
        return self.controller.get_sandbox(self.sandbox_id)

    def is_running(self) -> bool:
        """Whether it is still there."""
        try:
            return bool(self.get_info()["status"] == "running")
        except ControllerError as error:
            if error.status != 404:
                raise
            return False

    def kill(self) -> bool:
        """End it; False if it had ended."""
        try:
            self.controller.kill_sandbox(self.sandbox_id)
        except ControllerError as error:
            if error.status != 404:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the connection, if it is its own; the sandbox goes on."""
        if self._owns_controller:
            self.controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill()
        finally:
            self.close()
