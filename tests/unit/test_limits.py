"""Limits of a machine that runs already: what is noted as its limit holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.limits import FIELDS, Limiter
from forkd.linux import cgroup
from forkd.specs.errors import LimitRefused
from forkd.specs.models import SandboxInfo

INFO = SandboxInfo(id="sb-1", snapshot_tag="t", created_at_unix=1, cpu_limit=0.5, io_limit_mibps=5)


@pytest.fixture
def limiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limiter:
    """Control groups in a directory, on a host whose data directory has no block device."""

    def none() -> list[str]:
        raise cgroup.CgroupError("no block device")

    (tmp_path / "cgroup.procs").write_text("")
    home = cgroup.Hierarchy(2, tmp_path, frozenset(cgroup.CONTROLLERS), "/")
    made = Limiter(tmp_path / "run")
    monkeypatch.setattr(made, "table", lambda: dict.fromkeys(cgroup.CONTROLLERS, home))
    monkeypatch.setattr(made, "_disks", none)
    return made


def test_where_one_limit_is_refused_the_machine_is_under_the_others(limiter: Limiter, tmp_path: Path) -> None:
    with pytest.raises(LimitRefused) as refused:
        limiter.apply(INFO, 4711)
    assert refused.value.refused == ["io_limit_mibps"]
    assert (tmp_path / "forkd/sb-1/cpu.max").exists()
    assert (tmp_path / "forkd/sb-1/cgroup.procs").read_text() == "4711"


def test_a_machine_that_cannot_be_admitted_has_none_of_its_limits(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: cgroup.Group, pid: int) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(cgroup.Group, "admit", gone)
    with pytest.raises(LimitRefused, match="cannot be put under its limits") as refused:
        limiter.apply(INFO, 4711)
    assert refused.value.refused == list(FIELDS.values())
