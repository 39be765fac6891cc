"""The error of the SDK: what the app refused, or why it could not be reached."""

from __future__ import annotations

from typing import Any


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
