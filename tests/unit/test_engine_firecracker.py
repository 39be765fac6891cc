"""The Firecracker engine: every request valid by Firecracker's own description, every misbehaviour met."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio

from forkd.linux.hostprobe import HostProbe
from forkd.linux.process import ProcessHandle, start_time
from forkd.plugins.engine_firecracker import requests as table
from forkd.plugins.engine_firecracker.api import Api
from forkd.plugins.engine_firecracker.engine import FirecrackerEngine
from forkd.plugins.engine_firecracker.machine import CONSOLE, LOG, last_words
from forkd.plugins.engine_firecracker.sockets import listen
from forkd.slots import find_orphans, workers_in
from forkd.specs.engine import BootSpec, EngineContext, MemoryImage, RestoreSpec, Slot
from forkd.specs.errors import (
    BadInput,
    EngineError,
    HostNotReady,
    LaunchFailed,
    MachineGone,
    SnapshotIncompatible,
    ToolMissing,
)
from forkd.specs.models import Hardware, Platform

HERE = Path(__file__).parent
DESCRIPTION = json.loads((HERE.parent / "data/firecracker-api.json").read_text())
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin")
as_root = pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON, reason="needs root and the system's own python3")
HARDWARE = Hardware(vcpus=2, mem_mib=256, network=True)
PLATFORM = Platform(
    engine="firecracker", engine_version="1.12.0", accelerator="kvm", machine="firecracker", cpu="host:x", arch="x86_64"
)


def validate(method: str, path: str, body: dict[str, Any]) -> None:
    """Raise unless Firecracker's description has this request with such a body, and no field it does not know."""
    template = next(name for name in DESCRIPTION["paths"] if re.fullmatch(re.sub(r"{\w+}", "[^/]+", name), path))
    operation = DESCRIPTION["paths"][template][method.lower()]
    reference = next(one["schema"]["$ref"] for one in operation["parameters"] if one["in"] == "body")
    _known(body, reference)
    jsonschema.validate(body, {"$ref": reference, "definitions": DESCRIPTION["definitions"]})


def _known(body: dict[str, Any], reference: str) -> None:
    fields = DESCRIPTION["definitions"][reference.rpartition("/")[2]].get("properties", {})
    assert set(body) <= set(fields), set(body) - set(fields)
    for name, value in body.items():
        if isinstance(value, dict):
            _known(value, fields[name]["$ref"])


@pytest.fixture
def machine_room(tmp_path: Path) -> Path:
    """A host on which Firecracker and KVM seem to work, below its own root."""
    for name, text in (("proc/cpuinfo", "flags\t: fpu vmx\nmodel name\t: Test CPU\n"), ("dev/kvm", "")):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    program = tmp_path / "root/usr/bin/firecracker"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "firecracker_server.py"} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@pytest.fixture
def engine(machine_room: Path) -> FirecrackerEngine:
    return FirecrackerEngine(EngineContext(machine_room / "cache"), HostProbe(machine_room / "root"))


@pytest.fixture
def slot(machine_room: Path) -> Iterator[Slot]:
    directory = machine_room / "run" / "owner" / "slot"
    directory.mkdir(parents=True)
    yield Slot("sb-1", directory)
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and _cwd(pid) == str(directory)]
    assert left == []


def _cwd(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


@pytest.fixture
def how(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda word: monkeypatch.setenv("FAKE_FIRECRACKER", word)


def boot_spec(folder: Path) -> BootSpec:
    for name in ("kernel-file", "initrd-file", "disk"):
        (folder / name).write_bytes(b"x")
    return BootSpec(folder / "kernel-file", folder / "initrd-file", folder / "disk", HARDWARE, "ab" * 16)


def restore_spec(folder: Path) -> RestoreSpec:
    for name in ("state", "image", "disk"):
        (folder / name).write_bytes(b"x" * 4096)
    image = MemoryImage(str(folder / "image"), 256 << 20)
    return RestoreSpec(folder / "state", image, folder / "disk", HARDWARE, PLATFORM)


def sent(slot: Slot) -> list[list[Any]]:
    found: list[list[Any]] = json.loads((slot.directory / "requests.json").read_text())
    return found


def test_every_request_of_the_table_is_valid_by_the_description(tmp_path: Path) -> None:
    networked = Slot("sb-1", tmp_path, tap="tap0")
    requests = [
        *table.boot_requests(boot_spec(tmp_path), networked),
        table.restore_request(restore_spec(tmp_path)),
        table.state_request(paused=True),
        table.state_request(paused=False),
        table.save_request("vmstate"),
        table.save_request("vmstate", "discarded.mem"),
    ]
    assert len({path for _, path, _ in requests}) == 10
    for request in requests:
        validate(*request)


def test_the_validator_would_notice() -> None:
    for request in (
        ("PUT", "/vsock", {"guest_cid": 2, "uds_path": "x"}),
        ("PUT", "/vsock", {"guest_cid": 3}),
        ("PATCH", "/vm", {"state": "Stopped"}),
        ("PUT", "/snapshot/load", {"snapshot_path": "x", "mem_backend": {"backend_type": "File"}}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(*request)
    with pytest.raises(AssertionError):
        validate("PUT", "/snapshot/load", {"snapshot_path": "x", "shared": True})


async def test_a_boot_sends_what_the_table_says_and_the_guest_is_heard(
    engine: FirecrackerEngine, slot: Slot, machine_room: Path
) -> None:
    machine = await engine.boot(boot_spec(machine_room), slot)
    try:
        assert await machine.agent.receive_some(100) == b"hello from the guest"
        for method, path, body in sent(slot):
            validate(method, path, body)
        assert [path for _, path, _ in sent(slot)][-1] == "/actions"
        assert (slot.directory / "kernel").resolve() == machine_room / "kernel-file"
    finally:
        await machine.kill()
    assert "killed by signal 9" in await machine.wait()


async def test_a_restore_is_one_request_and_device_state_comes_without_memory(
    engine: FirecrackerEngine, slot: Slot, machine_room: Path
) -> None:
    machine = await engine.restore(restore_spec(machine_room), slot)
    try:
        assert await machine.agent.receive_some(100) == b"hello from the guest"
        await machine.pause()
        saved = await machine.save_devices()
        await machine.resume()
        assert saved.endswith(b"state")
        assert [path for _, path, _ in sent(slot)] == ["/snapshot/load", "/vm", "/snapshot/create", "/vm"]
        for method, path, body in sent(slot):
            validate(method, path, body)
        assert not (slot.directory / "discarded.mem").exists()
    finally:
        await machine.kill()


async def test_a_version_that_writes_memory_first_is_given_a_file_that_is_thrown_away(
    engine: FirecrackerEngine, slot: Slot, machine_room: Path, how: Callable[[str], None]
) -> None:
    how("memory-first")
    machine = await engine.restore(restore_spec(machine_room), slot)
    try:
        assert (await machine.save_devices()).endswith(b"state")
        assert {path.name for path in slot.directory.iterdir()}.isdisjoint({"devices", "discarded.mem"})
    finally:
        await machine.kill()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("die", "exited with code 148 at launch .*cannot create KVM context"),
        ("die-later", "exited with code 1 at launch"),
        ("refuse", "not supported: /snapshot/load"),
        ("garbage", "which is not HTTP"),
        ("huge", "announced an answer of"),
        ("no-number", "announced an answer of '²'"),
        ("bound-only", "its API cannot be reached"),
    ],
)
async def test_a_launch_that_fails_tells_the_whole_story_and_leaves_nothing(
    engine: FirecrackerEngine, slot: Slot, machine_room: Path, how: Callable[[str], None], word: str, said: str
) -> None:
    how(word)
    with pytest.raises(LaunchFailed) as caught:
        await engine.restore(restore_spec(machine_room), slot)
    assert re.search(said, caught.value.message.replace("\n", " ")), caught.value.message
    assert "--api-sock" in caught.value.message


async def test_a_launch_that_is_cancelled_leaves_nothing(
    engine: FirecrackerEngine, slot: Slot, machine_room: Path, how: Callable[[str], None]
) -> None:
    how("slow")
    with trio.move_on_after(0.5) as scope:
        await engine.restore(restore_spec(machine_room), slot)
    assert scope.cancelled_caught


async def test_a_refused_pause_has_firecrackers_words_and_a_dead_one_says_so(
    engine: FirecrackerEngine, slot: Slot, machine_room: Path
) -> None:
    machine = await engine.restore(restore_spec(machine_room), slot)
    os.kill(machine.pid, 9)
    await machine.wait()
    with pytest.raises(MachineGone, match="is gone"):
        await machine.pause()
    await machine.kill()


async def test_an_answer_that_does_not_come_is_an_error_and_never_taken_for_the_next() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    api = Api(ours)
    with pytest.raises(EngineError, match="did not answer PUT /vsock within"):
        await api.put("/vsock", {}, timeout=0.05)
    await theirs.receive_some(1000)
    with pytest.raises(MachineGone):
        await api.put("/entropy", {}, timeout=1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 \r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length:2 \r\nServer: x\r\n\r\n{}",
    ],
)
async def test_answers_may_come_in_any_pieces(answer: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Api(ours).put, "/entropy", {})
        for byte in answer:
            await theirs.send_all(bytes([byte]))


@pytest.mark.parametrize("body", [b"", b"{", b'"text"', b'{"fault_message": "no"}', b"\xff", b"[" * 100_000])
async def test_every_error_body_is_told(body: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    with pytest.raises(EngineError, match="Firecracker refused PUT /entropy"):
        await Api(ours).put("/entropy", {})


async def test_versions_that_will_not_do_and_hosts_without_kvm_are_refused(
    machine_room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, host = EngineContext(machine_room), HostProbe(machine_room / "root")
    assert FirecrackerEngine.why_not(host) is None
    monkeypatch.setenv("FAKE_FIRECRACKER_VERSION", "1.9.1")
    with pytest.raises(ToolMissing, match=r"is version 1\.9\.1"):
        await FirecrackerEngine(context, host).describe()
    monkeypatch.setenv("FAKE_FIRECRACKER_VERSION", "1.12.0")
    (machine_room / "root/proc/cpuinfo").write_text("flags : fpu\n")
    with pytest.raises(HostNotReady, match="Firecracker needs KVM"):
        await FirecrackerEngine(context, host).describe()
    assert "needs KVM" in (FirecrackerEngine.why_not(host) or "")
    (machine_room / "root/usr/bin/firecracker").unlink()
    with pytest.raises(ToolMissing, match="not on PATH"):
        await FirecrackerEngine(context, host).describe()


async def test_state_of_another_version_or_cpu_is_refused(engine: FirecrackerEngine) -> None:
    import msgspec

    here = await engine.describe()
    engine.check(here.platform, here)
    for field, other in (("engine_version", "1.13"), ("cpu", "host:Other"), ("arch", "aarch64")):
        with pytest.raises(SnapshotIncompatible, match=other):
            engine.check(msgspec.structs.replace(here.platform, **{field: other}), here)


def test_a_jail_is_for_an_unprivileged_user(machine_room: Path) -> None:
    for word in ("root", "0", "-1"):
        with pytest.raises(BadInput):
            FirecrackerEngine(EngineContext(machine_room, {"jail": word}))


async def test_a_jailed_start_goes_through_the_jailer_with_files_of_its_own(machine_room: Path, slot: Slot) -> None:
    engine = FirecrackerEngine(EngineContext(machine_room, {"jail": "65534"}), HostProbe(machine_room / "root"))
    await engine.describe()
    import dataclasses

    command = engine._command(dataclasses.replace(slot, netns="/run/netns/forkd-sb-1"))
    words = " ".join(command)
    assert "jailer --id sb-1 --exec-file" in words and "--uid 65534 --gid 65534 --netns /run/netns/forkd-sb-1" in words
    assert words.endswith("-- --api-sock api.sock")


@pytest.fixture
def jailed(machine_room: Path, monkeypatch: pytest.MonkeyPatch) -> FirecrackerEngine:
    """An engine whose Firecracker is called otherwise and linked to, as from a release, and jailed as users of many."""
    program, jailer = machine_room / "root/usr/bin/firecracker", machine_room / "bin/jailer"
    # The system's Python, as the tests' own may be where no other user may look.
    program.write_text(f'#!/bin/sh\nexec {SYSTEM_PYTHON} {HERE / "firecracker_server.py"} "$@"\n')
    program.chmod(0o755)
    program.rename(program.with_name("firecracker-v1.12.0"))
    program.symlink_to("firecracker-v1.12.0")
    jailer.parent.mkdir()
    jailer.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "jailer_stand_in.py"} "$@"\n')
    jailer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{jailer.parent}:{os.environ['PATH']}")
    context = EngineContext(machine_room, {"jail": "1879048192-2013265919"})
    return FirecrackerEngine(context, HostProbe(machine_room / "root"))


@as_root
async def test_a_jailed_machine_is_a_user_of_its_own_and_is_found_adopted_and_ended(
    jailed: FirecrackerEngine, machine_room: Path, slot: Slot
) -> None:
    machine = await jailed.restore(restore_spec(machine_room), slot)
    try:
        assert 1879048192 <= os.stat(f"/proc/{machine.pid}").st_uid <= 2013265919
        assert _cwd(str(machine.pid)) == "/", "as the kernel tells it"
        assert workers_in(slot.directory) == [machine.pid]
        (orphan,) = find_orphans(machine_room / "run")
        assert orphan.pids == (machine.pid,)
        await machine._api.aclose()
        (root,) = slot.directory.glob("jail/*/*/root")
        listen(root, "vsock.sock", None).close()  # a guest that does not wait on it: it will knock
        adopted = await jailed.adopt(slot, machine.pid, start_time(machine.pid))
        await adopted.pause()
        await adopted.kill()
    finally:
        await machine.kill()
    assert workers_in(slot.directory) == []


@as_root
async def test_a_jailed_machine_dies_with_its_owner(jailed: FirecrackerEngine, machine_room: Path, slot: Slot) -> None:
    restore_spec(machine_room)
    owner = await trio.lowlevel.open_process(
        [sys.executable, __file__, str(machine_room), str(slot.directory)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert owner.stdout is not None
    with trio.fail_after(60):
        pid = int(await owner.stdout.receive_some(20))
        process = ProcessHandle.of_running(pid, start_time(pid))
        assert process is not None
        owner.kill()
        await owner.wait()
        await process.wait()


@as_root
async def test_a_file_that_cannot_be_linked_into_a_jail_is_named(
    jailed: FirecrackerEngine, machine_room: Path, slot: Slot
) -> None:
    import dataclasses

    memory = MemoryImage("/proc/self/maps", 256 << 20)
    with pytest.raises(LaunchFailed, match="/proc/self/maps cannot be linked into a jail"):
        await jailed.restore(dataclasses.replace(restore_spec(machine_room), memory=memory), slot)


async def test_a_machine_that_cannot_be_reached_is_ended_and_not_left_to_itself(
    engine: FirecrackerEngine, machine_room: Path, slot: Slot
) -> None:
    machine = await engine.restore(restore_spec(machine_room), slot)
    try:
        (slot.directory / "api.sock").unlink()
        with pytest.raises(MachineGone, match="does not answer"):
            await engine.adopt(slot, machine.pid, start_time(machine.pid))
        assert _cwd(str(machine.pid)) == ""
    finally:
        await machine.kill()


def test_last_words_are_the_end_of_files_and_no_links(tmp_path: Path) -> None:
    with open(tmp_path / LOG, "wb") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe end")
    (tmp_path / CONSOLE).symlink_to("/etc/passwd")
    words = last_words(tmp_path)
    assert words.endswith("the end") and "root" not in words


def _own(room: Path, directory: Path) -> None:
    """An owner that starts a jailed machine, says which, and waits."""

    async def main() -> None:
        context = EngineContext(room, {"jail": "65534"})
        slot = Slot("sb-1", directory)
        assert slot.die_with_owner
        machine = await FirecrackerEngine(context, HostProbe(room / "root")).restore(restore_spec(room), slot)
        print(machine.pid, flush=True)
        await trio.sleep_forever()

    trio.run(main)


if __name__ == "__main__":
    _own(Path(sys.argv[1]), Path(sys.argv[2]))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_link_in_the_place_of_a_socket_gives_its_target_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (victim := tmp_path / "victim").touch()
    chown = os.chown

    def raced(path: Path, *owner: int, **how: bool) -> None:
        path.unlink()
        path.symlink_to(victim)  # as the jailed user may: the directory is his
        chown(path, *owner, **how)

    monkeypatch.setattr(os, "chown", raced)
    listen(tmp_path, "vsock.sock", 12345).close()
    assert (tmp_path / "vsock.sock").lstat().st_uid == 12345
    assert victim.stat().st_uid == 0
