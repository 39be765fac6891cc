"""Forked children: they answer, they differ, they cannot disturb each other, and they leave nothing behind."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.store.digests import sparse256_file
from tests.conftest import none_left

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
OLD = 60
"""Seconds a snapshot is to have aged before clocks are compared."""


@pytest.fixture(autouse=True, params=["restore", "template"])
def spawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for children that are restored and for those that are cloned."""
    monkeypatch.setenv("FORKD_SPAWN", request.param)


async def everyone(controller: AsyncController, children: list[dict[str, Any]], code: str) -> list[Any]:
    """Evaluate in every child at once; the values."""
    values: dict[str, Any] = {}

    async def one(child: dict[str, Any]) -> None:
        answer = await controller.eval_code(child["id"], code, 60)
        assert answer["error"] is None, answer
        values[child["id"]] = answer["result"] and ast.literal_eval(answer["result"])

    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(one, child)
    return [values[child["id"]] for child in children]


async def test_ten_children_answer(controller: AsyncController) -> None:
    children = await controller.spawn_sandboxes(PARENT, 10)
    assert await everyone(controller, children, "numpy.zeros(5).tolist()") == [[0.0] * 5] * 10
    assert len({child["pid"] for child in children}) == 10


async def test_siblings_differ_in_everything_that_must_be_unique(controller: AsyncController) -> None:
    children = await controller.spawn_sandboxes(PARENT, 4)
    code = (
        "import os, random, uuid, socket\n"
        "[os.urandom(16).hex(), random.random(), float(numpy.random.rand()), str(uuid.uuid4()), socket.gethostname(),"
        " open('/etc/machine-id').read().strip()]"
    )
    answers = await everyone(controller, children, code)
    for values in zip(*answers, strict=True):
        assert len(set(values)) == 4, values
    assert [answer[4] for answer in answers] == [child["id"] for child in children]


async def test_clocks_agree_with_the_host_although_the_snapshot_is_old(controller: AsyncController) -> None:
    made = (await controller.get_snapshot(PARENT))["created_at_unix"]
    await trio.sleep(max(0, min(OLD, made + OLD - time.time())))  # only where the parent was made just now
    assert time.time() - made >= OLD
    children = await controller.spawn_sandboxes(PARENT, 3)
    for child in children:
        before = time.time()
        answer = await controller.eval_code(child["id"], "import time; time.time()")
        after = time.time()
        guest = float(answer["result"])
        assert before - 0.1 <= guest <= after + 0.1, (before, guest, after)


async def test_what_one_child_writes_no_other_sees_and_the_disk_stays_as_it_was(
    controller: AsyncController, data_dir: Path
) -> None:
    disks = {path: sparse256_file(path) for path in (data_dir / "rootfs").glob("*.ext4")}
    writer, reader = await controller.spawn_sandboxes(PARENT, 2)
    await controller.eval_code(writer["id"], "secret = 42; open('/root/secret', 'w').write('x')")
    await controller.exec_command(
        writer["id"], ["sh", "-c", "rm -rf /usr/share/doc; echo changed > /etc/hostname; sync"]
    )
    seen = await controller.eval_code(
        reader["id"], "import os; ('secret' in globals(), os.path.exists('/root/secret'))"
    )
    assert seen["result"] == "(False, False)"
    assert (await controller.eval_code(writer["id"], "secret"))["result"] == "42"
    assert {path: sparse256_file(path) for path in disks} == disks


async def test_a_hundred_children_at_once_all_answer_and_leave_nothing(
    controller: AsyncController, data_dir: Path, machines: Callable[[], list[int]]
) -> None:
    children = await controller.spawn_sandboxes(PARENT, 100)
    answers = await everyone(controller, children, "numpy.zeros(5).tolist()")
    assert answers == [[0.0] * 5] * 100
    assert {child["pid"] for child in children} <= set(machines())
    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(controller.kill_sandbox, child["id"])
    await none_left(machines)
    assert await controller.list_sandboxes() == []
    owners = [path for path in (data_dir / "run").iterdir() if any(entry.is_dir() for entry in path.iterdir())]
    assert owners == []


async def test_a_command_ends_in_the_way_it_ended(controller: AsyncController) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]

    async def run(*args: str, timeout: float = 30, **fields: Any) -> dict[str, Any]:
        return await controller.exec_command(child, list(args), timeout, **fields)

    plain = await run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (plain["stdout"], plain["stderr"], plain["exit_code"], plain["reason"]) == ("out\n", "err\n", 3, "exited")
    assert (await run("sh", "-c", "kill -9 $$"))["exit_code"] == 137
    missing = await run("no-such-program")
    assert (missing["exit_code"], missing["reason"]) == (127, "not_found")
    assert "no-such-program" in missing["error"]
    late = await run("sleep", "60", timeout=0.5)
    assert (late["exit_code"], late["reason"], late["timed_out"]) == (124, "timed_out", True)
    given = await run(
        "sh", "-c", "cat; echo $WHO; pwd; id -un", stdin="in\n", env={"WHO": "me"}, cwd="/tmp", user="nobody"
    )
    assert given["stdout"] == "in\nme\n/tmp\nnobody\n"


async def test_fifty_megabytes_of_output_come_through_whole_and_binary_stays_binary(
    controller: AsyncController,
) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    size = 0

    def count(stream: str, data: bytes) -> None:
        nonlocal size
        size += len(data)

    done = await controller.exec_stream(child, ["head", "-c", str(50 << 20), "/dev/zero"], count, 240)
    assert (done["exit_code"], size) == (0, 50 << 20)
    pieces: list[bytes] = []
    await controller.exec_stream(child, ["printf", r"\377\000\376"], lambda stream, data: pieces.append(data))
    assert b"".join(pieces) == b"\xff\x00\xfe"


async def test_eval_keeps_state_prints_and_explains_errors(controller: AsyncController) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    await controller.eval_code(child, "x = 20")
    answer = await controller.eval_code(child, "print('hello'); x + 1")
    assert (answer["stdout"], answer["result"]) == ("hello\n", "21")
    broken = await controller.eval_code(child, "1/0")
    assert broken["exit_code"] == 1
    assert "ZeroDivisionError" in broken["error"]
    assert "Traceback" in broken["traceback"]
    gone = await controller.eval_code(child, "import os; os._exit(3)")
    assert gone["error"] is not None
    assert (await controller.eval_code(child, "1 + 1"))["result"] == "2"


async def test_a_machine_that_dies_by_itself_is_reported_truthfully(controller: AsyncController) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]
    os.kill(child["pid"], 9)
    with trio.fail_after(10):
        while await controller.list_sandboxes():
            await trio.lowlevel.checkpoint()
    with pytest.raises(ControllerError) as caught:
        await controller.eval_code(child["id"], "1")
    assert (caught.value.status, caught.value.code) == (404, "sandbox_not_found")
    assert "signal 9" in str(caught.value)


def test_work_directories_are_kept_on_request_and_removed_by_cleanup(forkd: Callable[..., Any], data_dir: Path) -> None:
    done = forkd("fork", "--tag", PARENT, "-n", "2", "--settle-secs", "0", "--keep-workdir")
    assert done.returncode == 0, done.stderr
    kept = sorted((data_dir / "kept").iterdir())
    assert len(kept) == 2
    for path in kept:
        assert str(path) in done.stderr
        assert (path / "vmm.log").exists()
    listed = forkd("cleanup")
    assert all(str(path) in listed.stdout for path in kept)
    assert kept[0].exists()
    assert forkd("cleanup", "--yes").returncode == 0
    assert list((data_dir / "kept").iterdir()) == []


async def test_a_host_too_busy_to_listen_in_time_still_learns_that_the_guest_runs(
    controller: AsyncController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU announces that the guest runs only to who has entered QMP's command mode by then."""
    from forkd.plugins.engine_qemu.qmp import Qmp

    negotiate = Qmp.negotiate

    async def late(self: Qmp) -> None:
        await trio.sleep(1)  # the busy host
        await negotiate(self)

    monkeypatch.setattr(Qmp, "negotiate", late)
    with trio.fail_after(120):
        (child,) = await controller.spawn_sandboxes(PARENT, 1, spawn="restore")
    assert (await controller.eval_code(child["id"], "1 + 1", 60))["result"] == "2"
