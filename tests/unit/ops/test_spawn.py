"""Children that cannot be what was asked for are ended; of two who want one name or tag, one has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from forkd.ops import spawn
from forkd.ops.lifecycle import dress
from forkd.ops.processes import start_process
from forkd.processtable import Process
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import Conflict, ForkdError, GuestTimeout, NameTaken
from forkd.specs.requests import CreateSandboxes, SandboxDetails, StartProcess
from tests.unit.ops.sandboxes import TAG, FakeGuest, add_sandbox, forks, scene


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    async with scene(tmp_path) as made:
        monkeypatch.setattr(spawn, "fork", forks(made))
        yield made


def guest(sandbox: Sandbox) -> FakeGuest:
    return cast(FakeGuest, sandbox.link)


async def test_of_two_who_want_one_name_the_loser_has_no_sandbox(runtime: Runtime) -> None:
    errors: list[ForkdError] = []

    async def one() -> None:
        try:
            await spawn.spawn(runtime, CreateSandboxes(snapshot_tag=TAG, name="db", env={"A": "1"}))
        except NameTaken as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        nursery.start_soon(one)
    assert len(errors) == 1
    assert [sandbox.info.name for sandbox in runtime.sandboxes.values()] == ["db"]


async def test_children_whose_request_is_cancelled_are_ended(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_: object, message: object, timeout: float) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(FakeGuest, "request", silent)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spawn.spawn, runtime, CreateSandboxes(snapshot_tag=TAG, n=3, env={"A": "1"}))
        await trio.testing.wait_all_tasks_blocked()
        assert len(runtime.sandboxes) == 3
        nursery.cancel_scope.cancel()
    assert not runtime.sandboxes


async def test_with_partial_only_the_child_that_cannot_have_its_details_is_ended(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = forks(runtime)

    async def fork(*args: Any) -> Any:
        children = await made(*args)
        guest(children[0].sandbox).error = GuestTimeout("no answer")  # type: ignore[arg-type]
        return children

    monkeypatch.setattr(spawn, "fork", fork)
    request = CreateSandboxes(snapshot_tag=TAG, n=2, env={"A": "1"}, partial=True)
    first, second = await spawn.spawn(runtime, request)
    assert isinstance(first.error, GuestTimeout) and first.sandbox is None
    assert second.sandbox is not None and list(runtime.sandboxes) == [second.sandbox.id]


async def test_a_name_is_reserved_while_the_guest_is_asked_and_free_again_if_it_fails(runtime: Runtime) -> None:
    first, second = await add_sandbox(runtime, "sb-1"), await add_sandbox(runtime, "sb-2")
    guest(first).open = trio.Event()
    guest(first).error = GuestTimeout("no answer")
    details = SandboxDetails(name="db", env={"A": "1"})
    async with trio.open_nursery() as nursery:

        async def fails() -> None:
            with pytest.raises(GuestTimeout):
                await dress(runtime, first, details)

        nursery.start_soon(fails)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(NameTaken):
            await dress(runtime, second, details)
        guest(first).open.set()
    assert (await dress(runtime, second, details)).name == "db"


async def test_of_two_processes_started_with_one_tag_one_is_refused(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await add_sandbox(runtime, "sb-1")
    go = trio.Event()

    async def run(self: Process, stream: object, task_status: trio.TaskStatus[None]) -> None:
        await go.wait()
        self.pid = 7
        task_status.started()

    monkeypatch.setattr(Process, "run", run)
    monkeypatch.setattr(FakeGuest, "exec", lambda *_, **__: None, raising=False)
    request = StartProcess(args=["true"], tag="server")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_process, runtime, "sb-1", request)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Conflict, match="is being started"):
            await start_process(runtime, "sb-1", request)
        go.set()
    assert [process.tag for process in sandbox.processes] == ["server"]
