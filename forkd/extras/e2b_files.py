"""``sandbox.files`` in E2B's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

from forkd.sdk.controller import Controller
from forkd.sdk.errors import ControllerError


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is at a path; ``type`` is ``file``, ``dir``, or the API's word for anything else."""

    name: str
    path: str
    type: str
    size: int
    mode: int
    modified_time: float


class Files:
    """``sandbox.files``."""

    def __init__(self, controller: Controller, sandbox_id: str) -> None:
        self._controller = controller
        self._sandbox_id = sandbox_id

    @overload
    def read(self, path: str, format: Literal["text"] = "text") -> str: ...
    @overload
    def read(self, path: str, format: Literal["bytes"]) -> bytes: ...
    def read(self, path: str, format: str = "text") -> str | bytes:
        """A whole file."""
        data = self._controller.read_file(self._sandbox_id, path)
        return data if format == "bytes" else data.decode()

    def write(self, path: str, data: str | bytes) -> EntryInfo:
        """Write a whole file, making the directories it is in."""
        sent = data.encode() if isinstance(data, str) else data
        self._controller.write_file(self._sandbox_id, path, sent, make_parents=True)
        return self.get_info(path)

    def list(self, path: str, depth: int = 1) -> list[EntryInfo]:
        """The entries of a directory."""
        return [_entry(row) for row in self._controller.list_files(self._sandbox_id, path, depth)]

    def get_info(self, path: str) -> EntryInfo:
        """What is at a path. Raises ControllerError with status 404 if nothing is."""
        return _entry(self._controller.stat_file(self._sandbox_id, path))

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        try:
            self.get_info(path)
        except ControllerError as error:
            if error.code != "guest_file_not_found":
                raise
            return False
        return True

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it."""
        self._controller.remove_file(self._sandbox_id, path, recursive=True)

    def rename(self, old_path: str, new_path: str) -> EntryInfo:
        """Give it another name."""
        self._controller.move_file(self._sandbox_id, old_path, new_path)
        return self.get_info(new_path)

    def make_dir(self, path: str) -> bool:
        """Make a directory and those above it; False if it was there."""
        if self.exists(path):
            return False
        self._controller.make_directory(self._sandbox_id, path, parents=True)
        return True


def _entry(row: dict[str, Any]) -> EntryInfo:
    return EntryInfo(row["name"], row["path"], row["type"], row["size"], row["mode"], row["mtime"])
