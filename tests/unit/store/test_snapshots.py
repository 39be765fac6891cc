"""The snapshot store: what is listed is whole, whoever dies when."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from forkd.specs.errors import BadTag, ChainBroken, NoSpace, SnapshotBroken, SnapshotNotFound, SnapshotPinned, TagTaken
from forkd.specs.models import FileRef, Hardware, MemoryRef, ParentRef, Platform, Snapshot
from forkd.specs.tags import check_tag
from forkd.store.chain import resolve
from forkd.store.snapshots import Broken, SnapshotStore, Stored, content_id, decode, encode


def manifest(tag: str, parent: Snapshot | None = None) -> Snapshot:
    made = Snapshot(
        tag=tag,
        content="",
        created_at_unix=1,
        forkd_version="0",
        platform=Platform(
            engine="qemu", engine_version="7.2.0", accelerator="tcg", machine="m", cpu="c", arch="x86_64"
        ),
        hardware=Hardware(vcpus=1, mem_mib=64),
        vmstate=FileRef(digest=f"sha256:{tag}", size=3),
        memory=MemoryRef(kind="delta" if parent else "image", digest="sparse256:00", size=4),
        rootfs=None,
        kernel=None,
        agent_sync="00" * 16,
        parent=ParentRef(tag=parent.tag, content=parent.content) if parent else None,
    )
    return msgspec.structs.replace(made, content=content_id(made))


def put(store: SnapshotStore, made: Snapshot) -> Stored:
    stage = store.stage(made.tag)
    (stage.directory / "vmstate").write_bytes(b"abc")
    (stage.directory / ("memory.delta" if made.parent else "memory.bin")).write_bytes(b"page")
    return stage.commit(made)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots")


def test_a_committed_snapshot_is_listed_and_loads(store: SnapshotStore) -> None:
    put(store, manifest("a"))
    assert [entry.manifest.tag for entry in store.entries() if isinstance(entry, Stored)] == ["a"]
    assert store.load("a").manifest == manifest("a")
    assert sorted(path.name for path in store.path("a").iterdir()) == ["memory.bin", "snapshot.json", "vmstate"]


def test_a_stage_is_never_listed_and_leaves_nothing_when_abandoned(store: SnapshotStore) -> None:
    stage = store.stage("a")
    (stage.directory / "memory.bin").write_bytes(b"half")
    assert store.entries() == []
    stage.abandon()
    assert [path.name for path in store.root.iterdir()] == [".lock"]


def test_a_token_that_opens_no_agent_makes_a_snapshot_broken(store: SnapshotStore) -> None:
    for token in ("", "zz", "0" * 31, "0" * 31 + "\n", "AB" * 16):
        data = encode(msgspec.structs.replace(manifest("a"), agent_sync=token))
        with pytest.raises(SnapshotBroken, match="agent_sync"):
            decode("a", data)


def test_a_tag_is_taken_while_it_is_being_made_and_after(store: SnapshotStore) -> None:
    stage = store.stage("a")
    with pytest.raises(TagTaken):
        store.stage("a")
    stage.abandon()
    put(store, manifest("a"))
    with pytest.raises(TagTaken):
        store.stage("a")


@pytest.mark.parametrize("exchanges", [True, False], ids=["swapped", "one after the other"])
def test_what_is_replaced_keeps_its_name_until_the_new_one_is_whole(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("forkd.store.snapshots.exchange", lambda one, other: False)
    old = put(store, manifest("a"))
    store.stage("a", replaces=True).abandon()
    assert store.load("a") == old
    new = msgspec.structs.replace(manifest("a"), created_at_unix=2)
    stage = store.stage("a", replaces=True)
    (stage.directory / "vmstate").write_bytes(b"new")
    assert store.load("a") == old and old.vmstate.read_bytes() == b"abc"
    stage.commit(new)
    assert store.load("a").manifest == new and store.load("a").vmstate.read_bytes() == b"new"
    assert sorted(path.name for path in store.root.iterdir()) == [".lock", "a"]


def test_what_goes_before_it_is_replaced_is_no_trouble(store: SnapshotStore) -> None:
    put(store, manifest("a"))
    stage = store.stage("a", replaces=True)
    store.remove("a")
    stage.commit(manifest("a"))
    assert store.load("a").manifest == manifest("a") and store.leftovers() == []


async def test_who_waits_for_a_tag_waits_for_its_maker_and_for_nobody_else(store: SnapshotStore) -> None:
    await store.until_made("a")
    stage = store.stage("a")
    with trio.move_on_after(0.05) as patience:
        await store.until_made("a")
    assert patience.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.until_made, "a")
        stage.abandon()
    stage = store.stage("a")
    stage.abandon()


def test_a_dead_makers_stage_is_a_leftover_and_does_not_block_the_tag(store: SnapshotStore) -> None:
    stage = store.stage("a")
    (stage.directory / "memory.bin").write_bytes(b"half")
    assert store.leftovers() == []
    stage._lock.release()  # what the kernel does when the maker dies
    assert [path.name for path in store.leftovers()] == [".stage-a"]
    put(store, manifest("a"))
    assert store.leftovers() == []


def test_missing_broken_and_foreign_manifests_are_told_apart(store: SnapshotStore) -> None:
    with pytest.raises(SnapshotNotFound):
        store.load("a")
    put(store, manifest("a"))
    path = store.path("a") / "snapshot.json"
    good = path.read_bytes()
    for bad in (
        b"{",
        b"{}",
        good.replace(b'"format": 1', b'"format": 9'),
        good.replace(b'"mem_mib": 64', b'"mem_mib": 65'),
    ):
        path.write_bytes(bad)
        with pytest.raises(SnapshotBroken):
            store.load("a")
    path.write_bytes(good)
    (store.path("a") / "memory.bin").write_bytes(b"short of it")
    entry = store.entries()[0]
    assert isinstance(entry, Broken)
    assert "memory.bin" in entry.reason


def test_removing_makes_it_gone(store: SnapshotStore) -> None:
    put(store, manifest("a"))
    store.remove("a")
    assert store.entries() == []
    with pytest.raises(SnapshotNotFound):
        store.remove("a")


def test_pins_and_labels_are_kept_on_the_disk_and_protect(store: SnapshotStore) -> None:
    put(store, manifest("a"))
    store.note("a", pinned=True)
    store.note("a", labels={"team": "red"})
    again = SnapshotStore(store.root)
    assert again.load("a").pinned
    assert again.load("a").manifest.labels == {"team": "red"}
    assert again.load("a").manifest.content == manifest("a").content
    with pytest.raises(SnapshotPinned, match="'a' is pinned") as refused:
        again.remove("a")
    assert refused.value.hint == "forkd unpin a"
    store.note("a", pinned=False)
    store.note("a", pinned=False)
    assert not store.load("a").pinned
    store.note("a", pinned=True)
    store.remove("a", force=True)
    assert store.entries() == []
    with pytest.raises(SnapshotNotFound):
        store.note("a", pinned=True)


def test_chains_resolve_root_first_and_name_what_is_wrong(store: SnapshotStore) -> None:
    root = manifest("root")
    middle = manifest("middle", root)
    head = manifest("head", middle)
    for made in (root, middle, head):
        put(store, made)
    assert [layer.manifest.tag for layer in resolve(store, "head")] == ["root", "middle", "head"]
    assert store.dependents("root") == ["middle"]
    store.remove("middle")
    with pytest.raises(ChainBroken, match="middle"):
        resolve(store, "head")
    put(store, msgspec.structs.replace(manifest("middle"), content=content_id(manifest("middle"))))
    with pytest.raises(ChainBroken, match="middle"):
        resolve(store, "head")


def test_a_circle_is_refused(store: SnapshotStore) -> None:
    one = manifest("one")
    two = manifest("two", one)
    put(store, two)
    put(store, msgspec.structs.replace(manifest("one", two), content=manifest("one", two).content))
    with pytest.raises(ChainBroken):
        resolve(store, "two")


@given(st.binary(max_size=200))
def test_no_bytes_make_decoding_a_manifest_fail_in_any_other_way(data: bytes) -> None:
    with pytest.raises(SnapshotBroken):
        decode("a", data)


@given(st.text(max_size=80))
def test_a_tag_that_passes_is_one_safe_path_component(tag: str) -> None:
    try:
        check_tag(tag)
    except BadTag:
        return
    assert tag == Path(tag).name
    assert not tag.startswith((".", "-"))
    assert len(tag) <= 64


def test_no_snapshot_is_begun_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots", low_water=1 << 62)
    with pytest.raises(NoSpace, match="are free") as refused:
        store.stage("late")
    assert "forkd rmi" in str(refused.value.hint)
    assert not list((tmp_path / "snapshots").glob("*late*"))
    SnapshotStore(tmp_path / "snapshots", low_water=0).stage("late").abandon()
