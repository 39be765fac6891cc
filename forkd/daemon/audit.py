"""The audit log: one JSON line a request, appended and never rewritten."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from forkd.specs.errors import HostNotReady

log = logging.getLogger("forkd")


class AuditLog:
    """A file opened to append; each line is one write, so lines never mix."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises HostNotReady."""
        self._path = path
        self._descriptor = self._open()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record with the time. A full disk is logged, not the client's problem."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            os.write(self._descriptor, msgspec.json.encode({"ts": now, **record}) + b"\n")
        except OSError as error:
            log.error("audit log %s: %s", self._path, error)

    def reopen(self) -> None:
        """Open the path again: whoever rotates logs has moved the old file away."""
        before, self._descriptor = self._descriptor, self._open()
        os.close(before)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _open(self) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostNotReady(f"audit log {self._path} cannot be opened: {error.strerror}") from error
