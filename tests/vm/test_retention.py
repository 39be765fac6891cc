"""Retention on real snapshots: what rules let go goes, what is pinned, in use or built on stays."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from tests.conftest import Daemon, Forkd, run_forkd

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


def on_disk(data_dir: Path) -> int:
    """What snapshots and images take."""
    places = [data_dir / "snapshots", data_dir / "images"]
    return sum(path.stat().st_blocks * 512 for place in places for path in place.rglob("*") if path.is_file())


async def refused(call: Any, code: str) -> ControllerError:
    with pytest.raises(ControllerError) as caught:
        await call
    assert caught.value.code == code, caught.value
    return caught.value


def new_name(name: str) -> str:
    return f"t-{name}-{secrets.token_hex(3)}"


def reasons(done: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["tag"]: (row["action"], row["reason"]) for row in done["rows"]}


async def test_rules_remove_whole_chains_and_free_what_they_say(
    controller: AsyncController, data_dir: Path, fresh_tag: Callable[[str], str]
) -> None:
    session = fresh_tag("session")
    rules: list[dict[str, Any]] = [{"labels": [f"session={session}"], "keep_last": 0}]
    first = (await controller.spawn_sandboxes(PARENT, 1, labels={"session": session}))[0]["id"]
    base, middle, head = fresh_tag("base"), fresh_tag("middle"), fresh_tag("head")
    made = await controller.branch_sandbox(first, base, mode="full")
    assert made["labels"] == {"session": session}
    second = (await controller.spawn_sandboxes(base, 1))[0]["id"]
    await controller.eval_code(second, "x = bytes(3 << 20)")
    await controller.branch_sandbox(second, middle, mode="diff", labels={"session": session})
    third = (await controller.spawn_sandboxes(middle, 1))[0]["id"]  # materialises an image of the chain
    await controller.branch_sandbox(third, head, mode="live", labels={"session": session})

    rows = reasons(await controller.prune_snapshots(rules))
    assert rows[base] == ("keep", f"sandbox {second} runs from it")
    assert rows[middle] == ("keep", f"sandbox {third} runs from it")
    assert rows[head] == ("remove", "not one of the newest 0")
    assert rows[PARENT][0] == "keep"
    for each in (first, second, third):
        await controller.kill_sandbox(each)

    assert (await controller.update_snapshot(middle, pinned=True))["pinned"] is True
    rows = reasons(await controller.prune_snapshots(rules))
    assert rows[base] == ("keep", f"{middle} builds on it")
    assert rows[middle] == ("keep", "pinned")
    await refused(controller.delete_snapshot(middle), "snapshot_in_use")
    error = await refused(controller.delete_snapshot(base, cascade=True), "snapshot_pinned")
    assert error.hint == f"forkd unpin {middle}"
    assert {row["tag"] for row in await controller.list_snapshots()} >= {base, middle, head}
    await controller.update_snapshot(middle, pinned=False)

    planned = await controller.prune_snapshots(rules)
    assert [row["tag"] for row in planned["rows"] if row["action"] == "remove"] == [head, middle, base]
    before = on_disk(data_dir)
    done = await controller.prune_snapshots(rules, dry_run=False)
    assert done == {**planned, "dry_run": False}
    assert before - on_disk(data_dir) == done["freed_bytes"] > 3 << 20
    assert not {row["tag"] for row in await controller.list_snapshots()} & {base, middle, head}
    await refused(controller.update_snapshot(base, pinned=True), "snapshot_not_found")
    await refused(controller.prune_snapshots([]), "bad_input")
    await refused(controller.prune_snapshots([{"labels": ["a"]}]), "bad_input")


async def test_what_templates_workspaces_and_verbs_use_is_in_use(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forkd.config import load_settings
    from forkd.ops.fork import ForkOptions, fork
    from forkd.ops.remove import in_use
    from forkd.runtime import open_runtime
    from forkd.sandbox import end_sandbox

    monkeypatch.setenv("FORKD_DATA_DIR", str(data_dir))
    async with open_runtime(load_settings()) as runtime:
        with runtime.reading(PARENT):
            assert in_use(runtime)[PARENT] == "something reads it just now"
        (child,) = await fork(runtime, PARENT, 1, ForkOptions(spawn="template"))
        assert child.sandbox is not None
        assert in_use(runtime)[PARENT] == f"sandbox {child.sandbox.id} runs from it"
        await end_sandbox(child.sandbox)
        if runtime.templates.kept:
            assert in_use(runtime)[PARENT] == "a template of it is warm"


def test_a_daemon_applies_its_policy_and_pins_outlive_it(data_dir: Path, tmp_path: Path) -> None:
    session, old, pinned = new_name("session"), new_name("old"), new_name("pinned")
    config = tmp_path / "forkd.toml"
    config.write_text(
        f'[retention]\nevery_secs = 1\n[[retention.rules]]\nlabels = ["session={session}"]\nkeep_last = 0\n'
    )
    daemon = Daemon(data_dir, tmp_path / "daemon.log")
    try:
        with httpx.Client(base_url=daemon.url, timeout=120) as client:
            child = client.post("/v1/sandboxes", json={"snapshot_tag": PARENT}).json()[0]["id"]
            for tag in (old, pinned):
                body = {"tag": tag, "mode": "diff", "labels": {"session": session}}
                assert client.post(f"/v1/sandboxes/{child}/branch", json=body).status_code == 201
            assert run_forkd(data_dir, "pin", pinned).returncode == 0
            workspace = {"name": new_name("w"), "snapshot_tag": old}
            assert client.post("/v1/workspaces", json=workspace).status_code == 201
        daemon.stop()
        run_forkd(data_dir, "cleanup", "--yes")  # the workspace has no sandbox any more, and still comes back from it
        rule = ["prune", "--label", f"session={session}", "--keep-last", "0", "--json"]
        rows = reasons(json.loads(run_forkd(data_dir, *rule).stdout))
        assert rows[old] == ("keep", f"workspace {workspace['name']!r} comes back from it")
        daemon = Daemon(data_dir, tmp_path / "again.log", "--config", str(config), "--end-sandboxes")
        with httpx.Client(base_url=daemon.url, timeout=120) as client, client.stream("GET", "/v1/events") as events:
            lines = events.iter_lines()
            assert client.delete(f"/v1/workspaces/{workspace['name']}").status_code == 204
            told = next(line for line in lines if '"prune"' in line)
            assert old in told
            assert client.get(f"/v1/snapshots/{old}").status_code == 404
            assert client.get(f"/v1/snapshots/{pinned}").json()["pinned"] is True
        assert f"retention removed {old}" in daemon.said()
    finally:
        daemon.stop()
        run_forkd(data_dir, "cleanup", "--yes")
        run_forkd(data_dir, "rmi", "--force", pinned, old)


def test_people_see_what_would_go_before_it_goes(forkd: Forkd, data_dir: Path) -> None:
    tag, session = new_name("cli"), new_name("session")
    assert forkd("snapshot-diff", "--from", PARENT, "--tag", tag, "--exec", "true").returncode == 0
    assert forkd("label", "--snapshot", tag, f"{session}=1", "x=y").stdout == f"{session}=1\nx=y\n"
    assert forkd("label", "--snapshot", tag, "x-").stdout == f"{session}=1\n"
    rule = ["--label", session, "--max-size", "1KiB", "--keep-last", "0"]
    shown = forkd("prune", *rule)
    assert shown.returncode == 0 and tag in shown.stdout and "remove" in shown.stdout, shown.stderr
    assert "run again with --yes" in shown.stderr
    assert forkd("pin", tag).stdout == f"✓ {tag} is pinned\n"
    assert "pinned" in forkd("images").stdout
    refused = forkd("rmi", tag)
    assert refused.returncode == 1 and f"forkd unpin {tag}" in refused.stderr
    assert tag not in [row["tag"] for row in _going(forkd("prune", *rule, "--yes", "--json").stdout)]
    assert forkd("unpin", tag).returncode == 0
    assert tag in [row["tag"] for row in _going(forkd("prune", *rule, "--yes", "--json").stdout)]
    assert not (data_dir / "snapshots" / tag).exists()
    assert forkd("prune").returncode == 2
    assert "is no duration" in forkd("prune", "--older-than", "soon").stderr
    assert "is no size" in forkd("prune", "--max-size", "big").stderr


def _going(text: str) -> list[dict[str, Any]]:
    return [row for row in json.loads(text)["rows"] if row["action"] == "remove"]
