"""Sixty seconds of eight clients doing everything at once: no unexpected error, and the daemon grows no fatter."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.vm, pytest.mark.slow]
PARENT = "python-numpy"
CLIENTS = 8
SECONDS = 60.0
KEPT = 2


class Client(threading.Thread):
    """Keeps a few sandboxes of its own and mixes eval, exec, spawn, branch and kill."""

    def __init__(self, url: str, number: int, until: float) -> None:
        super().__init__()
        self._http = httpx.Client(base_url=url, timeout=120)
        self._chance = random.Random(number)
        self._number = number
        self._until = until
        self._mine: list[str] = []
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self) -> None:
        with self._http:
            while time.monotonic() < self._until:
                verb = self._chance.choices(("eval", "exec", "spawn", "branch", "kill"), (60, 20, 8, 4, 8))[0]
                if not self._mine:
                    verb = "spawn"
                elif verb == "spawn" and len(self._mine) >= KEPT:
                    verb = "kill"
                getattr(self, f"_{verb}")()
                self.done[verb] += 1
            for sandbox_id in self._mine:
                self._call("DELETE", f"/v1/sandboxes/{sandbox_id}", None, 204)

    def _call(self, method: str, path: str, body: Any, expected: int) -> Any:
        answer = self._http.request(method, path, json=body)
        # The cap on branches at once is the one refusal a client has to expect.
        if answer.status_code != expected and not (answer.status_code == 503 and path.endswith("/branch")):
            self.errors.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer

    def _pick(self) -> str:
        return f"/v1/sandboxes/{self._chance.choice(self._mine)}"

    def _eval(self) -> None:
        answer = self._call("POST", f"{self._pick()}/eval", {"code": "6 * 7"}, 200)
        if answer.status_code == 200 and answer.json()["result"] != "42":
            self.errors.append(answer.text)

    def _exec(self) -> None:
        answer = self._call("POST", f"{self._pick()}/exec", {"args": ["echo", "hi"]}, 200)
        if answer.status_code == 200 and answer.json()["stdout"] != "hi\n":
            self.errors.append(answer.text)

    def _spawn(self) -> None:
        answer = self._call("POST", "/v1/sandboxes", {"snapshot_tag": PARENT}, 201)
        if answer.status_code == 201:
            self._mine += [row["id"] for row in answer.json()]

    def _branch(self) -> None:
        tag = f"t-load-{self._number}-{self._chance.getrandbits(40):x}"
        mode = self._chance.choice(("diff", "live"))
        if self._call("POST", f"{self._pick()}/branch", {"tag": tag, "mode": mode}, 201).status_code == 201:
            self._call("DELETE", f"/v1/snapshots/{tag}", None, 204)

    def _kill(self) -> None:
        self._call("DELETE", f"/v1/sandboxes/{self._mine.pop(0)}", None, 204)


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_the_daemon_stays_correct_and_flat_under_load(daemon: Any, data_dir: Path) -> None:
    pid = daemon.process.pid
    idle = len(os.listdir(f"/proc/{pid}/fd"))
    began = time.monotonic()
    clients = [Client(daemon.url, number, began + SECONDS) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    sizes: list[tuple[float, int, int]] = []
    while (at := time.monotonic() - began) < SECONDS:
        sizes.append((at, resident(pid), len(os.listdir(f"/proc/{pid}/fd"))))
        time.sleep(1.0)  # a sampling interval, nothing waits on it
    for client in clients:
        client.join()
    errors = [error for client in clients for error in client.errors]
    done = sum((client.done for client in clients), Counter[str]())
    third, last = ([row for row in sizes if low <= row[0] < low + 15] for low in (30, 45))
    rss = [statistics.mean(row[1] for row in part) for part in (third, last)]
    fds = [statistics.mean(row[2] for row in part) for part in (third, last)]
    after = len(os.listdir(f"/proc/{pid}/fd"))
    print(f"\n{dict(done)}; errors {len(errors)}; RSS MiB {[round(value / 2**20, 1) for value in rss]}; fds {fds}")
    print(f"descriptors idle before {idle}, after {after}")
    assert errors == []
    assert rss[1] <= rss[0] * 1.05
    assert after <= idle + CLIENTS + 4, "descriptors leak"
