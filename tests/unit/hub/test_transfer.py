"""Push and pull without machines: no bytes twice, interruptions cost nothing, faults never pass as success."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from forkd.httpclient import Patience
from forkd.hub import refs
from forkd.ops.hub import check, list_packages
from forkd.ops.keys import forget_login, save_login
from forkd.ops.pack import pack
from forkd.ops.transfer import _pack_url, pull, push
from forkd.ops.unpack import unpack
from forkd.plugins.hub_http.transport import HttpTransport
from forkd.plugins.hub_oci.transport import OciTransport
from forkd.runtime import Runtime
from forkd.specs.errors import (
    BadInput,
    NoSpace,
    NotFound,
    PackError,
    SnapshotInUse,
    TagTaken,
    TransferError,
    Unauthorized,
)
from forkd.specs.models import Hardware, MemoryRef
from forkd.specs.requests import PackRequest, PullRequest, PushRequest, UnpackRequest
from forkd.specs.transport import Login
from forkd.store import digests, files
from forkd.store.chain import resolve
from tests.hub_support import MEM_MIB, Faulty, add_snapshot, faulty_server, quiet, runtime_at, tree
from tests.oci_support import running_registry
from tests.token_server import running_token_server

HASTY = Patience(attempts=4, first_delay=0.01, longest_delay=0.05, connect=5, silence=1)


@pytest.fixture
async def maker(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A host with the snapshot ``base``."""
    async with runtime_at(tmp_path / "maker") as runtime:
        add_snapshot(runtime, "base")
        yield runtime


@pytest.fixture
async def taker(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A host with nothing, that loses patience soon."""
    async with runtime_at(tmp_path / "taker") as runtime:
        runtime.plugins.hub_transports["http"] = HttpTransport(HASTY)
        yield runtime


@pytest.fixture
def hub(tmp_path: Path) -> str:
    return f"file:{tmp_path}/hub"


def same(one: Runtime, other: Runtime, tag: str) -> None:
    """Both have the same snapshot, byte for byte."""
    theirs, ours = one.snapshots.load(tag), other.snapshots.load(tag)
    assert theirs.manifest.content == ours.manifest.content
    assert theirs.vmstate.read_bytes() == ours.vmstate.read_bytes()
    assert theirs.memory.read_bytes() == ours.memory.read_bytes()
    assert ours.memory.stat().st_blocks <= theirs.memory.stat().st_blocks
    assert theirs.manifest.rootfs is not None
    assert one.disks.find(theirs.manifest.rootfs).read_bytes() == other.disks.find(theirs.manifest.rootfs).read_bytes()


def no_leftovers(runtime: Runtime) -> None:
    hidden = [path.name for path in runtime.blobs.root.iterdir() if path.suffix != ".json" and path.name != "lock"]
    assert hidden == []
    assert [path.name for path in runtime.snapshots.root.iterdir() if path.name.startswith(".")] == [".lock"]


async def test_a_snapshot_reaches_another_host_as_it_was(maker: Runtime, taker: Runtime, hub: str) -> None:
    sent = await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base@1"), quiet)
    assert sent["sent_bytes"] == sent["total_bytes"]
    result = await pull(taker, PullRequest(target="acme/base@1", hub=hub), quiet)
    assert (result["added"], result["tag"]) == (["base"], "base")
    same(maker, taker, "base")
    no_leftovers(taker)
    source = taker.snapshots.load("base").manifest.source
    assert source is not None
    assert (source["from"], source["trust"]) == (f"{hub}/acme/base@1", "unsigned")


async def test_the_second_push_sends_the_manifest_only_and_the_second_pull_nothing(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    again = await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base@2"), quiet)
    assert again["sent_bytes"] < again["total_bytes"] / 100
    for path in maker.blobs.root.iterdir():
        path.unlink()  # a host that has forgotten everything packs again, and sends nothing all the same
    third = await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base@3"), quiet)
    assert third["sent_bytes"] == again["sent_bytes"]
    await pull(taker, PullRequest(target="acme/base", hub=hub), quiet)
    again = await pull(taker, PullRequest(target="acme/base@2", hub=hub), quiet)
    assert (again["fetched_bytes"], again["added"], again["present"]) == (0, [], ["base"])


async def test_a_branch_is_its_delta_and_its_manifest(maker: Runtime, taker: Runtime, hub: str) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    await pull(taker, PullRequest(target="acme/base", hub=hub), quiet)
    branch = add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    sent = await push(maker, PushRequest(tag="branch", target=f"{hub}/acme/branch"), quiet)
    assert sent["sent_bytes"] < branch.manifest.memory.size + branch.manifest.vmstate.size + 4000
    got = await pull(taker, PullRequest(target="acme/branch", hub=hub), quiet)
    assert got["added"] == ["branch"]
    assert got["fetched_bytes"] < branch.manifest.memory.size + branch.manifest.vmstate.size
    same(maker, taker, "branch")
    assert [layer.manifest.tag for layer in resolve(taker.snapshots, "branch")] == ["base", "branch"]


async def test_a_chain_arrives_whole_and_finds_its_parent_under_any_name(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    await push(maker, PushRequest(tag="branch", target=f"{hub}/acme/branch"), quiet)
    await pull(taker, PullRequest(target="acme/base", hub=hub, tag="mine"), quiet)
    result = await pull(taker, PullRequest(target="acme/branch", hub=hub, tag="leaf"), quiet)
    assert (result["added"], result["present"]) == (["leaf"], ["mine"])
    assert [layer.manifest.tag for layer in resolve(taker.snapshots, "leaf")] == ["mine", "leaf"]


async def test_an_ancestor_whose_tag_is_taken_gets_another_and_the_head_is_refused(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    await push(maker, PushRequest(tag="branch", target=f"{hub}/acme/branch"), quiet)
    add_snapshot(taker, "base", seed=99)
    other = add_snapshot(taker, "branch", seed=98)
    with pytest.raises(TagTaken):
        await pull(taker, PullRequest(target="acme/branch", hub=hub), quiet)
    assert taker.snapshots.load("branch").manifest == other.manifest
    leaf = add_snapshot(taker, "leaf", other, seed=97)
    with pytest.raises(SnapshotInUse, match="leaf"):
        await pull(taker, PullRequest(target="acme/branch", hub=hub, force=True), quiet)
    taker.snapshots.remove(leaf.manifest.tag)
    result = await pull(taker, PullRequest(target="acme/branch", hub=hub, force=True), quiet)
    content = maker.snapshots.load("base").manifest.content.removeprefix("sha256:")[:12]
    assert result["added"] == [f"base-{content}", "branch"]
    same(maker, taker, "branch")


async def test_a_snapshot_that_is_here_is_copied_for_another_tag_not_fetched(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    await pull(taker, PullRequest(target="acme/base", hub=hub), quiet)
    result = await pull(taker, PullRequest(target="acme/base", hub=hub, tag="copy"), quiet)
    assert (result["added"], result["fetched_bytes"]) == (["copy"], 0)
    assert taker.snapshots.load("copy").memory.read_bytes() == taker.snapshots.load("base").memory.read_bytes()


async def test_the_same_snapshot_gives_the_same_pack_here_and_there(
    maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
    first = await pack(maker, PackRequest(tag="base", out=str(one / "p.tar.zst")), quiet)
    for path in maker.blobs.root.iterdir():
        path.unlink()
    os.sched_setaffinity(0, cpus := os.sched_getaffinity(0))
    await pack(maker, PackRequest(tag="base", out=str(one / "q.tar.zst")), quiet)
    assert (one / "p.tar.zst").read_bytes() == (one / "q.tar.zst").read_bytes()
    await unpack(taker, UnpackRequest(path=first["path"]), quiet)
    await pack(taker, PackRequest(tag="base", out=str(two / "p.tar.zst")), quiet)
    assert tree(two) == {name: data for name, data in tree(one).items() if name != "q.tar.zst"}
    assert cpus


async def test_layers_that_changed_the_same_pages_share_a_file_in_the_pack_and_each_have_their_own_here(
    maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    one = add_snapshot(maker, "one", maker.snapshots.load("base"), seed=9)
    add_snapshot(maker, "two", one, seed=9)
    made = await pack(maker, PackRequest(tag="two", out=str(tmp_path / "p.tar.zst")), quiet)
    await unpack(taker, UnpackRequest(path=made["path"]), quiet)
    for tag in ("one", "two"):
        same(maker, taker, tag)
    no_leftovers(taker)


async def test_ten_packs_of_one_image_have_one_disk_and_without_it_a_pack_is_refused(
    maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    base = maker.snapshots.load("base").manifest
    for number in range(3):
        add_snapshot(maker, f"other{number}", seed=50 + number, rootfs=base.rootfs)
        await pack(maker, PackRequest(tag=f"other{number}", out=str(tmp_path / f"{number}.tar.zst")), quiet)
    disks = list(tmp_path.glob("*.rootfs.zst"))
    assert len(disks) == 1
    disks[0].rename(tmp_path / "elsewhere")
    with pytest.raises(PackError, match="rootfs"):
        await unpack(taker, UnpackRequest(path=str(tmp_path / "0.tar.zst")), quiet)
    assert taker.snapshots.entries() == []


async def test_a_pack_since_an_ancestor_needs_that_ancestor(maker: Runtime, taker: Runtime, tmp_path: Path) -> None:
    add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    whole = await pack(maker, PackRequest(tag="base", out=str(tmp_path / "base.tar.zst"), bundle=True), quiet)
    small = await pack(maker, PackRequest(tag="branch", out=str(tmp_path / "d.tar.zst"), since="base"), quiet)
    assert small["bytes"] < whole["bytes"] / 10
    with pytest.raises(PackError, match="neither"):
        await unpack(taker, UnpackRequest(path=small["path"]), quiet)
    await unpack(taker, UnpackRequest(path=whole["path"]), quiet)
    assert (await unpack(taker, UnpackRequest(path=small["path"]), quiet))["added"] == ["branch"]
    same(maker, taker, "branch")
    with pytest.raises(BadInput, match="ancestor"):
        await pack(maker, PackRequest(tag="branch", out=str(tmp_path / "x.tar.zst"), since="branch"), quiet)


async def test_a_registry_is_listed_searched_and_checked(maker: Runtime, taker: Runtime, hub: str) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base", description="a warm thing"), quiet)
    await push(maker, PushRequest(tag="base", target=f"{hub}/zoo/other@3"), quiet)
    rows = await list_packages(taker, hub)
    assert [(row["package"], row["version"]) for row in rows] == [("acme/base", "latest"), ("zoo/other", "3")]
    assert [row["package"] for row in await list_packages(taker, hub, "WARM acme")] == ["acme/base"]
    found = await check(taker, "acme/base", hub)
    assert (found["runs_here"], found["tag"]) == (False, "base")
    assert found["fetch_bytes"] == found["total_bytes"] > 0
    assert tree(taker.settings.data_dir / "blobs") == {}
    for target, words in (("acme/nothing", "no package"), ("acme/base@9", "no version")):
        with pytest.raises(NotFound, match=words):
            await pull(taker, PullRequest(target=target, hub=hub), quiet)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a part that was just completed
        return 0


async def test_a_pull_that_is_cancelled_goes_on_where_it_stopped(
    maker: Runtime, taker: Runtime, hub: str, tmp_path: Path
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    total = sum(path.stat().st_size for path in (tmp_path / "hub/blobs/sha256").iterdir())

    def half(handler: Faulty, name: str, number: int) -> bool:
        path = tmp_path / "hub" / name
        if "blobs/" not in name or path.stat().st_size < 100_000 or number > 1:
            return False
        data = path.read_bytes()
        handler.answer(200, data[: len(data) // 2], length=str(len(data)))
        handler.rfile.read(1)  # and then nothing, until the client leaves
        handler.hang_up()
        return True

    with faulty_server(tmp_path / "hub", half) as server:
        parts = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull, taker, PullRequest(target="acme/base", hub=server.url), quiet)
            with trio.fail_after(60):
                while parts < total / 4:
                    await trio.lowlevel.checkpoint()
                    parts = sum(map(size_of, taker.blobs.root.glob(".part-*")))
            nursery.cancel_scope.cancel()
        assert taker.snapshots.entries() == []
        result = await pull(taker, PullRequest(target="acme/base", hub=server.url), quiet)
    assert result["fetched_bytes"] <= total - parts
    same(maker, taker, "base")
    no_leftovers(taker)


def failing(kind: str) -> Callable[[Faulty, str, int], bool]:
    """A server with one fault, on the first two requests of each big blob."""

    def misbehave(handler: Faulty, name: str, number: int) -> bool:
        path = handler.state.root / name
        if "blobs/" not in name or path.stat().st_size < 100_000 or number > 2:
            return False
        data = path.read_bytes()
        if kind == "closes":
            handler.answer(200, data[: len(data) // 3], length=str(len(data)))
            handler.hang_up()
        elif kind == "500":
            handler.answer(500, b"oops")
        elif kind == "429":
            handler.answer(429, b"slow down", Retry_After="0")
        elif kind == "silent":
            handler.rfile.read(1)
            handler.hang_up()
        elif kind == "no range":
            handler.answer(200, data)
        elif kind == "short length":
            handler.answer(200, data[:-10])
        elif kind == "long length":
            handler.answer(200, data + b"x" * 10)
        elif kind == "other bytes":
            handler.answer(200, bytes(len(data)))
        elif kind == "other range":
            handler.answer(206, data[5:], Content_Range=f"bytes 5-{len(data) - 1}/{len(data)}")
        elif kind == "other scheme":
            handler.answer(302, b"", Location="file:///etc/passwd")
        elif kind == "ftp":
            handler.answer(301, b"", Location="ftp://127.0.0.1/x")
        elif kind == "no url":
            handler.answer(301, b"", Location="http://[x/y")
        elif kind == "loop":
            handler.answer(302, b"", Location=handler.path)
            handler.state.asked[name] = 0
        elif kind == "compressed":
            handler.answer(200, data, Content_Encoding="gzip")
        elif kind == "forbidden":
            handler.answer(403, b"")
        elif kind == "gone":
            handler.answer(404, b"")
        elif kind == "wait long":
            handler.answer(503, b"", Retry_After="86400")
        return True

    return misbehave


@pytest.mark.parametrize("kind", ["closes", "500", "429", "silent", "no range"])
async def test_a_server_that_fails_for_a_while_is_asked_again(
    maker: Runtime, taker: Runtime, hub: str, tmp_path: Path, kind: str
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    with faulty_server(tmp_path / "hub", failing(kind)) as server:
        await pull(taker, PullRequest(target="acme/base", hub=server.url), quiet)
    same(maker, taker, "base")
    no_leftovers(taker)


FATAL = {
    "short length": TransferError,
    "long length": TransferError,
    "other bytes": PackError,
    "other range": TransferError,
    "other scheme": TransferError,
    "ftp": TransferError,
    "no url": TransferError,
    "loop": TransferError,
    "compressed": TransferError,
    "forbidden": Unauthorized,
    "gone": NotFound,
    "wait long": TransferError,
}


@pytest.mark.parametrize("kind", FATAL)
async def test_a_server_that_is_wrong_is_refused_and_nothing_comes_of_it(
    maker: Runtime, taker: Runtime, hub: str, tmp_path: Path, kind: str
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    with faulty_server(tmp_path / "hub", failing(kind)) as server:
        with pytest.raises(FATAL[kind]) as caught:
            await pull(taker, PullRequest(target="acme/base", hub=server.url), quiet)
        assert len(str(caught.value)) > 20
        assert taker.snapshots.entries() == []
        server.misbehave = None
        await pull(taker, PullRequest(target="acme/base", hub=server.url), quiet)  # and what is left does no harm
    same(maker, taker, "base")


async def test_the_token_that_is_set_is_for_the_hub_that_is_set(tmp_path: Path) -> None:
    from forkd.ops.keys import login_for

    async with runtime_at(tmp_path / "data", hub_url="https://host/hub/", hub_token="secret") as runtime:
        assert login_for(runtime, "https://host/hub/acme/py") is not None
        for url in (
            "https://host/hub2/acme/py",
            "https://host/hubs",
            "https://host.example/hub/acme/py",
            "http://host/hub/x",
        ):
            assert login_for(runtime, url) is None


async def test_logins_go_to_the_host_they_are_for_and_to_no_other(maker: Runtime, hub: str, tmp_path: Path) -> None:
    from forkd.ops.keys import login_for, save_login
    from forkd.specs.transport import Login, Place

    seen: list[tuple[str, str | None]] = []

    def note(handler: Faulty, name: str, number: int) -> bool:
        seen.append((handler.state.url, handler.headers.get("Authorization")))
        return False

    with faulty_server(tmp_path, note) as other:

        def redirect(handler: Faulty, name: str, number: int) -> bool:
            seen.append((handler.state.url, handler.headers.get("Authorization")))
            handler.answer(302, b"", Location=f"{other.url}/file")
            return True

        (tmp_path / "file").write_bytes(b"x")
        with faulty_server(tmp_path, redirect) as first:
            save_login(maker, first.url, Login(token="secret"))
            login = login_for(maker, f"{first.url}/acme/base")
            assert login == Login(token="secret")
            assert login_for(maker, first.url + "0") is None
            assert "secret" not in repr(login)
            await HttpTransport(HASTY).manifest(Place(first.url, "acme/base", login), "latest", 100)
            assert seen == [(first.url, "Bearer secret"), (other.url, None)]
    assert (maker.settings.hub_dir.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("kind", ["passwords", "tokens"])
async def test_an_oci_registry_that_wants_a_login_is_used_with_one(
    kind: str, maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if kind == "tokens":
            auth = stack.enter_context(running_token_server(tmp_path)).auth_config()
            registry = stack.enter_context(running_registry(tmp_path, auth=auth))
        else:
            registry = stack.enter_context(running_registry(tmp_path, private=True))
        hub = f"oci://{registry.address}"
        request = PushRequest(tag="base", target=f"{hub}/acme/base@1")
        with pytest.raises(Unauthorized):
            await push(maker, request, quiet)
        save_login(maker, hub, Login(username="me", password="guess"))
        with pytest.raises(Unauthorized):
            await push(maker, request, quiet)
        for host in (maker, taker):
            save_login(host, hub, Login(username="me", password="secret"))
        first = await push(maker, request, quiet)
        second = await push(maker, PushRequest(tag="base", target=f"{hub}/acme/other"), quiet)
        assert second["sent_bytes"] < first["sent_bytes"] / 10
        assert [row["package"] for row in await list_packages(taker, hub)] == ["acme/base", "acme/other"]
        assert (await check(taker, f"{hub}/acme/other", None))["tag"] == "base"
        assert (await pull(taker, PullRequest(target="acme/other", hub=hub), quiet))["added"] == ["base"]
        same(maker, taker, "base")
        no_leftovers(taker)
        forget_login(taker, hub)
        with pytest.raises(Unauthorized):
            await check(taker, f"{hub}/acme/other", None)


@pytest.mark.parametrize("url", ["../../etc/x.tar.zst", "file:///etc/passwd.tar.zst", "oci://evil/x"])
async def test_an_index_cannot_name_files_of_the_host(taker: Runtime, tmp_path: Path, url: str) -> None:
    (tmp_path / "hub").mkdir()
    index = {"schema_version": 1, "packages": {"a/b": {"versions": {"latest": {"url": url}}}}}
    (tmp_path / "hub/registry.json").write_text(json.dumps(index))
    with faulty_server(tmp_path / "hub") as server, pytest.raises(PackError, match="not for it to name"):
        await pull(taker, PullRequest(target="a/b", hub=server.url), quiet)


@pytest.mark.parametrize(("hub", "fine"), [("http", True), ("file", True), ("https", False), ("s3", False)])
def test_an_index_that_came_encrypted_cannot_have_a_pack_fetched_in_the_clear(hub: str, fine: bool) -> None:
    ref = refs.parse("a/b", f"{hub}://hub.example/x")
    with nullcontext() if fine else pytest.raises(PackError, match="not for it to name"):
        assert _pack_url(ref, "http://hub.example/b.tar.zst") == "http://hub.example/b.tar.zst"
    assert _pack_url(ref, "https://hub.example/b.tar.zst") == "https://hub.example/b.tar.zst"


async def test_memory_of_the_same_byte_all_over_is_packed(maker: Runtime, taker: Runtime, tmp_path: Path) -> None:
    (memory := tmp_path / "memory").write_bytes(b"\x01" * (64 << 20))
    ref = MemoryRef(kind="image", digest=digests.sparse256_file(memory), size=64 << 20)
    made = add_snapshot(maker, "regular", hardware=Hardware(vcpus=1, mem_mib=64), memory=ref)
    memory.replace(made.memory)
    out = str(tmp_path / "regular.tar.zst")
    await pack(maker, PackRequest(tag="regular", out=out), quiet)
    await unpack(taker, UnpackRequest(path=out), quiet)
    digests.verify_file(taker.snapshots.load("regular").memory, ref.digest)


async def test_an_index_can_name_a_pack_and_its_disk_is_fetched_from_beside_it(
    maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "hub/packs").mkdir(parents=True)
    made = await pack(maker, PackRequest(tag="base", out=str(tmp_path / "hub/packs/base.tar.zst")), quiet)
    index = {"schema_version": 1, "packages": {"a/b": {"versions": {"latest": {"url": "packs/base.tar.zst"}}}}}
    (tmp_path / "hub/registry.json").write_text(json.dumps(index))
    with faulty_server(tmp_path / "hub") as server:
        for target in ("a/b", f"{server.url}/packs/base.tar.zst"):
            checked = await check(taker, target, server.url)
            assert (checked["layers"], checked["trust"]) == (["base"], "unsigned")
        assert [path for path in taker.blobs.root.iterdir() if path.is_dir() or path.stat().st_size] == []
        result = await pull(taker, PullRequest(target="a/b", hub=server.url), quiet)
    assert result["added"] == ["base"]
    assert result["fetched_bytes"] > made["bytes"]
    same(maker, taker, "base")
    no_leftovers(taker)


async def test_a_host_serves_its_own_snapshots_to_others(maker: Runtime, taker: Runtime, tmp_path: Path) -> None:
    from forkd.daemon.app import make_app
    from forkd.sdk.inprocess import InProcessTransport

    add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    async with trio.open_nursery() as nursery:
        transport = InProcessTransport(make_app(maker), nursery)
        async with httpx.AsyncClient(transport=transport, base_url="http://forkd") as client:
            index = (await client.get("/hub/registry.json")).json()
            assert sorted(index["packages"]) == ["local/base", "local/branch"]
            manifest = await client.get("/hub/manifests/local/branch/latest.toml")
            assert manifest.status_code == 200
            blobs = [path for path in maker.blobs.root.iterdir() if path.suffix != ".json"]
            largest = max(blobs, key=lambda path: path.stat().st_size)
            data, url = largest.read_bytes(), f"/hub/blobs/sha256/{largest.name}"
            assert (await client.get(url)).content == data
            head = await client.head(url)
            assert (head.headers["content-length"], head.content) == (str(len(data)), b"")
            part = await client.get(url, headers={"range": "bytes=100-"})
            assert (part.status_code, part.content) == (206, data[100:])
            assert part.headers["content-range"] == f"bytes 100-{len(data) - 1}/{len(data)}"
            few = await client.get(url, headers={"range": "bytes=100-199"})
            assert few.content == data[100:200]
            assert (await client.get(url, headers={"range": f"bytes={len(data)}-"})).status_code == 416
            for bad in ("/hub/blobs/sha256/" + "0" * 64, "/hub/blobs/sha256/..%2f..%2fx", "/hub/manifests/x/y/z.toml"):
                assert (await client.get(bad)).status_code == 404
            assert (await client.put(url, content=b"x")).status_code == 405
        nursery.cancel_scope.cancel()


async def test_a_registry_that_does_not_list_its_packages_is_pulled_from(
    maker: Runtime, taker: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def private(self: object, base: str, login: object) -> bytes | None:
        raise Unauthorized("the catalog is for administrators")

    with running_registry(tmp_path) as registry:
        hub = f"oci://{registry.address}"
        await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
        monkeypatch.setattr(OciTransport, "index", private)
        assert (await check(taker, f"{hub}/acme/base", None))["tag"] == "base"
        assert (await pull(taker, PullRequest(target="acme/base", hub=hub), quiet))["added"] == ["base"]


async def test_a_head_that_takes_its_ancestors_name_leaves_the_ancestor_whole(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    content = maker.snapshots.load("base").manifest.content
    await push(maker, PushRequest(tag="branch", target=f"{hub}/acme/branch"), quiet)
    await pull(taker, PullRequest(target="acme/branch", hub=hub, tag="base"), quiet)
    other = f"base-{content.removeprefix('sha256:')[:12]}"
    assert [layer.manifest.tag for layer in resolve(taker.snapshots, "base")] == [other, "base"]
    with pytest.raises(SnapshotInUse, match="builds on it"):
        await pull(taker, PullRequest(target="acme/branch", hub=hub, tag=other, force=True), quiet)
    assert taker.snapshots.load(other).manifest.content == content


async def test_a_snapshot_is_not_lost_when_what_shall_replace_it_does_not_fit(
    maker: Runtime, taker: Runtime, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    old = add_snapshot(taker, "base", seed=99)
    request = PullRequest(target="acme/base", hub=hub, force=True)
    with monkeypatch.context() as patch:
        patch.setattr(taker.snapshots, "_low_water", 1 << 60)
        with pytest.raises(NoSpace, match="kept free"):
            await pull(taker, request, quiet)
    with monkeypatch.context() as patch:
        patch.setattr(files, "kept_free", lambda where, low_water: 1 << 60)
        with pytest.raises(NoSpace, match="are kept so"):
            await pull(taker, request, quiet)
    assert taker.snapshots.load("base") == old and old.vmstate.exists()
    await pull(taker, request, quiet)
    same(maker, taker, "base")


async def test_a_snapshot_replaced_by_one_that_shares_its_files_is_replaced(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    add_snapshot(taker, "base", hardware=Hardware(vcpus=2, mem_mib=MEM_MIB))
    await pull(taker, PullRequest(target="acme/base", hub=hub, force=True), quiet)
    same(maker, taker, "base")


async def test_a_check_does_not_mind_what_a_pull_could_not_replace(maker: Runtime, taker: Runtime, hub: str) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    add_snapshot(taker, "leaf", add_snapshot(taker, "base", seed=99), seed=98)
    assert (await check(taker, "acme/base", hub))["fetch_bytes"] > 0


async def test_pulls_of_what_shares_layers_and_disks_do_not_hinder_each_other(
    maker: Runtime, taker: Runtime, hub: str
) -> None:
    add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    added: list[str] = []

    async def one(target: str) -> None:
        added.extend((await pull(taker, PullRequest(target=target, hub=hub), quiet))["added"])

    for tag in ("base", "branch"):
        await push(maker, PushRequest(tag=tag, target=f"{hub}/acme/{tag}"), quiet)
    async with trio.open_nursery() as nursery:
        for target in ("acme/branch", "acme/base", "acme/branch"):
            nursery.start_soon(one, target)
    assert sorted(added) == ["base", "branch"]
    same(maker, taker, "branch")
    no_leftovers(taker)


async def test_a_pack_file_is_kept_while_its_disk_cannot_be_fetched(
    maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "hub").mkdir()
    made = await pack(maker, PackRequest(tag="base", out=str(tmp_path / "hub/base.tar.zst")), quiet)

    def no_disk(handler: Faulty, name: str, number: int) -> bool:
        if name.endswith(".rootfs.zst"):
            handler.answer(500, b"")
            return True
        return False

    with faulty_server(tmp_path / "hub", no_disk) as server:
        request = PullRequest(target=f"{server.url}/base.tar.zst")
        with pytest.raises(TransferError):
            await pull(taker, request, quiet)
        parts = [path.stat().st_size for path in taker.blobs.root.glob(".part-*")]
        assert max(parts) == made["bytes"]
        server.misbehave, server.sent = None, 0
        await pull(taker, request, quiet)
        assert server.sent == Path(made["beside"][0]).stat().st_size
    same(maker, taker, "base")
    no_leftovers(taker)


async def test_a_pack_file_replaced_by_a_shorter_one_is_not_in_the_way_for_ever(
    maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "hub").mkdir()
    out = tmp_path / "hub/base.tar.zst"
    await pack(maker, PackRequest(tag="base", out=str(out), bundle=True), quiet)
    longer = out.read_bytes()

    def ends(handler: Faulty, name: str, number: int) -> bool:
        begin = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if begin < out.stat().st_size:
            return False
        handler.answer(416, b"", Content_Range=f"bytes */{out.stat().st_size}")
        return True

    with faulty_server(tmp_path / "hub", ends) as server:
        request = PullRequest(target=f"{server.url}/base.tar.zst")
        name = hashlib.sha256(request.target.encode()).hexdigest()
        taker.blobs.root.mkdir(parents=True)
        taker.blobs.part(name).write_bytes(longer[:-100])
        add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
        await pack(maker, PackRequest(tag="branch", out=str(out), since="base"), quiet)
        with pytest.raises(PackError, match="ends after"):
            await pull(taker, request, quiet)
        with pytest.raises(PackError, match="neither in it nor here"):
            await pull(taker, request, quiet)  # it is the new one now
    assert tree(taker.blobs.root) == {}


@pytest.mark.parametrize("kind", ["endless pack", "no pack", "taken"])
async def test_a_pack_file_that_is_of_no_use_is_refused_before_it_is_fetched(
    kind: str, maker: Runtime, taker: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "hub").mkdir()
    out = tmp_path / "hub/base.tar.zst"
    await pack(maker, PackRequest(tag="base", out=str(out), bundle=True), quiet)
    if kind == "endless pack":
        os.truncate(out, 64 << 20)
    elif kind == "no pack":
        out.write_bytes(b"<html>" * (10 << 20))
    else:
        add_snapshot(taker, "base", seed=99)
        os.truncate(out, 64 << 20)
    with faulty_server(tmp_path / "hub") as server, pytest.raises(TagTaken if kind == "taken" else PackError):
        await pull(taker, PullRequest(target=f"{server.url}/base.tar.zst"), quiet)
    assert tree(taker.blobs.root) == {}


async def test_what_cannot_fit_is_refused_before_it_is_fetched(
    maker: Runtime, taker: Runtime, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await push(maker, PushRequest(tag="base", target=f"{hub}/acme/base"), quiet)
    monkeypatch.setattr("forkd.linux.sparse.disk_free", lambda path: 1000)
    with pytest.raises(NoSpace):
        await pull(taker, PullRequest(target="acme/base", hub=hub), quiet)
    assert list(taker.blobs.root.iterdir()) == []


KILLED = """
import sys, trio
from pathlib import Path
from tests.hub_support import quiet, runtime_at
from forkd.ops.transfer import pull
from forkd.specs.requests import PullRequest

async def main():
    async with runtime_at(Path({data!r})) as runtime:
        print("begins", flush=True)
        await pull(runtime, PullRequest(target="acme/branch", hub={hub!r}), quiet)

trio.run(main)
"""


async def test_a_pull_killed_at_random_moments_ends_right_and_leaves_nothing(
    maker: Runtime, hub: str, tmp_path: Path
) -> None:
    branch = add_snapshot(maker, "branch", maker.snapshots.load("base"), seed=20)
    await push(maker, PushRequest(tag=branch.manifest.tag, target=f"{hub}/acme/branch"), quiet)
    moment = random.Random(3)
    data = tmp_path / "killed"

    def slowly(handler: Faulty, name: str, number: int) -> bool:
        """A few kilobytes at a time, so that there are moments to be killed at."""
        path = handler.state.root / name
        if "blobs/" not in name:
            return False
        content = path.read_bytes()
        begin = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        extra = {"Content_Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        handler.answer(
            206 if begin else 200, content[begin : begin + 60_000], length=str(len(content) - begin), **extra
        )
        handler.hang_up()
        return True

    killed = 0
    with faulty_server(tmp_path / "hub", slowly) as server:
        script = KILLED.format(support=str(Path(__file__).parents[3]), data=str(data), hub=server.url)

        def attempt(seconds: float | None) -> int:
            child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
            assert child.stdout is not None
            with child.stdout:
                child.stdout.readline()
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
            return child.returncode

        for _ in range(6):
            killed += await trio.to_thread.run_sync(attempt, moment.uniform(0.05, 1.2)) == -signal.SIGKILL
            async with runtime_at(data) as runtime:
                for entry in runtime.snapshots.entries():
                    assert entry.manifest.content  # type: ignore[union-attr]  # whole, or not there
        assert await trio.to_thread.run_sync(attempt, None) == 0
    assert killed >= 1
    async with runtime_at(data) as runtime:
        same(maker, runtime, "base")
        same(maker, runtime, "branch")
        from forkd.ops.cleanup import cleanup

        await cleanup(runtime, remove=True)
        for path in runtime.blobs.root.iterdir():
            if len(path.name) == 64:  # of one killed after it had installed all: whole, and evicted in its time
                assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
                path.unlink()
        no_leftovers(runtime)


async def test_references_are_read_as_people_write_them() -> None:
    from forkd.hub.refs import parse

    assert str(parse("acme/py", "oci://host")) == "oci://host/acme/py@latest"
    assert str(parse("acme/py@2", "https://host/hub/")) == "https://host/hub/acme/py@2"
    assert str(parse("file:/srv/hub/acme/py", None)) == "file:/srv/hub/acme/py@latest"
    assert parse("https://host/x.forkd-snapshot.tar.zst", None).pack_url is not None
    assert parse("https://host/upload?signature=1", None).pack_url is not None
    assert str(parse("https://me:secret@host/hub/acme/py", None)) == "https://host/hub/acme/py@latest"
    bad: list[tuple[Any, ...]] = [
        ("http://[x/y/z", None),
        ("acme/py", None),
        ("py", "oci://h"),
        ("a/b/c", "oci://h"),
        ("", None),
        ("a/../b", "oci://h"),
    ]
    for text, base in [
        *bad,
        ("a b/c", "oci://h"),
        ("oci://host", None),
        ("acme/py@../x", "oci://h"),
        ("a/b", "nowhere"),
    ]:
        with pytest.raises(BadInput):
            parse(text, base)
