"""Children of a running sandbox: all from one instant, each its own; the source hardly notices."""

from __future__ import annotations

import array
import ast
import ctypes
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.config import load_settings
from forkd.ops.branch import branch
from forkd.ops.children import Child
from forkd.ops.fork import ForkOptions, fork
from forkd.ops.fork_running import fork_running
from forkd.ops.remove import remove_snapshot
from forkd.plugins.engine_qemu.machine import QemuMachine
from forkd.plugins.engine_qemu.template import QemuTemplate
from forkd.runtime import Runtime, open_runtime
from forkd.sandbox import Sandbox, end_sandbox
from forkd.sdk.async_controller import AsyncController
from forkd.specs.engine import Slot
from forkd.specs.errors import LaunchFailed
from forkd.specs.requests import BranchRequest

pytestmark = pytest.mark.vm
PARENT = "python-numpy"

# A connection between two threads of the guest that counts in both directions.
TALK = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer = server.accept()[0]
def echo():
    while data := peer.recv(100):
        peer.sendall(data[::-1])
threading.Thread(target=echo, daemon=True).start()
def talk(word):
    client.sendall(word)
    return client.recv(100)
"""


@pytest.fixture
async def runtime(data_dir: Path) -> AsyncIterator[Runtime]:
    async with open_runtime(load_settings({}, data_dir=data_dir)) as made:
        yield made


async def ask(sandbox: Sandbox, code: str) -> Any:
    answer = await sandbox.link.eval(code, timeout=60)
    assert answer.error is None, answer
    return None if answer.result is None else ast.literal_eval(answer.result)


async def one_of(runtime: Runtime, tag: str) -> Sandbox:
    return sandboxes(await fork(runtime, tag, 1, ForkOptions(spawn="restore")))[0]


def sandboxes(children: list[Child]) -> list[Sandbox]:
    assert [child.error for child in children] == [None] * len(children)
    return [child.sandbox for child in children if child.sandbox is not None]


async def test_children_have_what_the_source_had_at_one_instant_and_then_go_their_own_ways(runtime: Runtime) -> None:
    source = await one_of(runtime, PARENT)
    await ask(source, "import itertools, threading, time; ticks = itertools.count(); now = 0")
    await ask(source, "def run():\n    global now\n    while True:\n        now = next(ticks); time.sleep(0.001)")
    await ask(source, "threading.Thread(target=run, daemon=True).start(); blob = bytes(range(256)) * 4096")
    await ask(source, TALK)
    children = await fork_running(runtime, source.id, 4)
    made = sandboxes(children)
    assert {child.pause_ms for child in children} == {children[0].pause_ms}
    assert {each.info.spawned_by for each in made} == {"fork"}
    code = (
        "import os, socket, hashlib\n[hashlib.md5(blob).hexdigest(), talk(b'abc'), socket.gethostname(), os.urandom(8)]"
    )
    answers = [await ask(each, code) for each in [*made, source]]
    assert len({(answer[0], answer[1]) for answer in answers}) == 1
    assert [answer[2] for answer in answers] == [each.id for each in [*made, source]]
    assert len({answer[3] for answer in answers}) == 5
    first = await ask(source, "now")
    with trio.fail_after(30):
        while await ask(source, "now") == first:
            await trio.lowlevel.checkpoint()
    await ask(made[0], "blob = b''")
    assert [await ask(each, "len(blob)") for each in [*made, source]] == [0, *[1 << 20] * 4]


async def test_a_child_of_a_child_can_be_branched_and_forked_from_its_branch(
    runtime: Runtime, tags: Callable[[str], str]
) -> None:
    source = await one_of(runtime, PARENT)
    await ask(source, "import hashlib, os; blob = os.urandom(6 << 20); digest = hashlib.sha256(blob).hexdigest()")
    child = sandboxes(await fork_running(runtime, source.id, 1))[0]
    grandchild = sandboxes(await fork_running(runtime, child.id, 1))[0]
    await ask(grandchild, "more = os.urandom(1 << 20); own = hashlib.sha256(more).hexdigest()")
    expected = await ask(grandchild, "(digest, own)")
    for mode in ("full", "diff", "live"):
        tag = tags(mode)
        await branch(runtime, grandchild.id, BranchRequest(tag=tag, mode=mode))
        parent = runtime.snapshots.load(tag).manifest.parent
        assert grandchild.source is not None
        assert parent is None or parent.tag == grandchild.source.manifest.tag
        for spawn in ("restore", "template"):
            again = sandboxes(await fork(runtime, tag, 1, ForkOptions(spawn=spawn)))[0]
            assert again.info.spawned_by == spawn
            seen = await ask(again, "(hashlib.sha256(blob).hexdigest(), hashlib.sha256(more).hexdigest())")
            assert seen == expected
            await end_sandbox(again)


async def test_a_sandbox_that_was_branched_has_no_descriptor_more_and_is_still_cloned(
    runtime: Runtime, tags: Callable[[str], str]
) -> None:
    source = await one_of(runtime, PARENT)
    before = os.listdir(f"/proc/{source.machine.pid}/fd")
    for mode in ("full", "diff", "live", "live"):
        await branch(runtime, source.id, BranchRequest(tag=tags(mode), mode=mode))
        assert os.listdir(f"/proc/{source.machine.pid}/fd") == before, mode
    child = sandboxes(await fork_running(runtime, source.id, 1))[0]
    assert (child.info.spawned_by, child.info.warnings) == ("fork", [])


async def test_a_machine_with_something_unknown_open_is_forked_through_a_snapshot_and_it_says_why(
    runtime: Runtime, tags: Callable[[str], str]
) -> None:
    source = await one_of(runtime, PARENT)
    await ask(source, "value = 42")
    await hand_descriptor(source.machine, "inotify")
    made = sandboxes(await fork_running(runtime, source.id, 2))
    assert [await ask(each, "value") for each in [*made, source]] == [42, 42, 42]
    for each in made:
        assert each.info.spawned_by == "restore"
        assert "inotify" in each.info.warnings[0]
    assert runtime.templates.counts.refusals == 1
    await end_sandbox(made[0])
    await end_sandbox(made[1])
    await remove_snapshot(runtime, made[0].info.snapshot_tag)


async def test_the_route_and_the_sdk_fork_a_running_sandbox(controller: AsyncController) -> None:
    source = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    await controller.eval_code(source, "value = 7")
    children = await controller.fork_sandbox(source, 3)
    assert len({child["id"] for child in children} | {source}) == 4
    for child in children:
        assert (await controller.eval_code(child["id"], "value + 1"))["result"] == "8"


async def hand_descriptor(machine: Any, kind: str) -> None:
    """Give the VMM a descriptor it did not have, as QMP allows."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init() if kind == "inotify" else libc.timerfd_create(1, 0)
    stream = machine._qmp._stream
    message = b'{"execute": "getfd", "arguments": {"fdname": "unknown"}, "id": "x"}\n'
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    await stream.socket.sendmsg([message], rights)
    os.close(descriptor)
    assert b"return" in await stream.receive_some(65536)


@pytest.fixture
async def tags(runtime: Runtime) -> Any:
    import secrets

    given: list[str] = []

    def make(name: str) -> str:
        given.append(f"t-{name}-{secrets.token_hex(3)}")
        return given[-1]

    yield make
    for tag in given:
        if runtime.snapshots.path(tag).exists():
            await remove_snapshot(runtime, tag, force=True)


async def test_a_clone_that_fails_is_made_once_more_and_counted(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await one_of(runtime, PARENT)
    await ask(source, "thought = 11")
    clone, failed = QemuTemplate.clone, []

    async def failing_once(template: QemuTemplate, slot: Slot) -> QemuMachine:
        if not failed:
            failed.append(slot.id)
            raise LaunchFailed("made up")
        return await clone(template, slot)

    monkeypatch.setattr(QemuTemplate, "clone", failing_once)
    children = sandboxes(await fork_running(runtime, source.id, 3))
    assert [await ask(child, "thought") for child in children] == [11, 11, 11]
    assert failed[0] not in [child.id for child in children]
    assert runtime.templates.counts.fallbacks == 1
