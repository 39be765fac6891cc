"""Branch: every mode, on a running guest, with the source going on and grandchildren that inherit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from forkd.config import load_settings
from forkd.linux.process import start_time
from forkd.ops.branch import branch
from forkd.ops.execute import eval_code
from forkd.ops.fork import ForkOptions, fork
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.specs.errors import CaptureFailed, ForkdError, NoSpace
from forkd.specs.requests import BranchRequest, EvalRequest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
MODES = ("full", "diff", "live")
Tags = Callable[[str], str]


async def value(controller: AsyncController, sandbox_id: str, code: str) -> str:
    answer = await controller.eval_code(sandbox_id, code, 60)
    assert answer["error"] is None, answer
    return str(answer["result"])


@pytest.mark.parametrize("mode", MODES)
async def test_grandchildren_inherit_and_what_they_change_stays_theirs(
    controller: AsyncController, fresh_tag: Tags, mode: str
) -> None:
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    setup = (
        "import os, hashlib, subprocess\nblob = os.urandom(30 << 20)\nos.chdir('/var')\nos.environ['MARK'] = 'kept'\n"
        "handle = open('/tmp/open', 'w'); handle.write('half')\n"
        "worker = subprocess.Popen(['sleep', '1000'])\nhashlib.sha256(blob).hexdigest()"
    )
    digest = await value(controller, source, setup)
    tag = fresh_tag(mode)
    info = await controller.branch_sandbox(source, tag=tag, mode=mode)
    assert info["status"] == "ready"
    assert info["branched_from"] == source
    assert await value(controller, source, "worker.poll() is None") == "True"
    children = await controller.spawn_sandboxes(tag, 2)
    probe = (
        "(hashlib.sha256(blob).hexdigest(), os.getcwd(), os.environ['MARK'], worker.poll(), handle.write('x'),"
        " os.path.exists(f'/proc/{worker.pid}'))"
    )
    for child in children:
        assert await value(controller, child["id"], probe) == f"({digest}, '/var', 'kept', None, 1, True)"
    await value(controller, children[0]["id"], "blob = b''; open('/tmp/mine', 'w').close()")
    assert await value(controller, children[1]["id"], "(len(blob) >> 20, os.path.exists('/tmp/mine'))") == "(30, False)"
    assert await value(controller, source, "(len(blob) >> 20, os.path.exists('/tmp/mine'))") == "(30, False)"


@pytest.mark.parametrize("mode", ["diff", "live"])
async def test_a_delta_holds_only_what_changed(controller: AsyncController, fresh_tag: Tags, mode: str) -> None:
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    await value(controller, source, "import os; blob = os.urandom(16 << 20)")
    stats = await controller.sandbox_stats(source)
    tag = fresh_tag(mode)
    info = await controller.branch_sandbox(source, tag=tag, mode=mode)
    assert info["parent_tag"] == PARENT
    changed = info["changed_pages"] * 4096
    assert stats["guest_private_bytes"] <= changed <= stats["guest_private_bytes"] * 1.2 + (1 << 20)
    assert info["diff_physical_bytes"] <= changed * 1.05


async def test_chains_grow_flatten_and_are_guarded(controller: AsyncController, fresh_tag: Tags) -> None:
    tags = [PARENT]
    for depth in range(1, 4):
        child = (await controller.spawn_sandboxes(tags[-1], 1))[0]["id"]
        await value(controller, child, f"layer{depth} = {depth}")
        tags.append(fresh_tag(f"d{depth}"))
        await controller.branch_sandbox(child, tag=tags[-1], mode="live")
        await controller.kill_sandbox(child)
    head = (await controller.spawn_sandboxes(tags[-1], 1))[0]["id"]
    assert await value(controller, head, "(layer1, layer2, layer3)") == "(1, 2, 3)"
    info = await controller.snapshot_info(tags[-1])
    assert (info["chain_depth"], info["ancestors"]) == (3, tags[:3])
    assert (await controller.snapshot_info(tags[2]))["dependents"] == [tags[3]]
    with pytest.raises(ControllerError) as refused:
        await controller.delete_snapshot(tags[2])
    assert (refused.value.status, refused.value.code) == (409, "snapshot_in_use")
    flat = fresh_tag("flat")
    await controller.compact_snapshot(tags[-1], flat)
    assert (await controller.snapshot_info(flat))["chain_depth"] == 0
    child = (await controller.spawn_sandboxes(flat, 1))[0]["id"]
    assert await value(controller, child, "(layer1, layer2, layer3)") == "(1, 2, 3)"
    await controller.delete_snapshot(tags[1], cascade=True)
    left = {row["tag"] for row in await controller.list_snapshots()}
    assert flat in left
    assert not left & set(tags[1:])


async def test_a_missing_parent_is_named(controller: AsyncController, fresh_tag: Tags) -> None:
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    middle, leaf = fresh_tag("middle"), fresh_tag("leaf")
    await controller.branch_sandbox(source, tag=middle, mode="diff")
    child = (await controller.spawn_sandboxes(middle, 1))[0]["id"]
    await controller.branch_sandbox(child, tag=leaf, mode="diff")
    await controller.delete_snapshot(middle, force=True)
    with pytest.raises(ControllerError) as caught:
        await controller.spawn_sandboxes(leaf, 1)
    assert caught.value.code == "chain_broken"
    assert middle in str(caught.value)
    with pytest.raises(ControllerError) as orphaned:
        await controller.branch_sandbox(child, tag=fresh_tag("orphan"), mode="live")
    assert orphaned.value.code == "chain_broken"


async def test_not_waiting_returns_while_it_is_written_and_then_it_is_ready(
    controller: AsyncController, fresh_tag: Tags
) -> None:
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    await value(controller, source, "import os; blob = os.urandom(64 << 20); 1")
    tag = fresh_tag("async")
    info = await controller.branch_sandbox(source, tag=tag, mode="live", wait=False)
    assert info["status"] == "writing"
    with pytest.raises(ControllerError) as early:
        await controller.spawn_sandboxes(tag, 1)
    assert early.value.code in ("snapshot_not_ready", "snapshot_not_found")
    with trio.fail_after(60):
        while (await controller.get_snapshot(tag))["status"] == "writing":
            await trio.sleep(0.05)
    assert (await controller.get_snapshot(tag))["status"] == "ready"
    child = (await controller.spawn_sandboxes(tag, 1))[0]["id"]
    assert await value(controller, child, "len(blob) >> 20") == "64"


async def test_eight_sandboxes_branched_at_the_same_moment_are_all_right(
    controller: AsyncController, fresh_tag: Tags
) -> None:
    sources = await controller.spawn_sandboxes(PARENT, 8)
    tags = [fresh_tag(f"at-once-{index}") for index in range(8)]

    async def one(index: int) -> None:
        await value(controller, sources[index]["id"], f"who = {index}")
        while True:
            try:
                mode = ("diff", "live")[index % 2]
                await controller.branch_sandbox(sources[index]["id"], tag=tags[index], mode=mode)
                return
            except ControllerError as error:
                if error.code != "too_busy":  # a slow host captures four at once and says so
                    raise
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for index in range(8):
            nursery.start_soon(one, index)
    for index, tag in enumerate(tags):
        child = (await controller.spawn_sandboxes(tag, 1))[0]["id"]
        assert await value(controller, child, "who") == str(index)
        await controller.kill_sandbox(child)


async def test_a_live_branch_is_of_one_instant(controller: AsyncController, fresh_tag: Tags) -> None:
    """A thread stamps an increasing counter over 16 MiB in a fixed order; a child must see one single cut.

    In the child it stops at once: a round that went on to its end would cover up what is wrong.
    """
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    stamp = (
        "import threading\n"
        "pages = numpy.zeros((4096, 512), dtype=numpy.int64)\n"
        "go = True\n"
        "def stamp():\n"
        "    count = 0\n"
        "    while True:\n"
        "        count += 1\n"
        "        for page in range(4096):\n"
        "            if not go:\n"
        "                return\n"
        "            pages[page, 0] = count\n"
        "thread = threading.Thread(target=stamp, daemon=True)\n"
        "thread.start()\n"
    )
    await value(controller, source, stamp)
    check = (
        "go = False; thread.join()\n"
        "stamps = pages[:, 0].tolist()\n"
        "cuts = sum(a != b for a, b in zip(stamps, stamps[1:]))\n"
        "(cuts, max(stamps) - min(stamps) <= 1, stamps == sorted(stamps, reverse=True))"
    )
    for turn in range(3):
        tag = fresh_tag(f"cut{turn}")
        await controller.branch_sandbox(source, tag=tag, mode="live")
        child = (await controller.spawn_sandboxes(tag, 1))[0]["id"]
        cuts, near, ordered = eval(await value(controller, child, check))
        assert cuts <= 1 and near and ordered
        await controller.kill_sandbox(child)


async def test_bad_requests_are_refused_with_a_sentence(controller: AsyncController, fresh_tag: Tags) -> None:
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    taken = fresh_tag("taken")
    await controller.branch_sandbox(source, tag=taken, mode="diff")
    cases = [
        ("sb-nobody", {"mode": "full"}, 404, "sandbox_not_found"),
        (source, {"tag": taken}, 409, "tag_taken"),
        (source, {"tag": "../x"}, 400, "bad_tag"),
        (source, {"mode": "magic"}, 400, "bad_input"),
        (source, {"mode": "diff", "diff": True}, 400, "bad_input"),
        (source, {"mode": "full", "wait": False}, 400, "bad_input"),
        (source, {"mode": "diff", "parent_tag": "other"}, 400, "bad_input"),
    ]
    for sandbox_id, fields, status, code in cases:
        with pytest.raises(ControllerError) as caught:
            await controller.branch_sandbox(sandbox_id, **fields)
        assert (caught.value.status, caught.value.code) == (status, code), fields
    assert await value(controller, source, "1 + 1") == "2"


STEPS = [(mode, step) for mode in MODES for step in ("pause", "devices", "memory", "commit")] + [
    ("live", "ghost"),
    ("live", "written"),
]


@pytest.fixture
async def runtime(data_dir: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FORKD_DATA_DIR", str(data_dir))
    async with open_runtime(load_settings()) as made:
        yield made


async def running_source(runtime: Runtime) -> Sandbox:
    child = (await fork(runtime, PARENT, 1, ForkOptions()))[0]
    assert child.sandbox is not None, child.error
    return child.sandbox


async def assert_source_is_well(runtime: Runtime, source: Sandbox, tag: str) -> None:
    answer = await eval_code(runtime, source.id, EvalRequest(code="6 * 7"))
    assert answer.result == "42"
    assert not runtime.snapshots.path(tag).exists()
    assert runtime.snapshots.leftovers() == []
    assert not [path for path in runtime.snapshots.root.iterdir() if tag in path.name]
    assert ghosts_of(source.machine.pid) == []


def ghosts_of(pid: int) -> list[int]:
    """Processes that are copies of a VMM: same command line, another pid, no start of their own."""
    with open(f"/proc/{pid}/cmdline", "rb") as source:
        line = source.read()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != pid:
            try:
                with open(f"{entry.path}/cmdline", "rb") as other:
                    if other.read() == line:
                        found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(("mode", "where"), STEPS)
async def test_whatever_fails_at_any_step_the_source_runs_on(runtime: Runtime, mode: str, where: str) -> None:
    source = await running_source(runtime)
    for error in (NoSpace("the disk is full"), CaptureFailed("made up")):
        tag = f"fault-{mode}-{where}"

        def fail(step: str, error: ForkdError = error) -> None:
            if step == where:
                raise error

        with pytest.raises(type(error)):
            await branch(runtime, source.id, BranchRequest(tag=tag, mode=mode), step=fail)
        await assert_source_is_well(runtime, source, tag)


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_branch_leaves_the_source_running(runtime: Runtime, mode: str) -> None:
    source = await running_source(runtime)
    tag = f"cancelled-{mode}"
    with trio.CancelScope() as scope:

        def cancel(step: str) -> None:
            if step == "memory":
                scope.cancel()

        await branch(runtime, source.id, BranchRequest(tag=tag, mode=mode), step=cancel)
    answer = await eval_code(runtime, source.id, EvalRequest(code="6 * 7"))
    assert answer.result == "42"
    with trio.fail_after(60):
        while tag in runtime.writing:
            await trio.sleep(0.05)
    if runtime.snapshots.path(tag).exists():
        runtime.snapshots.load(tag).check_files()
        runtime.snapshots.remove(tag)


async def test_a_vmm_that_dies_amid_a_branch_is_an_error_and_leaves_no_snapshot(runtime: Runtime) -> None:
    source = await running_source(runtime)
    started = start_time(source.machine.pid)
    assert started > 0

    def kill(step: str) -> None:
        if step == "devices":
            os.kill(source.machine.pid, 9)

    with pytest.raises(ForkdError):
        await branch(runtime, source.id, BranchRequest(tag="vmm-gone", mode="live"), step=kill)
    assert not runtime.snapshots.path("vmm-gone").exists()
    assert runtime.snapshots.leftovers() == []


async def test_the_agent_link_and_a_guest_tcp_connection_survive_many_live_branches(runtime: Runtime) -> None:
    source = await running_source(runtime)
    connect = (
        "import socket, threading\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "near = socket.create_connection(server.getsockname()); far, _ = server.accept()\n"
    )
    await eval_code(runtime, source.id, EvalRequest(code=connect))
    for turn in range(20):
        info = await branch(runtime, source.id, BranchRequest(tag=f"survive-{turn}", mode="live"))
        code = f"near.sendall(b'{turn:04}'); far.recv(4).decode()"
        answer = await eval_code(runtime, source.id, EvalRequest(code=code))
        assert answer.result == f"'{turn:04}'"
        runtime.snapshots.remove(info.tag)


async def test_a_machine_resumes_although_its_capture_was_cancelled_before_it_lent_anything(runtime: Runtime) -> None:
    source = await running_source(runtime)
    await source.machine.pause()
    with trio.CancelScope() as cancelled:
        cancelled.cancel()
        await source.machine.save_devices()
    await source.machine.resume()
    await source.machine.pause()
    await source.machine.resume()
    assert (await source.link.eval("6 * 7", timeout=60)).result == "42"
