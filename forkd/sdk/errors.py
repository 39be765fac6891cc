"""Values both SDKs share: the error, with what the app refused or why it could not be reached; a command's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

BranchMode = Literal["full", "diff", "live"]


class ControllerError(RuntimeError):
    """A request failed: ``status`` is the HTTP status, ``body`` the JSON answer, ``code`` and ``hint`` from it."""

    def __init__(self, status: int, body: Any, url: str) -> None:
        self.status = status
        self.body = body
        self.url = url
        self.code = body.get("code") if isinstance(body, dict) else None
        self.hint = body.get("hint") if isinstance(body, dict) else None
        message = body.get("error") if isinstance(body, dict) else str(body)
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended: its output, its exit code, and ``error`` if it never ran or took too long."""

    stdout: str
    stderr: str
    exit_code: int
    error: str | None = None
