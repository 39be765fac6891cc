"""Verbs against a daemon: spawn, ls, exec by id, snapshot of a sandbox, bench, kill; JSON from each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
Forkd = Callable[..., Any]


def ok(done: Any) -> str:
    assert done.returncode == 0, done.stderr + done.stdout
    return str(done.stdout)


def test_a_day_with_the_daemon(daemon: Any, forkd: Forkd) -> None:
    assert "no live sandboxes" in forkd("ls").stderr
    lines = ok(forkd("spawn", "--tag", PARENT, "-n", "2")).splitlines()
    ids = [re.fullmatch(r"✓ (sb-\S+) guest=127\.0\.0\.1:\d+ netns=\S+", line)[1] for line in lines]  # type: ignore[index]
    assert {row["id"] for row in json.loads(ok(forkd("ls", "--json")))} == set(ids)
    assert all(sandbox_id in ok(forkd("ls")) for sandbox_id in ids)
    assert (
        ok(forkd("exec", "--sandbox", ids[0], "--", "sh", "-c", "echo kept > /root/mark; cat /root/mark")) == "kept\n"
    )
    assert json.loads(ok(forkd("ping", "--sandbox", ids[0])))["pong"] is True

    made = json.loads(ok(forkd("snapshot", "--from-sandbox", ids[0], "--tag", "t-day", "--live", "--json")))
    assert (made["tag"], made["status"]) == ("t-day", "ready")
    child = json.loads(ok(forkd("spawn", "--tag", "t-day", "--json")))[0]["id"]
    assert ok(forkd("exec", "--sandbox", child, "--", "cat", "/root/mark")) == "kept\n"
    assert "pause_ms:" in ok(forkd("snapshot", "--from-sandbox", ids[0], "--tag", "t-day-diff", "--diff"))

    # a fork through the daemon ends its own children and nobody else's
    report = json.loads(ok(forkd("fork", "--tag", PARENT, "-n", "2", "--settle-secs", "0", "--eval", "1+1", "--json")))
    assert [row["answer"]["result"] for row in report["children"]] == ["2", "2"]
    assert {row["id"] for row in json.loads(ok(forkd("ls", "--json")))} == {*ids, child}

    assert ok(forkd("kill", "--tag", "t-day")) == f"✓ {child}\n"
    missing = forkd("kill", ids[0], "sb-none")
    assert missing.returncode == 1
    assert missing.stdout == f"✓ {ids[0]}\n"
    assert "✗ sb-none" in missing.stderr
    assert json.loads(ok(forkd("kill", "--all", "--json"))) == [{"id": ids[1], "killed": True, "error": None}]
    assert "no matching sandboxes" in forkd("kill", "--all").stderr
    assert [row["removed"] for row in json.loads(ok(forkd("rmi", "t-day", "t-day-diff", "--json")))] == [True, True]


def test_bench_prints_its_steps_and_leaves_nothing(daemon: Any, forkd: Forkd) -> None:
    before = ok(forkd("images", "--json"))
    lines = ok(forkd("bench", "--tag", PARENT, "--n", "2")).splitlines()
    assert lines[0] == f"forkd bench against snapshot {PARENT}"
    assert lines[1] == "  fanout n=2 per_child_netns=false"
    steps = ["spawn (n=1)", "exec round-trip", "branch (diff=true)", "fanout (n=2)", "cleanup"]
    for line, step in zip(lines[3:8], steps, strict=True):
        assert re.fullmatch(rf"  {re.escape(step):22} *\d+ ms  .+", line), line
    assert re.fullmatch(r"  total {17} *\d+ ms", lines[9])
    assert ok(forkd("ls", "--json")).strip() == "[]"
    assert ok(forkd("images", "--json")) == before


def test_without_a_daemon_spawn_says_so(forkd: Forkd) -> None:
    done = forkd("spawn", "--tag", PARENT)
    assert done.returncode == 1
    assert "forkd daemon" in done.stderr
    assert "no live sandboxes" in forkd("ls").stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_complete_verbs(forkd: Forkd, shell: str) -> None:
    assert "_FORKD_COMPLETE" in ok(forkd("completion", shell))


def test_completion_offers_verbs_and_options(forkd: Forkd) -> None:
    environ = {"_FORKD_COMPLETE": "bash_complete", "COMP_WORDS": "forkd sp", "COMP_CWORD": "1"}
    assert "plain,spawn" in forkd(env=environ).stdout
    environ = {"_FORKD_COMPLETE": "bash_complete", "COMP_WORDS": "forkd spawn --da", "COMP_CWORD": "2"}
    assert "--daemon-url" in forkd(env=environ).stdout
