"""The fork verb: each child its own network, answers that keep no sandbox, and a replacement that fails in time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forkd.ops import fork_any, fork_running
from forkd.ops.fork import ForkOptions
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.specs.errors import BadInput, EngineError, ForkdError, GuestTimeout, NoSpace
from forkd.specs.models import SnapshotInfo
from forkd.specs.requests import ForkRequest, SandboxDetails
from tests.unit.ops.sandboxes import TAG, FakeGuest, add_sandbox, forks, scene


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    async def nothing(*_: object) -> None:
        return None

    async with scene(tmp_path) as made:
        for module in (fork_any, fork_running):
            monkeypatch.setattr(module, "fork", forks(made))
            monkeypatch.setattr(module, "prepare", nothing)
        yield made


async def test_each_child_has_the_network_it_is_given(runtime: Runtime) -> None:
    request = ForkRequest(
        source=TAG,
        n=4,
        network="allowlist",
        allow=["example.org"],
        per_child=[
            SandboxDetails(network="nat"),
            SandboxDetails(),
            SandboxDetails(network="none"),
            SandboxDetails(allow=["10.0.0.0/8"]),
        ],
    )
    rows = await fork_any.fork_any(runtime, request)
    infos = [row.info for row in rows if row.info is not None]
    assert [(info.network, info.allow) for info in infos] == [
        ("nat", []),
        ("allowlist", ["example.org"]),
        ("none", []),
        ("allowlist", ["10.0.0.0/8"]),
    ]


async def test_children_made_before_others_were_refused_are_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = forks(runtime)

    async def fork(runtime: Runtime, tag: str, n: int, options: ForkOptions) -> Any:
        if options.network != "none":
            raise BadInput("no such network")
        return await made(runtime, tag, n, options)

    monkeypatch.setattr(fork_any, "fork", fork)
    request = ForkRequest(source=TAG, n=2, per_child=[SandboxDetails(), SandboxDetails(network="x")])
    with pytest.raises(BadInput):
        await fork_any.fork_any(runtime, request)
    assert not runtime.sandboxes


async def test_a_network_nobody_knows_is_refused_before_a_running_source_is_captured(runtime: Runtime) -> None:
    await add_sandbox(runtime, "sb-source")
    with pytest.raises(BadInput, match="network is 'x'"):
        await fork_any.fork_any(runtime, ForkRequest(source="sb-source", network="x"))
    assert [path.name for path in runtime.snapshots.root.iterdir() if path.is_dir()] == [TAG]


async def no_notes(*_: Any) -> list[str]:
    return []


async def test_networked_children_of_a_running_source_come_from_a_snapshot_that_says_so(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def branch(runtime: Runtime, sandbox_id: str, request: Any) -> SnapshotInfo:
        asked.append(request)
        return SnapshotInfo(tag=request.tag, dir="", created_at_unix=1, status="ready", bootable=True)

    monkeypatch.setattr(fork_running, "branch", branch)
    monkeypatch.setattr(fork_any, "network_notes", no_notes)
    await add_sandbox(runtime, "sb-source", labels={"team": "a"})
    per_child = [SandboxDetails(network="nat"), SandboxDetails()]
    request = ForkRequest(source="sb-source", n=2, mode="diff", per_child=per_child)
    rows = await fork_any.fork_any(runtime, request)
    assert [(each.mode, each.labels) for each in asked] == [("diff", {"team": "a", "made_by": "fork"})]
    for row, network in zip(rows, ("nat", "none"), strict=True):
        assert row.info is not None and (row.info.network, row.info.forked_from) == (network, "sb-source")
        assert row.info.warnings == [f"forked through the snapshot {asked[0].tag}: mode diff was asked for"]


async def test_an_answer_that_is_remembered_keeps_no_sandbox(runtime: Runtime) -> None:
    request = ForkRequest(source=TAG, idempotency_key="once")
    (row,) = await fork_any.fork_any(runtime, request)
    assert row.info is not None
    sandbox = weakref.ref(runtime.sandboxes[row.info.id].processes)
    await end_sandbox(runtime.sandboxes[row.info.id])
    gc.collect()
    assert sandbox() is None
    assert (await fork_any.fork_any(runtime, request))[0].info is row.info


async def test_a_rollback_that_cannot_be_prepared_leaves_the_sandbox_running(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise NoSpace("no room for the image")

    monkeypatch.setattr(fork_any, "prepare", full)
    await add_sandbox(runtime, "sb-1")
    with pytest.raises(NoSpace):
        await fork_any.rollback(runtime, "sb-1", TAG)
    assert "sb-1" in runtime.sandboxes


async def test_a_promotion_whose_child_cannot_be_captured_leaves_both_running(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def instant(*_: object, **__: object) -> AsyncIterator[None]:
        raise NoSpace("no room for a branch")
        yield

    monkeypatch.setattr(fork_any, "instant", instant)
    await add_sandbox(runtime, "sb-1")
    await add_sandbox(runtime, "sb-2", forked_from="sb-1")
    with pytest.raises(NoSpace):
        await fork_any.promote(runtime, "sb-2")
    assert set(runtime.sandboxes) == {"sb-1", "sb-2"}


@pytest.mark.parametrize("error", [EngineError("no VMM"), GuestTimeout("no answer")])
async def test_a_replacement_that_does_not_come_up_is_written_down_as_the_end(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, error: ForkdError
) -> None:
    async def fork(*_: object) -> Any:
        raise error

    async def request(*_: object, **__: object) -> Any:
        raise error

    if isinstance(error, EngineError):
        monkeypatch.setattr(fork_any, "fork", fork)
    else:
        monkeypatch.setattr(FakeGuest, "request", request)
    await add_sandbox(runtime, "sb-1", env={"A": "1"})
    with pytest.raises(type(error)):
        await fork_any.rollback(runtime, "sb-1", TAG)
    assert not runtime.sandboxes
    assert runtime.endings["sb-1"] == f"it was replaced, and the other did not come up: {error.message}"


async def test_a_replacement_has_the_details_of_what_it_replaces(runtime: Runtime) -> None:
    await add_sandbox(runtime, "sb-1", name="main", env={"A": "1"}, branch_count=3, best_effort=True)
    made: Sandbox = await fork_any.rollback(runtime, "sb-1", TAG)
    assert (made.id, made.info.name, made.info.env, made.info.branch_count) == ("sb-1", "main", {"A": "1"}, 3)
