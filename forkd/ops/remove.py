"""Remove snapshots, never from under something that builds on them."""

from __future__ import annotations

import trio

from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, SnapshotBroken, SnapshotInUse


async def remove_snapshot(
    runtime: Runtime, tag: str, *, cascade: bool = False, force: bool = False, state_of: str | None = None
) -> list[str]:
    """Remove ``tag``; with ``cascade`` all that build on it first, with ``force`` only it. Returns what was removed.

    The state of a suspended workspace stays, unless forced or removed for the workspace itself, ``state_of``.
    """
    if cascade and force:
        raise BadInput("cascade and force exclude each other")
    runtime.snapshots.path(tag)  # refuses a bad tag before anything is looked at
    dependents = await trio.to_thread.run_sync(runtime.snapshots.dependents, tag)
    if dependents and not (cascade or force):
        raise SnapshotInUse(
            f"snapshots {', '.join(dependents)} build on {tag!r}",
            hint="remove them too with cascade, or orphan them with force",
            dependents=dependents,
        )
    if not force and (name := _workspace_on(runtime, tag)) not in (None, state_of):
        raise SnapshotInUse(f"{tag!r} is the state of workspace {name!r}", hint=f"forkd workspace delete {name}")
    removed: list[str] = []
    if cascade:
        for child in dependents:
            removed += await remove_snapshot(runtime, child, cascade=True)
    try:
        content = runtime.snapshots.load(tag).manifest.content
        await trio.to_thread.run_sync(runtime.images.forget, content)
        runtime.templates.forget(runtime, content)
    except SnapshotBroken:
        pass  # nothing was ever made from it
    await trio.to_thread.run_sync(runtime.snapshots.remove, tag)
    runtime.observe("remove", tag=tag)
    return [*removed, tag]


def _workspace_on(runtime: Runtime, tag: str) -> str | None:
    """The workspace whose state this is."""
    states = {found.info.current_state_tag: found.info.name for found in runtime.inventory.workspaces()}
    return states.get(tag)
