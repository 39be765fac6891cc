"""Every memory backend of ours keeps the contract."""

from __future__ import annotations

import pytest

from forkd.plugins.memory_file import FileBackend
from forkd.plugins.memory_memfd import MemfdBackend
from forkd.testing.memory import MemoryBackendContract


class TestFile(MemoryBackendContract):
    @pytest.fixture
    def backend(self) -> FileBackend:
        return FileBackend()


class TestMemfd(MemoryBackendContract):
    @pytest.fixture
    def backend(self) -> MemfdBackend:
        return MemfdBackend()
