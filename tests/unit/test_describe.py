"""Snapshots in lists: none is missed for being finished just then."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from forkd.ops.describe import list_snapshots
from forkd.specs.models import SnapshotInfo


async def test_a_branch_that_is_finished_while_the_store_is_read_is_in_the_list() -> None:
    row = SnapshotInfo(tag="late", dir="/nowhere", created_at_unix=0, status="writing", bootable=False)
    runtime: Any = SimpleNamespace(writing={"late": row}, failed={})

    def entries() -> Iterator[Any]:
        del runtime.writing["late"]  # its rename came just after the directory was read
        yield from ()

    runtime.snapshots = SimpleNamespace(entries=entries)
    assert [found.tag for found in await list_snapshots(runtime)] == ["late"]
