"""A snapshot travels: packed, pushed, pulled into an empty store, and its child remembers what its parent knew."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from tests.conftest import run_forkd
from tests.hub_support import running_nginx
from tests.oci_support import running_registry
from tests.token_server import running_token_server

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
SECRET = "the answer is 42"


@contextmanager
def hub_of(kind: str, work: Path) -> Iterator[str]:
    """An empty registry of each kind, with a real server behind it; the one for OCI wants tokens."""
    if kind == "file":
        yield f"file:{work}/hub"
    elif kind == "http":
        with running_nginx(work) as (url, _):
            yield f"{url}/hub"
    else:
        with running_token_server(work) as tokens, running_registry(work, auth=tokens.auth_config()) as registry:
            yield f"oci://{registry.address}"


def ask(data_dir: Path, *args: str, **options: Any) -> Any:
    """What a verb answers as JSON."""
    done = run_forkd(data_dir, *args, "--json", **options)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def remembers(data_dir: Path, tag: str, code: str) -> Any:
    """What a child of a snapshot answers, on a host that has nothing but what it pulled."""
    done = run_forkd(data_dir, "eval", "--tag", tag, "--", code)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.fixture
async def branch(controller: AsyncController, fresh_tag: Callable[[str], str]) -> dict[str, Any]:
    """A snapshot of a child that was told something."""
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]
    answer = await controller.eval_code(child["id"], f"secret = {SECRET!r}; list_of = numpy.arange(5)")
    assert answer["error"] is None
    return await controller.branch_sandbox(child["id"], tag=fresh_tag("told"), mode="diff")


@pytest.mark.parametrize("kind", ["file", "http", "oci"])
async def test_a_branch_goes_through_a_registry_and_its_child_remembers(
    kind: str, branch: dict[str, Any], data_dir: Path, tmp_path: Path
) -> None:
    tag, there = branch["tag"], tmp_path / "there"
    with hub_of(kind, tmp_path) as hub:
        if kind == "oci":
            refused = run_forkd(data_dir, "push", "--tag", PARENT, "acme/py", "--hub", hub)
            assert (refused.returncode, "hub login" in refused.stderr) == (1, True)
            for host in (data_dir, there):
                assert run_forkd(host, "hub", "login", hub, "--username", "me", stdin="secret\n").returncode == 0
        first = ask(data_dir, "push", "--tag", PARENT, "acme/py", "--hub", hub)
        assert first["sent_bytes"] == first["total_bytes"]
        second = ask(data_dir, "push", "--tag", PARENT, "acme/py@2", "--hub", hub)
        assert second["sent_bytes"] < first["sent_bytes"] / 100
        third = ask(data_dir, "push", "--tag", tag, f"{hub}/acme/told")
        assert third["blobs"] == first["blobs"] + 2
        assert third["sent_bytes"] - second["sent_bytes"] < branch["diff_physical_bytes"] + 20_000

        assert [row["package"] for row in ask(there, "hub", "ls", "--hub", hub)] == ["acme/py", "acme/py", "acme/told"]
        assert ask(there, "hub", "check", f"{hub}/acme/told")["runs_here"]
        pulled = ask(there, "pull", "acme/told", "--hub", hub)
        assert pulled["added"] == [PARENT, tag]
        assert pulled["fetched_bytes"] <= third["total_bytes"]
        assert ask(there, "pull", "acme/py", "--hub", hub)["fetched_bytes"] == 0
        if kind == "oci":
            assert run_forkd(data_dir, "hub", "login", hub, "--logout").returncode == 0
    assert remembers(there, tag, "[secret, list_of.tolist()]") == [SECRET, [0, 1, 2, 3, 4]]
    assert remembers(there, PARENT, "numpy.zeros(3).tolist()") == [0.0, 0.0, 0.0]
    rows = {row["tag"]: row for row in ask(there, "images")}
    assert rows[tag]["source"]["from"] == f"{hub}/acme/told@latest"
    assert rows[tag]["physical_bytes"] < rows[tag]["shared_bytes"] < rows[tag]["logical_bytes"]


async def test_a_signed_pack_is_carried_by_hand(branch: dict[str, Any], data_dir: Path, tmp_path: Path) -> None:
    tag, there, file = branch["tag"], tmp_path / "there", tmp_path / "told.forkd-snapshot.tar.zst"
    key = tmp_path / "maker" / "hub/keys/default.pem"
    public = run_forkd(tmp_path / "maker", "hub", "keygen").stdout.strip()
    packed = ask(data_dir, "pack", "--tag", tag, "--out", str(file), "--sign", str(key))
    assert packed["bytes"] < packed["memory_bytes"] / 10
    await trio.run_process(["zstd", "-t", "-q", str(file)])
    refused = run_forkd(there, "unpack", str(file), "--trust", "require")
    assert refused.returncode == 1
    assert f"forkd hub trust NAME {public}" in refused.stderr
    assert run_forkd(there, "images", "--json").stdout.strip() == "[]"
    ask(there, "hub", "trust", "maker", public)
    done = ask(there, "unpack", str(file), env={"FORKD_HUB_TRUST": "require"})
    assert (done["added"], done["signed_by"]) == ([PARENT, tag], ["maker"])
    assert remembers(there, tag, "secret") == SECRET
    assert "(maker)" in run_forkd(there, "snapshot-info", tag).stdout


def test_a_daemon_is_a_registry_for_other_hosts(
    data_dir: Path, start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0f1e2d3c4b5a69788796a5b4c3d2e1f0\n")
    tokens.chmod(0o600)
    daemon = start_daemon(data_dir, "--token-file", str(tokens))
    hub, there = f"{daemon.url}/hub", tmp_path / "there"
    assert httpx.get(f"{hub}/registry.json").status_code == 401
    local = {"FORKD_URL": "local"}
    refused = run_forkd(there, "pull", f"local/{PARENT}", "--hub", hub, env=local)
    assert refused.returncode == 1
    assert "hub login" in refused.stderr
    env = {"FORKD_HUB_URL": hub, "FORKD_HUB_TOKEN": "0f1e2d3c4b5a69788796a5b4c3d2e1f0", **local}
    assert f"local/{PARENT}" in [row["package"] for row in ask(there, "hub", "ls", env=env)]
    pulled = ask(there, "pull", f"local/{PARENT}", "--tag", "mine", env=env)
    assert pulled["added"] == ["mine"]
    assert remembers(there, "mine", "numpy.zeros(3).tolist()") == [0.0, 0.0, 0.0]
    assert os.stat(there / "snapshots/mine/memory.bin").st_blocks * 512 < 400 << 20
