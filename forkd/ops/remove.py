"""Remove snapshots, never from under something that builds on them."""

from __future__ import annotations

import trio

from forkd.inventory import SqliteInventory, Workspace
from forkd.runtime import Runtime
from forkd.slots import snapshots_in_use
from forkd.specs.errors import BadInput, SnapshotBroken, SnapshotInUse, SnapshotNotFound, SnapshotPinned


async def remove_snapshot(
    runtime: Runtime,
    tag: str,
    *,
    cascade: bool = False,
    force: bool = False,
    state_of: str | None = None,
    unused: bool = False,
) -> list[str]:
    """Remove ``tag``; with ``cascade`` all that build on it first, with ``force`` only it. Returns what was removed.

    What is pinned and the state of a suspended workspace stay, unless forced or removed for the workspace itself,
    ``state_of``. With ``unused`` so does what anything runs from or reads.
    """
    if cascade and force:
        raise BadInput("cascade and force exclude each other")
    path = runtime.snapshots.path(tag)  # refuses a bad tag before anything is looked at
    if runtime.failed.pop(tag, None) is not None and not path.exists():
        return [tag]  # a branch that came to nothing: there was only the note of it
    doomed = await trio.to_thread.run_sync(_with_dependents, runtime, tag)
    if len(doomed) > 1 and not (cascade or force):
        dependents = await trio.to_thread.run_sync(runtime.snapshots.dependents, tag)
        raise SnapshotInUse(
            f"snapshots {', '.join(dependents)} build on {tag!r}",
            hint="remove them too with cascade, or orphan them with force",
            dependents=dependents,
        )
    if force:
        doomed = [tag]
    else:
        _check(runtime, doomed, state_of)
    if writing := sorted(row.tag for row in runtime.writing.values() if row.parent_tag in doomed):
        raise SnapshotInUse(
            f"{', '.join(writing)} is being written against {tag!r}", hint="wait until its status is ready"
        )
    if unused and (why := in_use(runtime).get(tag)):
        raise SnapshotInUse(f"snapshot {tag!r} stays: {why}")
    for each in doomed:
        await _remove(runtime, each, force)
    return doomed


async def give_way(runtime: Runtime, tag: str) -> None:
    """Let go of a snapshot whose name another is about to take. Refused as its removal would be; its files stay."""
    if dependents := await trio.to_thread.run_sync(runtime.snapshots.dependents, tag):
        raise SnapshotInUse(f"{tag!r} cannot be replaced: {', '.join(dependents)} build on it", dependents=dependents)
    _check(runtime, [tag], None)
    await _let_go(runtime, tag)


def in_use(runtime: Runtime) -> dict[str, str]:
    """Why snapshots are needed, besides what builds on them: a sandbox, template, pool, workspace or verb at work."""
    found = {tag: "something reads it just now" for tag in runtime.readers}
    for workspace in _workspaces(runtime):
        info = workspace.info
        found[info.current_state_tag or info.source_snapshot_tag] = f"workspace {info.name!r} comes back from it"
    warm = {content for content, _ in runtime.templates.kept}
    for entry in runtime.snapshots.manifests() if warm else ():
        if entry.content in warm:
            found[entry.tag] = "a template of it is warm"
    for tag, sandbox_id in snapshots_in_use(runtime.settings.run_dir).items():
        found[tag] = f"sandbox {sandbox_id} runs from it"
    found |= {tag: "machines of a pool wait for its children" for tag in runtime.pools.pools}
    return found


def _with_dependents(runtime: Runtime, tag: str) -> list[str]:
    """The snapshot and all that build on it, each before what it builds on."""
    children: dict[str, list[str]] = {}
    for manifest in runtime.snapshots.manifests():
        if manifest.parent is not None:
            children.setdefault(manifest.parent.tag, []).append(manifest.tag)
    order = [tag]
    for each in order:
        order += [child for child in children.get(each, ()) if child not in order]
    return order[::-1]


def _check(runtime: Runtime, tags: list[str], state_of: str | None) -> None:
    """Refuse before anything is removed."""
    states = {found.info.current_state_tag: found.info.name for found in _workspaces(runtime)}
    for tag in tags:
        if (name := states.get(tag)) not in (None, state_of):
            raise SnapshotInUse(f"{tag!r} is the state of workspace {name!r}", hint=f"forkd workspace delete {name}")
        try:
            pinned = runtime.snapshots.load(tag).pinned
        except (SnapshotBroken, SnapshotNotFound):
            continue
        if pinned:
            raise SnapshotPinned(f"snapshot {tag!r} is pinned", hint=f"forkd unpin {tag}")


async def _remove(runtime: Runtime, tag: str, force: bool) -> None:
    await _let_go(runtime, tag)
    await trio.to_thread.run_sync(lambda: runtime.snapshots.remove(tag, force=force))
    runtime.observe("remove", tag=tag)


async def _let_go(runtime: Runtime, tag: str) -> None:
    """Nothing kept for a snapshot's next children is kept any longer."""
    await runtime.pools.resize(runtime, tag, 0)
    try:
        content = runtime.snapshots.load(tag).manifest.content
        await trio.to_thread.run_sync(runtime.images.forget, content)
        runtime.templates.forget(runtime, content)
    except SnapshotBroken:
        pass  # nothing was ever made from it


def _workspaces(runtime: Runtime) -> list[Workspace]:
    """Those of this daemon, or of the one that used this data directory last."""
    if runtime.keeps or not runtime.settings.inventory.exists():
        return runtime.inventory.workspaces()
    inventory = SqliteInventory(runtime.settings.inventory)
    try:
        return inventory.workspaces()
    finally:
        inventory.close()
