"""Memory images of chains: made once, found again, evicted by size and by age."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
import trio

from forkd.specs.errors import NoSpace, SnapshotBroken
from forkd.specs.models import FileRef, Hardware, MemoryRef, ParentRef, Platform, Snapshot
from forkd.store import deltas, images
from forkd.store.images import ImageCache
from forkd.store.snapshots import SnapshotStore, Stored, content_id

PAGE, PAGES = 4096, 8
LONG_AGO = time.time() - 3600


def put(store: SnapshotStore, tag: str, parent: Snapshot | None, page: int) -> Stored:
    """A snapshot whose page number ``page`` is filled with ``page + 1``; the root has ones everywhere."""
    stage = store.stage(tag)
    (stage.directory / "vmstate").write_bytes(b"abc")
    if parent is None:
        (stage.directory / "memory.bin").write_bytes(b"\1" * PAGE * PAGES)
        memory = MemoryRef(kind="image", digest="sparse256:00", size=PAGE * PAGES)
    else:
        with open(stage.directory / "memory.delta", "xb", buffering=0) as out:
            writer = deltas.DeltaWriter(out.fileno(), PAGES)
            writer.add_data(page, bytes([page + 1]) * PAGE)
            info = writer.finish()
        memory = MemoryRef(kind="delta", digest=info.digest, size=info.size, changed_pages=1)
    platform = Platform(engine="e", engine_version="1", accelerator="a", machine="m", cpu="c", arch="x86_64")
    made = Snapshot(
        tag=tag,
        content="",
        created_at_unix=1,
        forkd_version="0",
        platform=platform,
        hardware=Hardware(vcpus=1, mem_mib=64),
        vmstate=FileRef(digest="sha256:00", size=3),
        memory=memory,
        rootfs=None,
        kernel=None,
        agent_sync="00" * 16,
        parent=ParentRef(tag=parent.tag, content=parent.content) if parent else None,
    )
    return stage.commit(msgspec.structs.replace(made, content=content_id(made)))


def used(path: Path, when: float) -> Path:
    os.utime(path, (when, when))
    return path


@pytest.fixture
def layers(tmp_path: Path) -> list[Stored]:
    store = SnapshotStore(tmp_path / "snapshots")
    made = [put(store, "root", None, 0)]
    for page in (1, 2):
        made.append(put(store, f"layer-{page}", made[-1].manifest, page))
    return made


async def test_a_snapshot_with_an_image_of_its_own_needs_no_other(tmp_path: Path, layers: list[Stored]) -> None:
    cache = ImageCache(tmp_path / "images", 1 << 30)
    assert await cache.image(layers[:1]) == layers[0].memory
    assert not (tmp_path / "images").exists()


async def test_a_chain_is_put_together_once_however_many_ask(
    tmp_path: Path, layers: list[Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = deltas.materialise

    def counted(*args: object) -> None:
        made.append(args)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(images.deltas, "materialise", counted)
    cache = ImageCache(tmp_path / "images", 1 << 30)
    paths: list[Path] = []

    async def ask() -> None:
        paths.append(await cache.image(layers))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert len(set(paths)) == len(made) == 1
    content = paths[0].read_bytes()
    assert [content[page * PAGE] for page in range(PAGES)] == [1, 2, 3] + [1] * (PAGES - 3)
    assert await ImageCache(tmp_path / "images", 1 << 30).image(layers) == paths[0]
    assert len(made) == 1


async def test_the_image_of_a_removed_snapshot_is_forgotten(tmp_path: Path, layers: list[Stored]) -> None:
    cache = ImageCache(tmp_path / "images", 1 << 30)
    path = await cache.image(layers)
    cache.forget(layers[-1].manifest.content)
    assert not path.exists()
    cache.forget(layers[-1].manifest.content)


def test_too_many_bytes_evict_the_ones_used_longest_ago(tmp_path: Path) -> None:
    for index in range(4):
        path = tmp_path / f"{index}.bin"
        path.write_bytes(b"x" * (1 << 20))
        used(path, LONG_AGO + index)
    removed = ImageCache(tmp_path, 2 << 20).evict()
    assert sorted(path.name for path in removed) == ["0.bin", "1.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.bin", "3.bin"]


def test_what_was_not_used_for_long_goes_although_there_is_room(tmp_path: Path) -> None:
    for name, when in (("old", LONG_AGO), ("new", time.time() - 120)):
        (tmp_path / f"{name}.bin").write_bytes(b"x")
        used(tmp_path / f"{name}.bin", when)
    removed = ImageCache(tmp_path, 1 << 30, limit_seconds=600).evict()
    assert [path.name for path in removed] == ["old.bin"]


def test_an_image_used_a_moment_ago_stays_whatever_the_limits(tmp_path: Path) -> None:
    (tmp_path / "hot.bin").write_bytes(b"x" * (1 << 20))
    assert ImageCache(tmp_path, 0, limit_seconds=0).evict() == []


async def test_using_an_image_keeps_it(tmp_path: Path, layers: list[Stored]) -> None:
    cache = ImageCache(tmp_path / "images", 0, limit_seconds=600)
    used(await cache.image(layers), LONG_AGO)
    path = await cache.image(layers)
    assert cache.evict() == []
    assert path.exists()


async def test_a_layer_that_is_broken_leaves_nothing_half_made(tmp_path: Path, layers: list[Stored]) -> None:
    layers[1].memory.write_bytes(b"nonsense")
    cache = ImageCache(tmp_path / "images", 1 << 30)
    with pytest.raises(SnapshotBroken):
        await cache.image(layers)
    assert list((tmp_path / "images").iterdir()) == []


async def test_a_full_disk_is_no_space_and_leaves_nothing_half_made(
    tmp_path: Path, layers: list[Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(base: Path, chain: list[Path], out: Path) -> None:
        out.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images.deltas, "materialise", full)
    cache = ImageCache(tmp_path / "images", 1 << 30)
    with pytest.raises(NoSpace):
        await cache.image(layers)
    assert list((tmp_path / "images").iterdir()) == []


def test_half_made_images_of_the_dead_are_leftovers_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    (tmp_path / f".abc-{os.getpid()}").touch()
    (tmp_path / f".abc-{2**22 - 1}").touch()
    assert [path.name for path in ImageCache(tmp_path, 0).leftovers()] == [f".abc-{2**22 - 1}"]
