"""SIGKILL of the daemon in the middle of spawn, exec, branch, suspend: what it acknowledged is there, or truly dead."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
WORKSPACE = "killed"


@dataclass
class Acknowledged:
    """What the daemon has answered so far."""

    sandboxes: dict[str, dict[str, Any]] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    workspace: str | None = None
    in_doubt: set[str] = field(default_factory=set)


class Worker(threading.Thread):
    """Asks for things in random order, one after another, until the daemon is gone."""

    def __init__(self, url: str, seed: str, told: Acknowledged) -> None:
        super().__init__()
        self._client = httpx.Client(base_url=url, timeout=60)
        self._chance = random.Random(seed)
        self._seed = seed
        self._told = told
        self.errors: list[str] = []

    def run(self) -> None:
        verbs = (self.spawn, self.spawn, self.exec, self.branch, self.branch, self.workspace, self.kill)
        try:
            with self._client:
                while True:
                    self._chance.choice(verbs)()
        except httpx.TransportError:
            return  # killed, as intended

    def call(self, method: str, path: str, body: Any = None, expected: tuple[int, ...] = (200, 201, 204)) -> Any:
        answer = self._client.request(method, path, json=body)
        if answer.status_code not in expected:
            self.errors.append(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else None

    def spawn(self) -> None:
        if len(self._told.sandboxes) < 6:
            for row in self.call("POST", "/v1/sandboxes", {"snapshot_tag": PARENT, "n": self._chance.randint(1, 2)}):
                self._told.sandboxes[row["id"]] = row

    def exec(self) -> None:
        if self._told.sandboxes:
            chosen = self._chance.choice(list(self._told.sandboxes))
            self.call("POST", f"/v1/sandboxes/{chosen}/exec", {"args": ["sh", "-c", "echo hi; sleep 0.1"]})

    def branch(self) -> None:
        if self._told.sandboxes:
            chosen = self._chance.choice(list(self._told.sandboxes))
            tag = f"t-killed-{self._seed}-{self._chance.getrandbits(30):x}"
            body = {"tag": tag, "mode": self._chance.choice(("full", "diff", "live"))}
            self.call("POST", f"/v1/sandboxes/{chosen}/branch", body)
            self._told.snapshots.append(tag)

    def kill(self) -> None:
        if len(self._told.sandboxes) > 2:
            chosen, _ = self._told.sandboxes.popitem()
            self._told.in_doubt.add(chosen)
            self.call("DELETE", f"/v1/sandboxes/{chosen}")

    def workspace(self) -> None:
        if self._told.workspace is None:
            self.call("POST", "/v1/workspaces", {"name": WORKSPACE, "snapshot_tag": PARENT})
            self._told.workspace = "running"
        elif self._told.workspace == "running":
            self._told.workspace = "changing"
            self.call("POST", f"/v1/workspaces/{WORKSPACE}/suspend", {"diff": self._chance.random() < 0.5})
            self._told.workspace = "suspended"
        elif self._told.workspace == "suspended":
            self._told.workspace = "changing"
            self.call("POST", f"/v1/workspaces/{WORKSPACE}/resume")
            self._told.workspace = "running"


def check(client: httpx.Client, told: Acknowledged, data_dir: Path, machines: Callable[[], list[int]]) -> int:
    """Everything acknowledged is there, or dead and said to be; nothing else is left. How many had died."""
    rows = {row["id"]: row for row in client.get("/v1/sandboxes").json()}
    dead = 0
    for sandbox_id, row in told.sandboxes.items():
        if sandbox_id not in rows:
            gone = client.get(f"/v1/sandboxes/{sandbox_id}")
            assert gone.status_code == 404 and "has ended" in gone.json()["error"], gone.text
            assert row["pid"] not in machines(), "said to be dead, but it runs"
            dead += 1
    for sandbox_id in rows:  # nothing is paused: everybody answers
        answer = client.post(f"/v1/sandboxes/{sandbox_id}/eval", json={"code": "1+1"})
        assert answer.status_code == 200 and answer.json()["result"] == "2", answer.text
    assert sorted(machines()) == sorted(row["pid"] for row in rows.values()), "a machine nobody knows"
    snapshots = {row["tag"]: row for row in client.get("/v1/snapshots").json()}
    assert set(told.snapshots) <= set(snapshots), "an acknowledged snapshot is gone"
    assert all(row["bootable"] for row in snapshots.values()), snapshots
    hidden = [name for name in os.listdir(data_dir / "snapshots") if name.startswith(".") and name != ".lock"]
    assert hidden == [], "a half snapshot is left"
    spaces = {row["name"]: row for row in client.get("/v1/workspaces").json()}
    if told.workspace is not None:
        status = spaces[WORKSPACE]["status"]
        assert status in ("running", "suspended") if told.workspace == "changing" else status == told.workspace, spaces
        if status == "suspended":
            assert client.post(f"/v1/workspaces/{WORKSPACE}/resume").status_code == 200
    return dead


def trial(daemon: Any, data_dir: Path, machines: Callable[[], list[int]], seed: int) -> int:
    chance, told = random.Random(seed), Acknowledged()
    workers = [Worker(daemon.url, f"{seed}-{number}", told if number == 0 else Acknowledged()) for number in range(2)]
    workers[1].workspace = lambda: None  # type: ignore[method-assign]
    for worker in workers:
        worker.start()
    workers[0].join(chance.uniform(0.3, 6.0))
    daemon.kill()
    for worker in workers:
        worker.join(60)
        assert worker.errors == []
    daemon.start()
    with httpx.Client(base_url=daemon.url, timeout=120) as client:
        told.sandboxes.update(workers[1]._told.sandboxes)
        told.snapshots += workers[1]._told.snapshots
        dead = check(client, told, data_dir, machines)
        for row in client.get("/v1/workspaces").json():
            assert client.delete(f"/v1/workspaces/{row['name']}").status_code == 204
        for row in client.get("/v1/sandboxes").json():
            assert client.delete(f"/v1/sandboxes/{row['id']}").status_code == 204
        for row in client.get("/v1/snapshots").json():
            if row["tag"].startswith("t-killed-"):
                assert client.delete(f"/v1/snapshots/{row['tag']}").status_code == 204
    assert machines() == []
    assert os.listdir(data_dir / "run" / "daemon") == ["lock"]
    return dead


def test_a_killed_daemon_keeps_its_word(daemon: Any, data_dir: Path, machines: Callable[[], list[int]]) -> None:
    for seed in range(4):
        trial(daemon, data_dir, machines, seed)


@pytest.mark.slow
def test_thirty_times(daemon: Any, data_dir: Path, machines: Callable[[], list[int]]) -> None:
    dead = [trial(daemon, data_dir, machines, seed) for seed in range(100, 130)]
    print(f"\n30 trials, sandboxes that died with the daemon: {sum(dead)}")
