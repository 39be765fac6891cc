"""A build makes way for itself, and says what went wrong in it: a controller written to the contract answers."""

from __future__ import annotations

from typing import Any

import pytest

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.building import build_recipe
from forkd.sdk.errors import ControllerError
from forkd.sdk.recipe import Defaults, Files, Recipe, Run
from forkd.specs.errors import BuildFailed, TagTaken

STEPS = (Run(("sh", "-c", "one")), Run(("sh", "-c", "two")))


class Daemon(AsyncController):
    """Snapshots by tag, and whether each can be forked; one sandbox at a time, which dies of ``deadly``."""

    def __init__(self, deadly: str = "", values: str = "") -> None:
        self.snapshots: dict[str, bool] = {}
        self.deadly, self.values = deadly, values
        self.alive = False
        self.ran: list[str] = []
        self.prepared: dict[str, Any] = {}
        self.written: list[str] = []

    async def list_snapshots(self) -> list[dict[str, Any]]:
        rows = self.snapshots.items()
        return [{"tag": tag, "bootable": fine, "status": "ready" if fine else "failed"} for tag, fine in rows]

    async def build_rootfs(self, image: str, on_progress: Any = None, **fields: Any) -> dict[str, Any]:
        return {"digest": image}

    async def version(self) -> dict[str, Any]:
        return {"version": "1"}

    async def create_snapshot(self, tag: str, on_progress: Any = None, **fields: Any) -> dict[str, Any]:
        if tag in self.snapshots:
            raise ControllerError(409, {"error": f"{tag} is taken", "code": "tag_taken"}, "")
        self.snapshots[tag] = True
        return {"tag": tag, "dir": "/"}

    async def delete_snapshot(self, tag: str, cascade: bool = False, force: bool = False) -> None:
        del self.snapshots[tag]

    async def compact_snapshot(self, tag: str, to: str) -> dict[str, Any]:
        return await self.create_snapshot(to)

    async def spawn_sandboxes(self, snapshot_tag: str, *rest: Any, **fields: Any) -> list[dict[str, Any]]:
        assert self.snapshots[snapshot_tag]
        self.alive = True
        return [{"id": "sb"}]

    async def kill_sandbox(self, sandbox_id: str) -> None:
        if not self.alive:
            raise ControllerError(404, {"error": "sandbox sb is not there", "code": "sandbox_not_found"}, "")
        self.alive = False

    async def branch_sandbox(self, sandbox_id: str, tag: Any = None, *rest: Any, **fields: Any) -> dict[str, Any]:
        return await self.create_snapshot(tag)

    async def exec_command(self, sandbox_id: str, args: list[str], *rest: Any, **fields: Any) -> dict[str, Any]:
        self.ran.append(args[-1])
        if args[-1] == self.deadly:
            self.alive = False
            raise ControllerError(502, {"error": "the guest is gone", "code": "guest_gone"}, "")
        failed = args[-1] == "false"
        return {"exit_code": int(failed), "stdout": self.values, "stderr": "no" * failed, "error": None}

    async def write_file(self, sandbox_id: str, path: str, *rest: Any, **fields: Any) -> None:
        self.written.append(path)

    async def make_directory(self, sandbox_id: str, path: str, *rest: Any, **fields: Any) -> None:
        pass

    async def prepare_sandbox(self, sandbox_id: str, *rest: Any, **fields: Any) -> None:
        self.prepared = fields


async def build(daemon: Daemon, *steps: Any, **options: Any) -> dict[str, Any]:
    return await build_recipe(daemon, Recipe("x", "image", steps=steps), "x", lambda step, fraction: None, **options)


async def test_a_second_build_runs_nothing_and_one_without_the_cache_everything() -> None:
    daemon = Daemon()
    await build(daemon, *STEPS)
    with pytest.raises(TagTaken):
        await build(daemon, *STEPS)
    await build(daemon, *STEPS, replace=True)
    assert daemon.ran == ["one", "two"]
    await build(daemon, *STEPS, replace=True, cache=False)
    assert daemon.ran == ["one", "two"] * 2


@pytest.mark.parametrize("cache", [True, False])
async def test_snapshots_that_can_no_longer_be_forked_are_not_in_the_way(cache: bool) -> None:
    daemon = Daemon()
    built = await build(daemon, *STEPS)
    for name in ("x", *(row["tag"] for row in built["steps"][1:])):
        daemon.snapshots[name] = False
    daemon.ran.clear()
    again = await build(daemon, *STEPS, replace=True, cache=cache)
    assert daemon.ran == ["one", "two"]
    assert [row["cached"] for row in again["steps"]] == [cache, False, False]
    assert all(daemon.snapshots.values())


async def test_a_sandbox_that_died_in_a_step_does_not_hide_what_it_died_of() -> None:
    with pytest.raises(ControllerError, match="the guest is gone"):
        await build(Daemon(deadly="two"), *STEPS)


async def test_a_step_that_fails_is_named_and_its_sandbox_ended() -> None:
    daemon = Daemon()
    with pytest.raises(BuildFailed, match="run false ended with 1: no"):
        await build(daemon, Run(("sh", "-c", "false")))
    assert not daemon.alive


async def test_a_variable_of_several_lines_does_not_shift_the_others() -> None:
    daemon = Daemon(values="1\n2\0three\0")
    await build(daemon, Defaults({"ALL": "$A $B"}, expand=True))
    assert daemon.prepared["env"] == {"ALL": "1\n2 three"}


async def test_relative_paths_begin_where_commands_of_the_guest_do() -> None:
    daemon = Daemon(values="/srv\n")
    pairs = (("x", "./a", 0o644), ("x", "../b", 0o644), ("x", "/c", 0o644))
    await build(daemon, Files(pairs), Defaults(workdir="app", expand=True))
    assert daemon.written == ["/srv/a", "/b", "/c"]
    assert daemon.prepared["workdir"] == "/srv/app"
