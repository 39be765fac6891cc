"""The agent between sessions: output is kept for who comes back; directories travel whole; changes are told."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.guestlink import GuestLink, GuestStream, fresh_identity, tree_done
from forkd.specs.errors import BadInput, Conflict, GuestDenied, GuestFileNotFound, GuestUnreachable, ProcessNotFound
from tests.unit.guest_support import AgentProcess, check_shape, running_agent


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as running:
        yield running


async def start(agent: AgentProcess, *args: str, **options: Any) -> int:
    """Start a command in a session that ends at once."""
    async with agent.link() as link:
        stream = link.exec(list(args), **options)
        await stream.__aenter__()
        pid: int = (await stream.started())["pid"]
        await link.aclose()
    return pid


async def everything(stream: GuestStream) -> bytes:
    return b"".join([data async for _, data in stream])


async def ended(link: GuestLink, pid: int) -> None:
    """Wait until the command has ended, without taking what it said."""
    while any(row.pid == pid and row.running for row in await link.procs()):
        await trio.sleep(0.01)


async def test_a_stream_that_was_let_go_carries_another_session(agent: AgentProcess) -> None:
    stream = agent.stream()
    async with trio.open_nursery() as nursery:
        first = await GuestLink.open(stream, agent.sync, nursery, resume=fresh_identity("first"))
        await first.eval("kept = 7", timeout=30)
        await first.let_go()
        with pytest.raises(GuestUnreachable):
            await first.eval("kept", timeout=30)
        second = await GuestLink.open(stream, agent.sync, nursery, resume=fresh_identity("second"))
        assert (await second.eval("kept", timeout=30)).result == "7"
        await second.aclose()


async def test_who_comes_back_gets_what_was_said_and_how_it_ended(agent: AgentProcess, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alone")
    os.mkfifo(tmp_path / "gate")
    script = f"cat {tmp_path}/alone; echo early; echo wrong >&2; cat {tmp_path}/gate; exit 7"
    pid = await start(agent, "sh", "-c", script)
    with trio.fail_after(20):
        async with agent.link() as link:
            rows = await link.procs()
            mine = next(row for row in rows if row.pid == pid)
            assert (mine.running, mine.attached) == (True, False)
            (tmp_path / "alone").write_text("")  # from here on it talks to nobody
            async with link.attach(pid) as stream:
                assert (await stream.started())["dropped"] == 0
                assert {await anext(stream), await anext(stream)} == {("stdout", b"early\n"), ("stderr", b"wrong\n")}
                with pytest.raises(Conflict):
                    await link.request({"op": "attach", "pid": pid}, timeout=5)
                (tmp_path / "gate").write_text("late\n")
                assert await everything(stream) == b"late\n"
                assert stream.answer is not None
                assert stream.answer["exit_code"] == 7
            with pytest.raises(ProcessNotFound):
                await link.request({"op": "attach", "pid": pid}, timeout=5)


async def test_a_command_keeps_its_tag_and_whether_it_takes_input(agent: AgentProcess) -> None:
    pids = [await start(agent, "cat", stdin=True, tag="fed"), await start(agent, "sleep", "1000")]
    with trio.fail_after(20):
        async with agent.link() as link:
            check_shape({"ok": True, **await link.request({"op": "procs"}, timeout=5)}, "answer_procs")
            known = {row.pid: (row.tag, row.stdin) for row in await link.procs()}
            assert [known[pid] for pid in pids] == [("fed", True), (None, False)]
            async with link.attach(pids[0]) as fed, link.attach(pids[1]) as sleeper:
                await fed.end_input()
                assert await everything(fed) == b""
                await sleeper.started()
                sleeper.control({"signal": 9})
                await everything(sleeper)


async def test_a_command_that_ended_alone_is_remembered_with_the_end_of_its_output(agent: AgentProcess) -> None:
    pid = await start(agent, "sh", "-c", "head -c 3000000 /dev/zero; echo end; exit 3")
    with trio.fail_after(20):
        async with agent.link() as link:
            await ended(link, pid)
            async with link.attach(pid, window=1000) as stream:
                dropped = (await stream.started())["dropped"]
                said = await everything(stream)
                assert said.endswith(b"end\n")
                assert dropped + len(said) <= 3000004
                assert len(said) <= 256 * 1024
                assert stream.answer is not None
                assert stream.answer["exit_code"] == 3


async def test_input_and_terminals_outlive_a_session(agent: AgentProcess) -> None:
    pid = await start(agent, "sh", "-c", "stty -echo; read line; echo got $line; stty size", pty=(5, 6))
    with trio.fail_after(20):
        async with agent.link() as link, link.attach(pid) as stream:
            stream.control({"resize": [50, 60]})
            await stream.send_data(b"word\n")
            assert (await everything(stream)).replace(b"\r", b"").endswith(b"got word\n50 60\n")


async def test_a_cancelled_attachment_kills_the_command(agent: AgentProcess) -> None:
    pid = await start(agent, "sleep", "1000")
    with trio.fail_after(20):
        async with agent.link() as link:
            async with link.attach(pid) as stream:
                await stream.started()
            await ended(link, pid)


def tar_of(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size, info.mode = len(data), 0o640
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_a_directory_goes_in_and_comes_out_the_same(agent: AgentProcess, tmp_path: Path) -> None:
    async with agent.link() as link:
        target = tmp_path / "new" / "tree"
        await link.write_tree(str(target), pieces(tar_of(a=b"1", sub__b=bytes(300000))), make_parents=True)
        assert (target / "a").read_bytes() == b"1"
        assert (target / "a").stat().st_mode & 0o777 == 0o640
        assert (target / "sub" / "b").stat().st_size == 300000
        (target / "link").symlink_to("a")
        async with link.read_tree(str(target)) as stream:
            said = b"".join([data async for name, data in stream if name == "stdout"])
            tree_done(stream, b"")
        with tarfile.open(fileobj=io.BytesIO(said)) as tar:
            assert sorted(tar.getnames()) == [".", "./a", "./link", "./sub", "./sub/b"]
            assert tar.getmember("./link").linkname == "a"
        await link.write_tree(str(target), pieces(tar_of(a=b"2")))
        assert (target / "a").read_bytes() == b"2"
        assert (target / "sub" / "b").exists()


async def test_half_a_directory_never_appears(agent: AgentProcess, tmp_path: Path) -> None:
    whole = tar_of(a=b"1", b=bytes(100000))
    async with agent.link() as link:
        with pytest.raises(BadInput, match="no tar archive"):
            await link.write_tree(str(tmp_path / "tree"), pieces(whole[:50000]))

        async def breaks_off() -> AsyncIterator[bytes]:
            yield whole[:50000]
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await link.write_tree(str(tmp_path / "tree"), breaks_off())
        with pytest.raises(BadInput, match="leads out"):
            await link.write_tree(str(tmp_path / "tree"), pieces(tar_of(**{"..__evil": b"x"})))
        with trio.fail_after(10):
            while list(tmp_path.iterdir()):
                await trio.sleep(0.01)


async def test_directories_that_are_not_there_or_no_directories_are_refused(
    agent: AgentProcess, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    async with agent.link() as link:
        for op in ("pack", "watch"):
            with pytest.raises(GuestFileNotFound):
                await link.request({"op": op, "path": str(tmp_path / "none")}, timeout=5)
            with pytest.raises(BadInput):
                await link.request({"op": op, "path": str(tmp_path / "file")}, timeout=5)
        with pytest.raises(BadInput):
            await link.write_tree(str(tmp_path / "file"), pieces(b""))
        with pytest.raises(BadInput):
            await link.stat("/" + "x" * 300)
        with pytest.raises(Conflict):
            await link.remove(str(tmp_path))
        if os.geteuid() != 0:
            with pytest.raises(GuestDenied):
                await link.mkdir("/proc/x")


async def test_changes_below_a_directory_are_told_also_in_new_ones(agent: AgentProcess, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    told: list[tuple[str, str]] = []
    with trio.fail_after(20):
        async with agent.link() as link, link.watch(str(tmp_path), recursive=True) as stream:

            async def hear(kind: str, path: str) -> None:
                while (kind, path) not in told:
                    for line in (await anext(stream))[1].splitlines():
                        check_shape(json.loads(line), "watch_event")
                        told.append((json.loads(line)["type"], json.loads(line)["path"]))

            await stream.started()
            (tmp_path / "old" / "x").write_text("1")
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "deep").mkdir()
            await hear("create", "new/deep")
            (tmp_path / "old" / "x").rename(tmp_path / "new" / "y")
            (tmp_path / "new" / "y").chmod(0o600)
            (tmp_path / "new" / "y").unlink()
            await hear("remove", "new/y")
            (tmp_path / "new" / "deep" / "z").touch()
            await hear("create", "new/deep/z")
    assert told[:2] == [("create", "old/x"), ("write", "old/x")]
    assert ("rename", "old/x") in told
    assert ("create", "new/y") in told
    assert ("chmod", "new/y") in told


async def test_a_host_that_does_not_read_loses_events_and_hears_so(agent: AgentProcess, tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with agent.link() as link, link.open_stream({"op": "watch", "path": str(tmp_path)}, window=200) as stream:
            await stream.started()
            for number in range(100):
                (tmp_path / str(number)).touch()
            kinds: list[str] = []
            while "overflow" not in kinds:
                kinds += [json.loads(line)["type"] for line in (await anext(stream))[1].splitlines()]
