"""Every branch mode of ours keeps the contract."""

from __future__ import annotations

import pytest

from forkd.plugins.branch_diff import DiffMode
from forkd.plugins.branch_full import FullMode
from forkd.plugins.branch_live import LiveMode
from forkd.testing.branch import BranchModeContract


class TestFull(BranchModeContract):
    @pytest.fixture
    def mode(self) -> FullMode:
        return FullMode()


class TestDiff(BranchModeContract):
    @pytest.fixture
    def mode(self) -> DiffMode:
        return DiffMode()


class TestLive(BranchModeContract):
    @pytest.fixture
    def mode(self) -> LiveMode:
        return LiveMode()
