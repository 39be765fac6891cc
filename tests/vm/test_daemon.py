"""The daemon: found by commands, its sandboxes outlive both, and the next daemon takes them over."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
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


def left_alone(daemon: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody has read yet."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    made = socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])))
    made.sendall(head.encode() + b"\r\n\r\n" + data)
    return made


@pytest.mark.parametrize("verb", ["exec", "eval"])
def test_what_a_client_that_leaves_has_begun_is_ended(daemon: Any, client: httpx.Client, verb: str) -> None:
    (child,) = spawn(client)
    path = f"/v1/sandboxes/{child['id']}"
    script = "echo $$ > /tmp/pid.new; mv /tmp/pid.new /tmp/pid; sleep 1000"
    code = f"import subprocess; subprocess.run(['sh', '-c', {script!r}])"
    body = {"args": ["sh", "-c", script]} if verb == "exec" else {"code": code}
    wait = {"args": ["sh", "-c", "until test -e /tmp/pid; do sleep 0.05; done; kill -0 $(cat /tmp/pid)"]}
    with left_alone(daemon, f"{path}/{verb}", {**body, "timeout_secs": 600}):
        assert client.post(f"{path}/exec", json=wait).json()["exit_code"] == 0
    gone = {"args": ["sh", "-c", "while kill -0 $(cat /tmp/pid); do sleep 0.05; done"]}
    assert client.post(f"{path}/exec", json=gone).json()["exit_code"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sandboxes", {"snapshot_tag": PARENT, "n": 12, "spawn": "restore"}),
        ("/v1/sandboxes", {"snapshot_tag": PARENT, "n": 12, "spawn": "template", "labels": {"a": "b"}}),
        ("/v1/fork", {"source": PARENT, "n": 12}),
    ],
)
def test_children_of_a_client_that_leaves_are_ended(
    daemon: Any, client: httpx.Client, machines: Callable[[], list[int]], path: str, body: dict[str, Any]
) -> None:
    with (
        client.stream("GET", "/v1/events", headers={"accept": "application/x-ndjson"}) as events,
        left_alone(daemon, path, body) as leaving,
    ):
        up: set[str] = set()
        for line in events.iter_lines():
            event = json.loads(line)
            if event["event"] == "spawn":
                up.add(event["id"])
                leaving.close()
            elif event["event"] == "end":
                up.discard(event["id"])
                if not up:
                    break
    deadline = time.monotonic() + 60
    while client.get("/v1/sandboxes").json() or machines():
        assert time.monotonic() < deadline
        time.sleep(0.1)
