"""The disk store: one disk for one key, whoever asks at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import trio
import trio.testing

from forkd.specs.models import FileRef
from forkd.store.disks import Disk, DiskStore


async def test_builds_of_one_key_at_once_give_one_disk(tmp_path: Path) -> None:
    store, made = DiskStore(tmp_path), list[Disk]()

    async def make(work: Path, out: Path) -> Disk:
        """Never the same bytes twice, as with a file system."""
        out.write_bytes(os.urandom(16))
        await trio.testing.wait_all_tasks_blocked()
        return Disk(ref=FileRef(digest=f"sha256:{out.read_bytes().hex()}", size=16), image="x")

    async def build() -> None:
        made.append(await store.build("key", make))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(build)
    assert len({disk.ref.digest for disk in made}) == 1
    assert store.built("key") == made[0]
    assert [path.name for path in tmp_path.glob("*.ext4")] == [store.path(made[0].ref).name]
