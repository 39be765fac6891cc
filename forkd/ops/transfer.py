"""Push and pull: blobs between this host and a registry, never the same bytes twice."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from forkd.hub import manifest as manifests
from forkd.hub import pack as packs
from forkd.hub import refs, registry, signatures
from forkd.hub.refs import Ref
from forkd.linux.filelock import file_lock
from forkd.ops.keys import login_for, sign_document
from forkd.ops.meter import ByteProgress, Meter, metered
from forkd.ops.pack import Source, chain_of, ensure_blob, layers_of, pack, sources_of
from forkd.ops.unpack import Plan, Region, check_replaced, check_space, install, plan, unpack_file
from forkd.runtime import Runtime
from forkd.specs.errors import BadInput, ForkdError, NoSpace, NotFound, PackError, TransferError
from forkd.specs.packs import MAX_MANIFEST, MAX_SIGNATURES, PACK_SUFFIX, Blob, Version
from forkd.specs.requests import PackRequest, PullRequest, PushRequest, UnpackRequest
from forkd.specs.transport import HubTransport, Login, Place
from forkd.store import files

Reader = Callable[[int], AsyncGenerator[bytes, None]]
"""The bytes of something elsewhere, from an offset on."""
AT_ONCE = 4
CHUNK = 1 << 20
MAX_DOCUMENT = MAX_MANIFEST + MAX_SIGNATURES * 256
_AGAIN = "run the same command again; if it stays, the registry is damaged or lying"


def transport_for(runtime: Runtime, scheme: str) -> HubTransport:
    """The transport of a URL scheme. Raises BadInput naming those there are."""
    found = runtime.plugins.hub_transports.get(scheme)
    if found is None:
        known = ", ".join(sorted(runtime.plugins.hub_transports))
        raise BadInput(f"no hub transport speaks {scheme!r}", hint=f"there are: {known}")
    return found


def place_of(runtime: Runtime, ref: Ref) -> Place:
    """The package a reference names, with our login there."""
    return Place(ref.base, ref.package, login_for(runtime, f"{ref.base}/{ref.package}"))


# -- push ------------------------------------------------------------------------------------------------------------


async def push(runtime: Runtime, request: PushRequest, progress: ByteProgress) -> dict[str, Any]:
    """Send a snapshot to a registry, or as one pack file to a URL."""
    ref = refs.parse(request.target, request.hub or runtime.settings.hub_url)
    if ref.pack_url is not None:
        return await _push_file(runtime, ref.pack_url, request, progress)
    if request.since is not None:
        raise BadInput(
            "--since is for pack files", hint="leave it out: a registry is asked blob by blob and sent what it lacks"
        )
    transport, place = transport_for(runtime, ref.scheme), place_of(runtime, ref)
    layers = chain_of(runtime, request.tag)
    sources = sources_of(runtime, layers)
    with runtime.reading(request.tag):
        blobs, absent = await _absent(runtime, transport, place, sources, progress)
    async with metered(progress, "sending", sum(blob.stored for blob in absent)) as meter:
        await _each(absent, lambda blob: _send_blob(runtime, transport, place, blob, meter))
    manifest = manifests.make(layers_of(layers), blobs, request.description, request.base_image)
    body = manifests.encode(manifest)
    document = sign_document(runtime, body, request.sign)
    entry = Version(
        sha256=hashlib.sha256(body).hexdigest(),
        size_bytes=sum(blob.stored for blob in blobs),
        memory_mib=layers[-1].manifest.hardware.mem_mib,
        base_image=manifest.base_image or None,
        created_at=manifest.created_at,
    )
    update = partial(_updated, ref=ref, description=request.description, entry=entry)
    sizes = {blob.sha256: blob.stored for blob in blobs}
    await transport.publish(place, ref.version, document, sizes, update)
    runtime.blobs.note_package(place.base, place.package)
    runtime.observe("push", tag=request.tag, to=str(ref))
    return {
        "tag": request.tag,
        "to": str(ref),
        "blobs": len(blobs),
        "total_bytes": sum(sizes.values()) + len(document),
        "sent_bytes": sum(blob.stored for blob in absent) + len(document),
    }


def _updated(old: bytes | None, ref: Ref, description: str, entry: Version) -> bytes:
    index = registry.decode(old) if old is not None else registry.EMPTY
    return registry.encode(registry.with_version(index, ref.package, ref.version, description, entry))


async def _absent(
    runtime: Runtime, transport: HubTransport, place: Place, sources: list[Source], progress: ByteProgress
) -> tuple[list[Blob], list[Blob]]:
    """The blobs of all files, and those the registry lacks. What it has is not even compressed again."""
    blobs: list[Blob] = []
    absent: list[Blob] = []
    async with metered(progress, "packing", sum(source.bytes for source in sources)) as meter:
        for source in sources:
            known = runtime.blobs.known(source.digest, source.size)
            if known is not None and await _is_there(runtime, transport, place, known):
                blobs.append(msgspec.structs.replace(known, kind=source.kind))
                meter.add(source.bytes)
                continue
            blob = await ensure_blob(runtime, source, meter)
            blobs.append(blob)
            asked_already = known is not None and known.sha256 == blob.sha256
            if asked_already or not await _is_there(runtime, transport, place, blob):
                absent.append(blob)
    return blobs, absent


async def _is_there(runtime: Runtime, transport: HubTransport, place: Place, blob: Blob) -> bool:
    """Whether the package has a blob, or has it now from another package of the registry that we know of."""
    if await transport.blob_size(place, blob.sha256) == blob.stored:
        return True
    for other in runtime.blobs.packages(place.base):
        if other != place.package and await transport.mount_blob(place, blob.sha256, other):
            return True
    return False


async def _send_blob(runtime: Runtime, transport: HubTransport, place: Place, blob: Blob, meter: Meter) -> None:
    await transport.write_blob(
        place, blob.sha256, blob.stored, partial(_file_body, runtime.blobs.path(blob.sha256), meter)
    )


async def _file_body(path: Path, meter: Meter, offset: int) -> AsyncGenerator[bytes, None]:
    """A file's bytes; what is sent again is not counted twice."""
    sent = 0
    whole = False
    try:
        with open(path, "rb") as source:  # noqa: ASYNC230
            source.seek(offset)
            while chunk := await trio.to_thread.run_sync(source.read, CHUNK):
                yield chunk
                sent += len(chunk)
                meter.add(len(chunk))
        whole = True
    finally:
        if not whole:
            meter.add(-sent)


async def _push_file(runtime: Runtime, url: str, request: PushRequest, progress: ByteProgress) -> dict[str, Any]:
    transport = transport_for(runtime, refs.scheme_of(url))
    with runtime.blobs.stage() as stage:
        out = stage / f"pack{PACK_SUFFIX}"
        asked = PackRequest(
            tag=request.tag,
            out=str(out),
            description=request.description,
            base_image=request.base_image,
            since=request.since,
            sign=request.sign,
            bundle=request.since is None,  # one URL takes one file, so the disk travels inside
        )
        await pack(runtime, asked, progress)
        size = out.stat().st_size
        async with metered(progress, "sending", size) as meter:
            await transport.write_file(url, login_for(runtime, url), size, partial(_file_body, out, meter))
    runtime.observe("push", tag=request.tag, to=_without_query(url))
    return {"tag": request.tag, "to": _without_query(url), "blobs": 1, "total_bytes": size, "sent_bytes": size}


# -- pull ------------------------------------------------------------------------------------------------------------


async def pull(runtime: Runtime, request: PullRequest, progress: ByteProgress) -> dict[str, Any]:
    """Fetch a snapshot with all it builds on; what is here already, whole or in part, is not fetched again."""
    ref = refs.parse(request.target, request.hub or runtime.settings.hub_url)
    url, entry = await locate(runtime, ref)
    if url is None:
        return await _pull_package(runtime, ref, entry, request, progress)
    return await _pull_file(runtime, url, entry.sha256 and entry.sha256.lower(), request, progress)


async def locate(runtime: Runtime, ref: Ref) -> tuple[str | None, Version]:
    """The URL of the pack file a reference leads to, None if it is a package; what the index says about it."""
    if ref.pack_url is not None:
        return ref.pack_url, Version()
    entry = await find_version(runtime, ref)
    return None if entry.url is None else _pack_url(ref, entry.url), entry


async def read_manifest(runtime: Runtime, ref: Ref) -> tuple[bytes, list[signatures.Signature]]:
    """The manifest of what a reference leads to, and its signatures; of a pack file only the beginning is fetched."""
    url, entry = await locate(runtime, ref)
    if url is None:
        return await fetch_manifest(runtime, ref, entry)
    read = partial(transport_for(runtime, refs.scheme_of(url)).read_file, url, login_for(runtime, url))
    with runtime.blobs.stage() as stage:
        head = await _fetch_head(runtime, stage / "head", read)
    return head.body, head.signatures


async def find_version(runtime: Runtime, ref: Ref) -> Version:
    """What the index says about a version; registries without an index are asked for the manifest itself."""
    if ref.scheme.startswith("oci"):  # many do not let everybody list what they have, and their lists say no more
        return Version()
    index = await transport_for(runtime, ref.scheme).index(ref.base, login_for(runtime, ref.base))
    if index is None:
        return Version()
    found = registry.decode(index).packages
    if ref.package not in found:
        raise NotFound(
            f"the registry at {refs.shown(ref.base)} has no package {ref.package!r}", hint="forkd hub ls lists them"
        )
    versions = found[ref.package].versions
    if ref.version not in versions:
        known = ", ".join(sorted(versions)) or "none"
        raise NotFound(f"{ref.package!r} has no version {ref.version!r}", hint=f"there are: {known}")
    return versions[ref.version]


async def fetch_manifest(runtime: Runtime, ref: Ref, entry: Version) -> tuple[bytes, list[signatures.Signature]]:
    """The manifest of a version, checked against its index entry, and its signatures. Raises PackError."""
    transport, place = transport_for(runtime, ref.scheme), place_of(runtime, ref)
    try:
        document = await transport.manifest(place, ref.version, MAX_DOCUMENT)
    except NotFound as error:
        raise NotFound(f"there is no {ref}", hint="forkd hub ls lists what there is") from error
    body, signed = signatures.split(document)
    if entry.sha256 is not None and hashlib.sha256(body).hexdigest() != entry.sha256:
        raise PackError(
            f"the manifest of {ref} is not the one its registry names",
            hint="somebody may be pushing right now; try again",
        )
    return body, signed


async def _pull_package(
    runtime: Runtime, ref: Ref, entry: Version, request: PullRequest, progress: ByteProgress
) -> dict[str, Any]:
    progress("asking the registry", None)
    body, signed = await fetch_manifest(runtime, ref, entry)
    planned = plan(runtime, body, signed, tag=request.tag, force=request.force, policy=request.trust)
    check_replaced(runtime, planned)
    transport, place = transport_for(runtime, ref.scheme), place_of(runtime, ref)
    wanted = planned.wanted()
    already = sum(_have(runtime, blob) for blob in wanted)
    check_space(runtime, planned, sum(blob.stored for blob in wanted) - already)
    async with metered(progress, "fetching", sum(blob.stored for blob in wanted)) as meter:
        await _each(wanted, lambda blob: _fetch_blob(runtime, transport, place, blob, meter))
    result = await _install(runtime, planned, str(ref), progress)
    runtime.blobs.note_package(place.base, place.package)
    return {**result, "from": str(ref), "fetched_bytes": sum(blob.stored for blob in wanted) - already}


async def _install(runtime: Runtime, planned: Plan, origin: str, progress: ByteProgress) -> dict[str, Any]:
    """Install from fetched blobs, which are not needed afterwards; bad ones are never kept for another attempt."""
    regions = {blob.sha256: Region(runtime.blobs.path(blob.sha256)) for blob in planned.wanted()}
    wanted = planned.wanted()
    try:
        result = await install(runtime, planned, regions, {"from": origin}, progress)
    except PackError:
        _drop(runtime, wanted)
        raise
    _drop(runtime, wanted)
    return result


def _drop(runtime: Runtime, blobs: list[Blob]) -> None:
    for blob in blobs:
        runtime.blobs.path(blob.sha256).unlink(missing_ok=True)


def _have(runtime: Runtime, blob: Blob) -> int:
    if runtime.blobs.find(blob.sha256, blob.stored) is not None:
        return blob.stored
    part = runtime.blobs.part(blob.sha256)
    return min(part.stat().st_size, blob.stored) if part.exists() else 0


async def _fetch_blob(runtime: Runtime, transport: HubTransport, place: Place, blob: Blob, meter: Meter) -> None:
    read = partial(transport.read_blob, place, blob.sha256, blob.stored)
    await _fetch(runtime, blob.sha256, blob.sha256, blob.stored, read, meter)


async def _fetch(
    runtime: Runtime,
    name: str,
    sha256: str | None,
    size: int,
    read: Reader,
    meter: Meter,
    *,
    keep: bool = True,
) -> Path:
    """Download into the blob store, continuing what an earlier attempt left. The whole file's digest is checked.

    Without ``keep`` it stays a part, to be removed by the caller: an interruption until then costs nothing.
    """
    store = runtime.blobs
    store.root.mkdir(parents=True, exist_ok=True)
    part = store.part(name)
    async with file_lock(part):
        if keep and store.find(name, size) is not None:  # another process may have fetched it
            part.unlink(missing_ok=True)
            meter.add(size)
            return store.path(name)
        with files.disk_full_as_no_space(store.root), open(part, "ab") as out:  # noqa: ASYNC230
            if out.tell() > size:
                out.seek(out.truncate(0))
            digest = await trio.to_thread.run_sync(_digest_of, part)
            meter.add(out.tell())
            async with aclosing(read(out.tell())) as chunks:
                async for chunk in chunks:
                    if out.tell() + len(chunk) > size:
                        part.unlink()
                        raise PackError(f"more is sent than the {size} bytes that are right", hint=_AGAIN)
                    await trio.to_thread.run_sync(out.write, chunk)
                    digest.update(chunk)
                    meter.add(len(chunk))
            out.flush()
            have = out.tell()
        if have < size:
            part.unlink()
            raise PackError(f"what was fetched ends after {have} of {size} bytes", hint=_AGAIN)
        if sha256 is not None and digest.hexdigest() != sha256:
            part.unlink()
            raise PackError(
                f"what was fetched is not {sha256[:12]}…: its SHA-256 is {digest.hexdigest()[:12]}…",
                hint=_AGAIN,
            )
        return await trio.to_thread.run_sync(store.adopt, part, name) if keep else part


def _digest_of(path: Path) -> Any:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256")


async def _pull_file(
    runtime: Runtime, url: str, sha256: str | None, request: PullRequest, progress: ByteProgress
) -> dict[str, Any]:
    """Fetch a pack file whole, and beside it the disk it needs."""
    transport, login = transport_for(runtime, refs.scheme_of(url)), login_for(runtime, url)
    name = hashlib.sha256(url.encode()).hexdigest()
    origin = _without_query(url)
    progress("fetching", None)
    read = partial(transport.read_file, url, login)
    fetched = [runtime.blobs.part(name)]
    try:
        head = await _fetch_head(runtime, fetched[0], read)
        planned = plan(runtime, head.body, head.signatures, tag=request.tag, force=request.force, policy=request.trust)
        check_replaced(runtime, planned)
        check_space(runtime, planned, head.size - fetched[0].stat().st_size)
        async with metered(progress, "fetching", head.size) as meter:
            path = await _fetch(runtime, name, sha256, head.size, read, meter, keep=False)
        for blob in planned.wanted():
            if blob.kind == "rootfs" and not blob.inside:
                beside = await _fetch_beside(runtime, transport, login, url, blob, progress)
                fetched += [beside] if beside else []
        asked = UnpackRequest(path=str(path), tag=request.tag, force=request.force, trust=request.trust)
        size = sum(file.stat().st_size for file in fetched)
        found = await unpack_file(
            runtime, path, asked, {"from": origin}, progress, lambda blob: runtime.blobs.path(blob.sha256)
        )
    except (TransferError, NoSpace):
        raise  # what has arrived is kept, for another attempt to continue; so it is on cancellation
    except ForkdError:
        _remove(fetched)
        raise
    _remove(fetched)
    return {**found, "from": origin, "fetched_bytes": size}


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def _fetch_head(runtime: Runtime, part: Path, read: Reader) -> packs.Head:
    """The manifest of a pack that is elsewhere: no more than its beginning is fetched, to be continued from ``part``.

    So what is no pack, too large, not trusted or in the way of another snapshot is refused before it is fetched.
    """
    runtime.blobs.root.mkdir(parents=True, exist_ok=True)
    async with file_lock(part):
        with files.disk_full_as_no_space(part), open(part, "ab+", buffering=0) as out:  # noqa: ASYNC230
            async with aclosing(read(out.tell())) as chunks:
                while out.tell() < packs.head_size(_begin(part)):
                    chunk = await anext(chunks, b"")
                    if not chunk:
                        raise PackError("the pack's beginning is cut short")
                    await trio.to_thread.run_sync(out.write, chunk)
            out.seek(0)
            return packs.read_head(out)


def _begin(path: Path) -> bytes:
    with open(path, "rb") as source:
        return source.read(64)


async def _fetch_beside(
    runtime: Runtime, transport: HubTransport, login: Login | None, url: str, blob: Blob, progress: ByteProgress
) -> Path | None:
    """The disk that lies beside a pack. Without one, unpacking says what is missing."""
    beside = f"{url.partition('?')[0].rpartition('/')[0]}/{packs.sidecar(blob)}"
    async with metered(progress, "fetching the disk", blob.stored) as meter:
        try:
            read = partial(transport.read_file, beside, login)
            return await _fetch(runtime, blob.sha256, blob.sha256, blob.stored, read, meter)
        except NotFound:
            runtime.blobs.part(blob.sha256).unlink(missing_ok=True)  # there is nothing to continue
            return None


async def _each(blobs: list[Blob], work: Callable[[Blob], Awaitable[None]]) -> None:
    """Work on some blobs at a time; the first error ends the others and is raised as it is."""
    limit = trio.Semaphore(AT_ONCE)
    errors: list[Exception] = []

    async def one(blob: Blob, cancel: trio.CancelScope) -> None:
        async with limit:
            try:
                await work(blob)
            except Exception as error:  # raised below as it is, not as a group
                errors.append(error)
                cancel.cancel()

    async with trio.open_nursery() as nursery:
        for blob in blobs:
            nursery.start_soon(one, blob, nursery.cancel_scope)
    if errors:
        raise errors[0]


def _pack_url(ref: Ref, given: str) -> str:
    """The URL of a pack in an index: relative to the registry, or http(s). Never a file of this host, and as with
    redirects nothing in the clear by the word of what was not."""
    url = given if "://" in given else f"{ref.base}/{given}"
    scheme = refs.scheme_of(url)
    in_the_clear = scheme == "http" and ref.scheme not in ("http", "file")
    if ".." in given.split("/") or (scheme != ref.scheme and scheme not in ("http", "https")) or in_the_clear:
        raise PackError(f"the registry's index names {given[:80]!r}, which is not for it to name")
    return url


def _without_query(url: str) -> str:
    return refs.shown(url.partition("?")[0])
