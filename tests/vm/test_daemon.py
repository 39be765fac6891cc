"""The daemon: found by commands, its sandboxes outlive both, and the next daemon takes them over."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
def client(daemon: Any) -> Iterator[httpx.Client]:
    """Plain HTTP to the daemon."""
    with httpx.Client(base_url=daemon.url, timeout=120) as made:
        yield made


def spawn(client: httpx.Client, n: int = 1, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/sandboxes", json={"snapshot_tag": PARENT, "n": n, **fields})
    assert answer.status_code == 201, answer.text
    rows: list[dict[str, Any]] = answer.json()
    return rows


def evaluate(client: httpx.Client, sandbox_id: str, code: str) -> Any:
    answer = client.post(f"/v1/sandboxes/{sandbox_id}/eval", json={"code": code}).json()
    assert answer["error"] is None, answer
    return answer["result"]


def test_a_killed_daemon_loses_no_sandbox(daemon: Any, client: httpx.Client, machines: Callable[[], list[int]]) -> None:
    first, second = spawn(client, 2)
    evaluate(client, first["id"], "kept = 41")
    boot_id = evaluate(client, first["id"], "open('/etc/machine-id').read()")
    daemon.kill()
    daemon.start()
    with httpx.Client(base_url=daemon.url, timeout=120) as again:
        rows = {row["id"]: row for row in again.get("/v1/sandboxes").json()}
        assert rows[first["id"]] == {**first, "guest_addr": rows[first["id"]]["guest_addr"]}
        assert second["id"] in rows
        assert evaluate(again, first["id"], "kept + 1") == "42"
        assert evaluate(again, first["id"], "open('/etc/machine-id').read()") == boot_id
        assert again.delete(f"/v1/sandboxes/{first['id']}").status_code == 204
    assert machines() == [second["pid"]]


def test_a_sandbox_whose_machine_died_meanwhile_is_reported_dead(daemon: Any, client: httpx.Client) -> None:
    (child,) = spawn(client)
    daemon.kill()
    os.kill(child["pid"], signal.SIGKILL)
    daemon.start()
    with httpx.Client(base_url=daemon.url, timeout=120) as again:
        assert again.get("/v1/sandboxes").json() == []
        gone = again.get(f"/v1/sandboxes/{child['id']}")
    assert gone.status_code == 404
    assert "has ended" in gone.json()["error"]


def test_a_source_left_paused_runs_again(daemon: Any, client: httpx.Client, data_dir: Path) -> None:
    (child,) = spawn(client)
    daemon.kill()
    qmp(data_dir / "run" / "daemon" / child["id"] / "qmp.sock", "stop")
    daemon.start()
    with httpx.Client(base_url=daemon.url, timeout=120) as again:
        assert evaluate(again, child["id"], "1 + 1") == "2"


def qmp(path: Path, command: str) -> None:
    """One command on QEMU's control socket, as a daemon that died in the middle of a capture would have sent it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        stream = sock.makefile("rw")
        for name in ("qmp_capabilities", command):
            stream.write(json.dumps({"execute": name}) + "\n")
            stream.flush()
            while "return" not in stream.readline():
                pass


def test_half_made_machines_of_a_killed_daemon_are_ended(
    daemon: Any, data_dir: Path, machines: Callable[[], list[int]]
) -> None:
    slot = data_dir / "run" / "daemon" / "sb-0-half"
    slot.mkdir()
    import subprocess

    with subprocess.Popen(["sleep", "600"], cwd=slot) as half:
        daemon.kill()
        daemon.start()
        assert half.wait(30) == -signal.SIGKILL
    assert not slot.exists()
    assert machines() == []
    assert "ended half-made sandbox sb-0-half" in daemon.said()


def test_every_branch_mode_works_on_an_adopted_sandbox(daemon: Any, client: httpx.Client, data_dir: Path) -> None:
    plain, live = spawn(client) + spawn(client, live_fork=True)
    daemon.kill()
    daemon.start()
    with httpx.Client(base_url=daemon.url, timeout=120) as again:
        for child in (plain, live):
            evaluate(again, child["id"], "mark = 'm' * 5")
            for mode in ("full", "diff", "live"):
                tag = f"t-adopted-{mode}"
                made = again.post(f"/v1/sandboxes/{child['id']}/branch", json={"tag": tag, "mode": mode})
                assert made.status_code == 201, made.text
                grandchild = again.post("/v1/sandboxes", json={"snapshot_tag": tag}).json()[0]
                assert evaluate(again, grandchild["id"], "mark") == "'mmmmm'"
                assert again.delete(f"/v1/sandboxes/{grandchild['id']}").status_code == 204
                assert again.delete(f"/v1/snapshots/{tag}").status_code == 204


def test_commands_find_the_daemon_by_themselves(daemon: Any, forkd: Callable[..., Any]) -> None:
    with httpx.Client(base_url=daemon.url, timeout=120) as client:
        (child,) = spawn(client)
    assert forkd("eval", "--sandbox", child["id"], "--", "1+1").stdout == "2\n"
    assert forkd("ping", "--sandbox", child["id"], "--daemon-url", daemon.url).returncode == 0
    assert forkd("eval", "--sandbox", child["id"], "--daemon-url", "local", "--", "1").returncode == 1


def test_a_second_daemon_on_the_same_directory_is_refused(daemon: Any, forkd: Callable[..., Any]) -> None:
    done = forkd("daemon", "--bind", "127.0.0.1:0", timeout=60)
    assert done.returncode == 1
    assert "another forkd process" in done.stderr


def test_a_stopped_daemon_ends_its_sandboxes_if_asked_to(
    daemon: Any, client: httpx.Client, machines: Callable[[], list[int]]
) -> None:
    spawn(client)
    assert daemon.stop() == 0
    assert machines() == []
