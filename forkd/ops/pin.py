"""Pin a snapshot, so that it stays, or give it other labels."""

from __future__ import annotations

from functools import partial

import trio

from forkd.ops.describe import describe
from forkd.ops.lifecycle import check_pairs
from forkd.runtime import Runtime
from forkd.specs.errors import SnapshotNotReady
from forkd.specs.models import SnapshotInfo
from forkd.specs.requests import UpdateSnapshot


async def update_snapshot(runtime: Runtime, tag: str, request: UpdateSnapshot) -> SnapshotInfo:
    """Note what ``request`` says; what is absent stays. Raises SnapshotNotFound, SnapshotNotReady, NoSpace."""
    check_pairs("labels", request.labels or {})
    if tag in runtime.writing:
        raise SnapshotNotReady(f"snapshot {tag!r} is still being written", hint="wait until its status is ready")
    note = partial(runtime.snapshots.note, tag, pinned=request.pinned, labels=request.labels)
    return describe(runtime, await trio.to_thread.run_sync(note))
