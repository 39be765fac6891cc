"""Workspaces never lose state: suspend writes, then swaps; resume restores; a failed suspend harms nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
def client(daemon: Any) -> Iterator[httpx.Client]:
    """Plain HTTP to the daemon; workspaces the test leaves are deleted."""
    with httpx.Client(base_url=daemon.url, timeout=120) as made:
        yield made
    if daemon.process.poll() is None:
        with httpx.Client(base_url=daemon.url, timeout=120) as made:
            for row in made.get("/v1/workspaces").json():
                assert made.delete(f"/v1/workspaces/{row['name']}").status_code == 204


def create(client: httpx.Client, name: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/workspaces", json={"name": name, "snapshot_tag": PARENT, **fields})
    assert answer.status_code == 201, answer.text
    row: dict[str, Any] = answer.json()
    return row


def change(client: httpx.Client, name: str, verb: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/workspaces/{name}/{verb}", json=body)
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = answer.json()
    return row


def evaluate(client: httpx.Client, row: dict[str, Any], code: str) -> Any:
    answer = client.post(f"/v1/sandboxes/{row['live_sandbox_id']}/eval", json={"code": code}).json()
    assert answer["error"] is None, answer
    return answer["result"]


def states(data_dir: Path) -> list[str]:
    return sorted(name for name in os.listdir(data_dir / "snapshots") if name.startswith("ws-"))


@pytest.mark.parametrize("diff", [False, True])
def test_state_comes_back_cycle_after_cycle(client: httpx.Client, data_dir: Path, diff: bool) -> None:
    row = create(client, "w" * 64)
    evaluate(client, row, "values = []")
    for cycle in range(4):
        evaluate(client, row, f"values.append({cycle})")
        suspended = change(client, "w" * 64, "suspend", diff=diff)
        assert (suspended["status"], suspended["live_sandbox_id"]) == ("suspended", None)
        assert client.get("/v1/sandboxes").json() == []
        row = change(client, "w" * 64, "resume")
        assert evaluate(client, row, "values") == str(list(range(cycle + 1)))
    assert len(states(data_dir)) == (4 if diff else 1), "a full state needs no older one"
    assert client.delete(f"/v1/workspaces/{'w' * 64}").status_code == 204
    assert states(data_dir) == []
    assert client.get("/v1/sandboxes").json() == []


def test_every_refusal(client: httpx.Client) -> None:
    def status(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["code"]

    assert status(client.post("/v1/workspaces", json={"name": "a/b", "snapshot_tag": PARENT})) == (400, "bad_tag")
    assert status(client.post("/v1/workspaces", json={"name": "x" * 65, "snapshot_tag": PARENT})) == (400, "bad_tag")
    missing = {"name": "x", "snapshot_tag": "none"}
    assert status(client.post("/v1/workspaces", json=missing)) == (404, "snapshot_not_found")
    assert status(client.get("/v1/workspaces/x")) == (404, "workspace_not_found")
    assert status(client.post("/v1/workspaces/x/resume")) == (404, "workspace_not_found")
    create(client, "x")
    assert status(client.post("/v1/workspaces", json={"name": "x", "snapshot_tag": PARENT})) == (409, "conflict")
    assert status(client.post("/v1/workspaces/x/resume")) == (400, "bad_input")
    tag = change(client, "x", "suspend")["current_state_tag"]
    assert tag == "ws-x-state"
    assert status(client.post("/v1/workspaces/x/suspend", json={})) == (400, "bad_input")
    assert status(client.delete(f"/v1/snapshots/{tag}")) == (409, "snapshot_in_use")


def test_a_failed_suspend_leaves_the_sandbox_running(daemon: Any, client: httpx.Client, data_dir: Path) -> None:
    row = create(client, "full-disk")
    evaluate(client, row, "kept = 'yes'")
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1 << 20, hard))
    refused = client.post("/v1/workspaces/full-disk/suspend", json={})
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert refused.status_code in (500, 507), refused.text
    assert client.get("/v1/workspaces/full-disk").json()["status"] == "running"
    assert evaluate(client, row, "kept") == "'yes'"
    assert states(data_dir) == []
    assert change(client, "full-disk", "suspend")["status"] == "suspended"


def test_limits_come_back_also_after_a_restart(daemon: Any, client: httpx.Client) -> None:
    create(client, "limited", memory_limit_mib=700, best_effort=True)
    change(client, "limited", "suspend")
    daemon.kill()
    daemon.start()
    with httpx.Client(base_url=daemon.url, timeout=120) as again:
        row = change(again, "limited", "resume")
        live = again.get(f"/v1/sandboxes/{row['live_sandbox_id']}").json()
        assert live["memory_limit_mib"] == 700
        assert again.delete("/v1/workspaces/limited").status_code == 204


def test_a_workspace_whose_sandbox_was_ended_is_stale_and_can_be_resumed(client: httpx.Client) -> None:
    row = create(client, "stale")
    evaluate(client, row, "kept = 'yes'")
    change(client, "stale", "suspend")
    row = change(client, "stale", "resume")
    assert client.delete(f"/v1/sandboxes/{row['live_sandbox_id']}").status_code == 204
    stale = client.get("/v1/workspaces/stale").json()
    assert (stale["status"], stale["live_sandbox_id"]) == ("stale", None)
    assert evaluate(client, change(client, "stale", "resume"), "kept") == "'yes'"


def test_without_a_daemon_workspaces_are_refused_with_a_hint(forkd: Callable[..., Any]) -> None:
    done = forkd("workspace", "list")
    assert done.returncode == 1
    assert "forkd daemon" in done.stderr


def test_a_source_that_is_called_as_a_state_is_stays(client: httpx.Client, data_dir: Path) -> None:
    """As when a workspace's state was moved here from another host, to go on under the same name."""
    evaluate(client, create(client, "first"), "1")
    sandbox = client.get("/v1/workspaces/first").json()["live_sandbox_id"]
    assert client.post(f"/v1/sandboxes/{sandbox}/branch", json={"tag": "ws-moved-state"}).status_code == 201
    try:
        create(client, "moved", snapshot_tag="ws-moved-state")
        change(client, "moved", "suspend")
        assert "ws-moved-state" in states(data_dir)
        assert client.delete("/v1/workspaces/moved").status_code == 204
        assert states(data_dir) == ["ws-moved-state"]
    finally:
        client.delete("/v1/snapshots/ws-moved-state?force=true")
