"""Files both ways: any size, parts, directories, changes as they happen; refused by name, never half-written."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from tests.conftest import Daemon, large_parent, resident_mib

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
MIB = 1 << 20


@pytest.fixture
async def child(controller: AsyncController) -> AsyncIterator[str]:
    with trio.fail_after(120):
        yield (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]


def numbered(count: int) -> bytes:
    """A mebibyte no other number has."""
    return hashlib.sha256(str(count).encode()).digest() * (MIB // 32)


async def big(mebibytes: int, digest: Any) -> AsyncIterator[bytes]:
    for count in range(mebibytes):
        data = numbered(count)
        digest.update(data)
        yield data


async def test_a_large_file_goes_in_and_comes_out_the_same(controller: AsyncController, child: str) -> None:
    sent, got = hashlib.sha256(), hashlib.sha256()
    entry = await controller.write_file(child, "/root/deep/er/big", big(32, sent), make_parents=True, mode=0o600)
    assert (entry["size"], entry["mode"], entry["type"]) == (32 * MIB, 0o600, "file")
    async with controller.open_file(child, "/root/deep/er/big") as data:
        async for piece in data:
            got.update(piece)
    assert got.digest() == sent.digest()


async def test_parts_of_a_file_and_links_and_proc(controller: AsyncController, child: str) -> None:
    await controller.write_file(child, "/tmp/abc", b"0123456789")
    await controller.exec_command(child, ["ln", "-s", "/tmp/abc", "/tmp/link"])
    assert await controller.read_file(child, "/tmp/link") == b"0123456789"
    assert await controller.read_file(child, "/tmp/abc", offset=3, length=4) == b"3456"
    assert await controller.read_file(child, "/tmp/abc", offset=8) == b"89"
    assert (await controller.read_file(child, "/proc/uptime")).endswith(b"\n")
    with pytest.raises(ControllerError) as caught:
        await controller.read_file(child, "/tmp/abc", offset=10)
    assert (caught.value.status, caught.value.code) == (416, "range_not_possible")
    assert (await controller.stat_file(child, "/tmp/link"))["type"] == "symlink"
    assert (await controller.stat_file(child, "/tmp/link", follow=True))["size"] == 10
    await controller.write_file(child, "/tmp/abc", b"!", append=True)
    assert await controller.read_file(child, "/tmp/abc") == b"0123456789!"


async def test_directories_are_made_listed_moved_changed_and_removed(controller: AsyncController, child: str) -> None:
    await controller.make_directory(child, "/tmp/a/b/c", parents=True)
    await controller.write_file(child, "/tmp/a/b/f", b"x")
    assert [row["name"] for row in await controller.list_files(child, "/tmp/a")] == ["b"]
    deep = await controller.list_files(child, "/tmp/a", depth=5)
    assert [row["path"] for row in deep] == ["/tmp/a/b", "/tmp/a/b/c", "/tmp/a/b/f"]
    assert (await controller.move_file(child, "/tmp/a/b", "/tmp/a/z"))["path"] == "/tmp/a/z"
    assert (await controller.change_mode(child, "/tmp/a/z/f", 0o4755))["mode"] == 0o4755
    with pytest.raises(ControllerError) as caught:
        await controller.remove_file(child, "/tmp/a")
    assert (caught.value.status, caught.value.hint) == (409, "remove it recursively")
    await controller.remove_file(child, "/tmp/a", recursive=True)
    with pytest.raises(ControllerError) as caught:
        await controller.stat_file(child, "/tmp/a")
    assert (caught.value.status, caught.value.code) == (404, "guest_file_not_found")


async def test_whole_directories_travel_as_tar(controller: AsyncController, child: str) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("x/one", b"1"), ("x/two", bytes(MIB))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    entry = await controller.write_tree(child, "/srv/tree", out.getvalue())
    assert entry["type"] == "dir"
    async with controller.open_tree(child, "/srv/tree") as pieces:
        back = io.BytesIO(b"".join([piece async for piece in pieces]))
    with tarfile.open(fileobj=back) as tar:
        assert sorted(tar.getnames()) == [".", "./x", "./x/one", "./x/two"]


async def test_changes_are_told_while_they_happen(controller: AsyncController, child: str) -> None:
    seen: list[tuple[str, str]] = []
    ready = trio.Event()
    await controller.make_directory(child, "/tmp/w")
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await controller.watch_files(
                child, "/tmp/w", lambda change: seen.append((change["type"], change["path"])), True, ready.set
            )

        nursery.start_soon(watch)
        await ready.wait()
        await controller.exec_command(child, ["sh", "-c", "cd /tmp/w; mkdir d; echo 1 >d/f; mv d/f g; rm g; rmdir d"])
        await controller.remove_file(child, "/tmp/w")  # which ends the watching
    assert ("create", "d") in seen
    assert ("create", "g") in seen
    assert ("remove", "g") in seen


async def test_what_is_not_possible_is_refused_by_name(controller: AsyncController, child: str) -> None:
    await controller.write_file(child, "/tmp/file", b"x")
    refusals: list[tuple[Any, int, str]] = [
        (controller.read_file(child, "/none"), 404, "guest_file_not_found"),
        (controller.read_file(child, "/tmp"), 400, "bad_input"),
        (controller.read_file(child, "relative"), 400, "bad_input"),
        (controller.read_file(child, "/tmp/\0"), 400, "bad_input"),
        (controller.read_file(child, "/" + "x" * 300), 400, "bad_input"),
        (controller.read_file(child, "/" + "x/" * 3000), 400, "bad_input"),
        (controller.read_file("sb-none", "/etc/passwd"), 404, "sandbox_not_found"),
        (controller.write_file(child, "/none/file", b""), 404, "guest_file_not_found"),
        (controller.write_file(child, "/tmp", b""), 400, "bad_input"),
        (controller.write_file(child, "/tmp/file/x", b""), 400, "bad_input"),
        (controller.write_file(child, "/proc/x", b""), 404, "guest_file_not_found"),
        (controller.write_file(child, "/tmp/x", b"", user="nobody-at-all"), 400, "bad_input"),
        (controller.list_files(child, "/tmp/file"), 400, "bad_input"),
        (controller.list_files(child, "/tmp", depth=0), 400, "bad_input"),
        (controller.make_directory(child, "/tmp"), 409, "conflict"),
        (controller.change_mode(child, "/tmp/file", 1 << 20), 400, "bad_input"),
        (controller.write_tree(child, "/tmp/t", b"no tar at all" * 1000), 400, "bad_input"),
        (controller.watch_files(child, "/none", lambda change: None), 404, "guest_file_not_found"),
    ]
    for number, (call, status, code) in enumerate(refusals):
        with pytest.raises(ControllerError) as caught:
            await call
        assert (caught.value.status, caught.value.code) == (status, code), (number, caught.value)
    while [row["name"] for row in await controller.list_files(child, "/tmp")] != ["file"]:
        await trio.sleep(0.05)  # what an unpacking left half-made is removed behind its back


async def test_names_that_are_no_text_can_be_used(controller: AsyncController, child: str) -> None:
    await controller.eval_code(child, "open(b'/tmp/\\xff\\xfe', 'wb').write(b'odd')")
    row = (await controller.list_files(child, "/tmp"))[0]
    assert row["name_b64"] == "//4="
    answer = await controller._client.get(f"/v1/sandboxes/{child}/files?path=/tmp/%ff%fe")
    assert answer.content == b"odd"


async def test_an_upload_that_breaks_off_leaves_nothing(controller: AsyncController, child: str) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield bytes(MIB)
        raise httpx.ReadError("the client's own disk broke")

    with pytest.raises((ControllerError, httpx.ReadError)):
        await controller.write_file(child, "/tmp/half", breaks())
    with pytest.raises(trio.TooSlowError), trio.fail_after(1):

        async def hangs() -> AsyncIterator[bytes]:
            yield bytes(MIB)
            await trio.sleep_forever()

        await controller.write_file(child, "/tmp/half", hangs())
    while await controller.list_files(child, "/tmp"):
        await trio.sleep(0.05)


async def test_a_full_guest_says_so_and_keeps_nothing(controller: AsyncController, child: str) -> None:
    made = await controller.exec_command(
        child, ["sh", "-c", "mkdir /tmp/small && mount -t tmpfs -o size=1m none /tmp/small"]
    )
    assert made["exit_code"] == 0, made
    with pytest.raises(ControllerError) as caught:
        await controller.write_file(child, "/tmp/small/x", bytes(3 * MIB))
    assert (caught.value.status, caught.value.code) == (507, "no_space")
    assert await controller.list_files(child, "/tmp/small") == []


@pytest.mark.slow
async def test_a_gibibyte_goes_up_and_comes_down_and_the_daemon_does_not_grow(data_dir: Path, daemon: Daemon) -> None:
    async with AsyncController(daemon.url, timeout=None) as controller:
        child = (await controller.spawn_sandboxes(await large_parent(controller, data_dir), 1))[0]["id"]
        await controller.write_file(child, "/root/big", big(1, hashlib.sha256()))  # what is loaded on first use
        await controller.read_file(child, "/root/big")
        pid, sent, got = daemon.process.pid, hashlib.sha256(), hashlib.sha256()
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here
        before = resident_mib(pid)
        assert (await controller.write_file(child, "/root/big", big(1024, sent)))["size"] == 1024 * MIB
        async with controller.open_file(child, "/root/big") as data:
            async for piece in data:
                got.update(piece)
        grown = resident_mib(pid, "VmHWM") - before
        in_guest = (await controller.exec_command(child, ["sha256sum", "/root/big"], 600))["stdout"].split()[0]
    print(f"the daemon grew by {grown:.1f} MiB at its peak")
    assert got.hexdigest() == sent.hexdigest() == in_guest
    assert grown < 20
