"""Routes of snapshots and the disks below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import OF_SNAPSHOT, route
from forkd.daemon.progress import with_progress
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import Emit, EventStream, query_flag, read_body, reply, wants_stream
from forkd.linux import sparse
from forkd.ops.build import build_rootfs
from forkd.ops.describe import describe, get_snapshot, list_snapshots
from forkd.ops.lineage import compact, snapshot_lineage
from forkd.ops.parent import create_parent
from forkd.ops.pin import update_snapshot
from forkd.ops.pool import set_pool
from forkd.ops.prune import prune
from forkd.ops.remove import remove_snapshot
from forkd.specs.errors import (
    BadInput,
    BuildFailed,
    CapabilityMissing,
    Conflict,
    EngineError,
    GuestError,
    GuestTimeout,
    HostNotReady,
    NoSpace,
)
from forkd.specs.models import PoolInfo, Pruned, SnapshotInfo
from forkd.specs.requests import BuildRootfs, Compact, CreateSnapshot, PruneRequest, SetPool, UpdateSnapshot
from forkd.store.files import disk_full_as_no_space


async def index(request: Request) -> Response:
    """All snapshots."""
    return reply(await list_snapshots(runtime_of(request)))


async def create(request: Request) -> Response:
    """Boot a parent and capture it."""
    runtime = runtime_of(request)
    body = await read_body(request, CreateSnapshot)
    if not wants_stream(request):
        return reply(describe(runtime, await create_parent(runtime, body, lambda step, fraction: None)), 201)

    async def work(emit: Emit) -> Any:
        stored = await with_progress(emit, lambda progress: create_parent(runtime, body, progress))
        return describe(runtime, stored)

    return EventStream(work)


async def get(request: Request) -> Response:
    """One snapshot."""
    return reply(get_snapshot(runtime_of(request), request.path_params["tag"]))


async def info(request: Request) -> Response:
    """Lineage and sizes of one snapshot."""
    return reply(snapshot_lineage(runtime_of(request), request.path_params["tag"]))


async def flatten(request: Request) -> Response:
    """A chain as one snapshot."""
    body = await read_body(request, Compact)
    return reply(await compact(runtime_of(request), request.path_params["tag"], body.to))


async def pool(request: Request) -> Response:
    """Let machines wait, warm, for the snapshot's next children; answers when they do."""
    body = await read_body(request, SetPool)
    return reply(await set_pool(runtime_of(request), request.path_params["tag"], body.size))


async def delete(request: Request) -> Response:
    """Remove a snapshot."""
    cascade, force = query_flag(request, "cascade"), query_flag(request, "force")
    await remove_snapshot(runtime_of(request), request.path_params["tag"], cascade=cascade, force=force)
    return Response(status_code=204)


async def update(request: Request) -> Response:
    """Pin or unpin a snapshot, give it other labels."""
    body = await read_body(request, UpdateSnapshot)
    return reply(await update_snapshot(runtime_of(request), request.path_params["tag"], body))


async def retain(request: Request) -> Response:
    """Remove the snapshots that rules let go; by default only say which."""
    body = await read_body(request, PruneRequest)
    return reply(await prune(runtime_of(request), body.rules, dry_run=body.dry_run))


async def rootfs(request: Request) -> Response:
    """Build a disk; progress as events."""
    runtime = runtime_of(request)
    body = await read_body(request, BuildRootfs)

    async def work(emit: Emit) -> Any:
        disk = await with_progress(
            emit, lambda progress: build_rootfs(runtime, body.image, tuple(body.extras), body.size_mib, progress)
        )
        path = runtime.disks.find(disk.ref)
        if body.output is not None:
            await _copy(path, Path(body.output))
        return {"path": body.output or str(path), "digest": disk.ref.digest, "size": disk.ref.size}

    return EventStream(work)


async def _copy(disk: Path, output: Path) -> None:
    try:
        with disk_full_as_no_space(output.parent):
            await trio.to_thread.run_sync(sparse.clone_file, disk, output)
    except FileExistsError as error:
        raise Conflict(f"{output} exists already", hint="remove it, or give another file") from error
    except OSError as error:
        raise BadInput(f"{output} cannot be written: {error.strerror}") from error


TAG = "/v1/snapshots/{tag}"
routes = [
    route("GET", "/v1/snapshots", index, {200: list[SnapshotInfo]}),
    route(
        "POST",
        "/v1/snapshots",
        create,
        {201: SnapshotInfo},
        body=CreateSnapshot,
        events=True,
        errors=(BadInput, Conflict, HostNotReady, NoSpace, BuildFailed, EngineError, GuestError, GuestTimeout),
    ),
    route("GET", TAG, get, {200: SnapshotInfo}, errors=(*OF_SNAPSHOT, Conflict)),
    route(
        "DELETE",
        TAG,
        delete,
        {204: None},
        query={"cascade": bool, "force": bool},
        errors=(*OF_SNAPSHOT, Conflict),
    ),
    route("PATCH", TAG, update, {200: SnapshotInfo}, body=UpdateSnapshot, errors=(*OF_SNAPSHOT, Conflict)),
    route("POST", "/v1/snapshots/prune", retain, {200: Pruned}, body=PruneRequest, errors=(BadInput,)),
    route("GET", f"{TAG}/info", info, {200: dict[str, Any]}, errors=(*OF_SNAPSHOT, Conflict)),
    route("POST", f"{TAG}/compact", flatten, {200: SnapshotInfo}, body=Compact, errors=(*OF_SNAPSHOT, Conflict)),
    route(
        "PUT",
        f"{TAG}/pool",
        pool,
        {200: PoolInfo},
        body=SetPool,
        errors=(*OF_SNAPSHOT, Conflict, CapabilityMissing, HostNotReady),
    ),
    route(
        "POST",
        "/v1/rootfs",
        rootfs,
        {200: dict[str, Any]},
        body=BuildRootfs,
        events="only",
        errors=(BadInput, Conflict, BuildFailed, HostNotReady, NoSpace),
    ),
]
