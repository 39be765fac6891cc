"""Plugins by other people, in source and in the binary, without a change in forkd."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from tests.conftest import ROOT, Daemon, result_of, run_forkd

pytestmark = pytest.mark.vm
THIRD_PARTY = ROOT / "tests" / "third_party"
sys.path.insert(0, str(THIRD_PARTY))
from s3_server import KEY, SECRET, Store, running_store  # noqa: E402

BINARY = ROOT / "dist" / "forkd"
PARENT = "python-numpy"


@pytest.fixture
def store() -> Iterator[Store]:
    with running_store() as made:
        yield made


@pytest.fixture(params=["source", "binary"])
def foreign(request: pytest.FixtureRequest, data_dir: Path, tmp_path: Path, store: Store) -> Iterator[Daemon]:
    """A daemon with the third-party plugins in its plugin directory, and a broken one."""
    if request.param == "binary" and not BINARY.exists():
        pytest.skip("no dist/forkd here: make binary")
    folder = tmp_path / "plugins"
    folder.mkdir(mode=0o755)
    for file in THIRD_PARTY.glob("*/forkd_*"):
        if file.is_dir():
            shutil.copytree(file, folder / file.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif file.suffix == ".py":
            shutil.copy(file, folder)
    (folder / "broken.py").write_text("def f(:\n")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    forkd = [str(BINARY)] if request.param == "binary" else [sys.executable, "-m", "forkd"]
    env = {"FORKD_PLUGIN_DIR": str(folder), "AWS_ENDPOINT_URL": store.url}
    env |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    daemon = Daemon(data_dir, tmp_path / "daemon.log", "--end-sandboxes", env=env, forkd=forkd)
    yield daemon
    daemon.stop()
    run_forkd(data_dir, "cleanup", "--yes")


async def test_a_foreign_branch_mode_captures_less_and_loses_nothing(foreign: Daemon) -> None:
    async with AsyncController(foreign.url, timeout=None) as controller:
        plugins = {row["name"]: row for row in await controller.list_plugins()}
        assert plugins["forkd_branch_lean"]["provides"] == ["branch mode lean"]
        assert "SyntaxError" in plugins["broken"]["error"]
        assert "plugin broken" in foreign.said()
        (source,) = await controller.spawn_sandboxes(PARENT, 1)
        await controller.eval_code(source["id"], "import hashlib; blob = numpy.random.rand(1 << 17)")
        digest = "hashlib.sha256(blob.tobytes()).hexdigest()"
        wanted = result_of(await controller.eval_code(source["id"], digest))
        try:
            live = await controller.branch_sandbox(source["id"], mode="live", tag="t-live")
            lean = await controller.branch_sandbox(source["id"], mode="lean", tag="t-lean", wait=False)
            assert lean["status"] == "writing"
            with trio.fail_after(60):
                while (lean := await controller.get_snapshot("t-lean"))["status"] == "writing":
                    await trio.sleep(0.05)
            (child,) = await controller.spawn_sandboxes("t-lean", 1)
            assert result_of(await controller.eval_code(child["id"], digest)) == wanted
            assert lean["changed_pages"] < live["changed_pages"]
            assert lean["diff_physical_bytes"] < live["diff_physical_bytes"]
        finally:
            for sandbox in await controller.list_sandboxes():
                await controller.kill_sandbox(sandbox["id"])
            for row in await controller.list_snapshots():
                if row["tag"] in ("t-live", "t-lean"):
                    await controller.delete_snapshot(row["tag"], force=True)


async def test_a_foreign_transport_carries_a_snapshot_there_and_back(foreign: Daemon, store: Store) -> None:
    async with AsyncController(foreign.url, timeout=None) as controller:
        (source,) = await controller.spawn_sandboxes(PARENT, 1)
        await controller.eval_code(source["id"], "answer = 6 * 7")
        try:
            await controller.branch_sandbox(source["id"], mode="diff", tag="t-sent")
            await controller.push("t-sent", "acme/answer", hub="s3://bucket/hub")
            assert "/bucket/hub/registry.json" in store.objects
            await controller.delete_snapshot("t-sent", force=True)
            await controller.pull("acme/answer", hub="s3://bucket/hub", tag="t-back")
            (child,) = await controller.spawn_sandboxes("t-back", 1)
            assert result_of(await controller.eval_code(child["id"], "answer")) == 42
        finally:
            for sandbox in await controller.list_sandboxes():
                await controller.kill_sandbox(sandbox["id"])
            for row in await controller.list_snapshots():
                if row["tag"] in ("t-sent", "t-back"):
                    await controller.delete_snapshot(row["tag"], force=True)
