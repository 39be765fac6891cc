"""Routes of packs and registries, and this host's own registry below /hub/."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from forkd.daemon.api import OF_SNAPSHOT, route
from forkd.daemon.progress import with_progress
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import Emit, EventStream, read_body, reply
from forkd.ops import hub, keys, serve_hub
from forkd.ops.meter import ByteProgress
from forkd.ops.pack import pack
from forkd.ops.transfer import pull, push
from forkd.ops.unpack import unpack
from forkd.specs.errors import (
    BadInput,
    Conflict,
    NoSpace,
    NotFound,
    PackError,
    TransferError,
    TrustError,
    Unauthorized,
)
from forkd.specs.requests import (
    HubCheck,
    HubKeygen,
    HubLogin,
    HubSign,
    HubTrust,
    PackRequest,
    PullRequest,
    PushRequest,
    UnpackRequest,
)
from forkd.specs.transport import Login

Verb = Callable[[ByteProgress], Awaitable[Any]]
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def _streamed(verb: Verb) -> Response:
    async def work(emit: Emit) -> Any:
        return await with_progress(emit, verb)

    return EventStream(work)


async def post_pack(request: Request) -> Response:
    """Write a snapshot's pack to a file of the host."""
    runtime, body = runtime_of(request), await read_body(request, PackRequest)
    return _streamed(lambda progress: pack(runtime, body, progress))


async def post_unpack(request: Request) -> Response:
    """Take in a pack file of the host."""
    runtime, body = runtime_of(request), await read_body(request, UnpackRequest)
    return _streamed(lambda progress: unpack(runtime, body, progress))


async def post_push(request: Request) -> Response:
    """Send a snapshot to a registry."""
    runtime, body = runtime_of(request), await read_body(request, PushRequest)
    return _streamed(lambda progress: push(runtime, body, progress))


async def post_pull(request: Request) -> Response:
    """Fetch a snapshot from a registry."""
    runtime, body = runtime_of(request), await read_body(request, PullRequest)
    return _streamed(lambda progress: pull(runtime, body, progress))


async def get_packages(request: Request) -> Response:
    """What a registry offers."""
    query = request.query_params
    return reply(await hub.list_packages(runtime_of(request), query.get("hub"), query.get("words", "")))


async def post_check(request: Request) -> Response:
    """Whether a package would run here; nothing but its manifest is fetched."""
    body = await read_body(request, HubCheck)
    found = await hub.check(runtime_of(request), body.target, body.hub)
    return reply(msgspec.to_builtins(found))


async def post_login(request: Request) -> Response:
    """Keep or forget a login for a registry."""
    body = await read_body(request, HubLogin)
    if body.forget:
        keys.forget_login(runtime_of(request), body.url)
    elif body.token is None and body.username is None:
        raise BadInput("a login has a token, or a user name and a password")
    else:
        login = Login(token=body.token, username=body.username, password=body.password)
        keys.save_login(runtime_of(request), body.url, login)
    return Response(status_code=204)


async def post_key(request: Request) -> Response:
    """Make a signing key."""
    body = await read_body(request, HubKeygen)
    return reply(keys.keygen(runtime_of(request), body.name), 201)


async def post_sign(request: Request) -> Response:
    """Sign a pack file of the host."""
    body = await read_body(request, HubSign)
    return reply(await hub.sign_pack(runtime_of(request), body.path, body.key))


async def get_trusted(request: Request) -> Response:
    """Which keys are trusted."""
    return reply(keys.list_trusted(runtime_of(request)))


async def post_trusted(request: Request) -> Response:
    """Trust a key, or stop trusting one."""
    body = await read_body(request, HubTrust)
    return reply(keys.trust(runtime_of(request), body.name, body.key))


async def served_index(request: Request) -> Response:
    """This host's snapshots as a registry's index."""
    return Response(serve_hub.index(runtime_of(request)), media_type="application/json")


async def served_manifest(request: Request) -> Response:
    """The manifest of a snapshot of this host; its blobs are made now if need be."""
    owner, name, version = (request.path_params[key] for key in ("owner", "name", "version"))
    return Response(await serve_hub.manifest(runtime_of(request), owner, name, version), media_type="application/toml")


async def served_blob(request: Request) -> Response:
    """A blob, or with Range a part of it."""
    found = serve_hub.blob(runtime_of(request), request.path_params["sha256"])
    begin, end, status = 0, found.size, 200
    if match := _RANGE.fullmatch(request.headers.get("range", "")):
        begin, end, status = int(match[1]), min(int(match[2] or found.size) + 1, found.size), 206
        if begin >= end:
            return Response(status_code=416, headers={"content-range": f"bytes */{found.size}"})
    headers = {"content-length": str(end - begin), "accept-ranges": "bytes"}
    if status == 206:
        headers["content-range"] = f"bytes {begin}-{end - 1}/{found.size}"
    kind = "application/zstd"
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=kind)
    return StreamingResponse(serve_hub.read(found, begin, end), status, headers, kind)


OF_PACK = (*OF_SNAPSHOT, PackError, TrustError, Conflict)
OF_REGISTRY = (*OF_PACK, NotFound, TransferError, Unauthorized)
routes = [
    route("POST", "/v1/hub/pack", post_pack, {200: dict}, body=PackRequest, events="only", errors=OF_PACK),
    route("POST", "/v1/hub/unpack", post_unpack, {200: dict}, body=UnpackRequest, events="only", errors=OF_PACK),
    route("POST", "/v1/hub/push", post_push, {200: dict}, body=PushRequest, events="only", errors=OF_REGISTRY),
    route("POST", "/v1/hub/pull", post_pull, {200: dict}, body=PullRequest, events="only", errors=OF_REGISTRY),
    route(
        "GET",
        "/v1/hub/packages",
        get_packages,
        {200: list[dict[str, Any]]},
        query={"hub": str, "words": str},
        errors=(BadInput, NotFound, TransferError, Unauthorized, PackError),
    ),
    route("POST", "/v1/hub/check", post_check, {200: dict}, body=HubCheck, errors=OF_REGISTRY),
    route("POST", "/v1/hub/login", post_login, {204: None}, body=HubLogin, errors=(BadInput, NotFound)),
    route("POST", "/v1/hub/keys", post_key, {201: dict}, body=HubKeygen, errors=(BadInput, Conflict)),
    route(
        "POST", "/v1/hub/sign", post_sign, {200: dict}, body=HubSign, errors=(BadInput, NotFound, PackError, NoSpace)
    ),
    route("GET", "/v1/hub/trusted", get_trusted, {200: list[dict[str, Any]]}, errors=(TrustError,)),
    route(
        "POST", "/v1/hub/trusted", post_trusted, {200: list[dict[str, Any]]}, body=HubTrust, errors=(BadInput, NotFound)
    ),
    route("GET", "/hub/registry.json", served_index, {200: dict}),
    route(
        "GET",
        "/hub/manifests/{owner}/{name}/{version}.toml",
        served_manifest,
        {200: bytes},
        errors=(NotFound, BadInput, Conflict, NoSpace),
    ),
    route("GET", "/hub/blobs/sha256/{sha256}", served_blob, {200: bytes, 206: bytes, 416: None}, errors=(NotFound,)),
]
