"""The binary as a service: stopped, killed and started again by the rules of its systemd unit, its machines survive."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkd.sdk.controller import Controller
from tests.conftest import ROOT, Daemon, result_of, run_forkd

BINARY = ROOT / "dist" / "forkd"
PARENT = "python-numpy"
pytestmark = [pytest.mark.vm, pytest.mark.skipif(not BINARY.exists(), reason="no dist/forkd here: make binary")]


def unit(setting: str) -> str:
    found = re.search(rf"^{setting}=(.*)$", (ROOT / "packaging/forkd.service").read_text(), re.MULTILINE)
    assert found is not None, setting
    return found[1]


@pytest.fixture
def service(data_dir: Path, tmp_path: Path) -> Iterator[Daemon]:
    """What ExecStart starts, with a scratch directory of its own."""
    assert unit("ExecStart") == "/usr/local/bin/forkd daemon"
    (tmp_path / "scratch").mkdir()
    env = {"TMPDIR": str(tmp_path / "scratch")}
    made = Daemon(data_dir, tmp_path / "log", env=env, forkd=[str(BINARY)])
    yield made
    with Controller(made.url) as controller:
        for row in controller.list_sandboxes():
            controller.kill_sandbox(row["id"])
    made.stop()
    run_forkd(data_dir, "cleanup", "--yes")


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL], ids=["stop", "crash"])
def test_machines_survive_and_are_adopted(
    service: Daemon, way: signal.Signals, machines: Callable[[], list[int]], tmp_path: Path
) -> None:
    with Controller(service.url) as controller:
        (sandbox,) = controller.spawn_sandboxes(PARENT, 1)
        controller.eval_code(sandbox["id"], "kept = 41")
    # KillMode=process: the signal goes to the main process alone, which is the launcher; nothing else is killed.
    assert unit("KillMode") == "process"
    service.process.send_signal(way)
    status = service.process.wait(int(unit("TimeoutStopSec")))
    assert status == (0 if way == signal.SIGTERM else -signal.SIGKILL)
    assert sandbox["pid"] in machines()
    service.start()
    assert len(list((tmp_path / "scratch").glob("_MEI*"))) == 1, "the new daemon's own, nothing of the old one"
    with Controller(service.url) as controller:
        assert [row["id"] for row in controller.list_sandboxes()] == [sandbox["id"]]
        assert result_of(controller.eval_code(sandbox["id"], "kept + 1")) == 42
