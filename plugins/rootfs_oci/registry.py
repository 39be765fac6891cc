"""A registry's side of the OCI distribution API: manifests and blobs by digest, never more than was announced."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import trio

from forkd.httpclient import body_of
from forkd.plugins.rootfs_oci.reference import DEFAULT_REGISTRY, Reference, is_loopback
from forkd.specs.errors import BuildFailed, NoSpace

MAX_DOCUMENT = 4 << 20
CHUNK = 1 << 20
ATTEMPTS = 5
"""Without any progress between them."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 20.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry:
    """One image's repository; an async context manager that owns its connections."""

    def __init__(
        self,
        reference: Reference,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        self.reference = reference
        self._first_delay = first_delay
        self._local = is_loopback(urlsplit(reference.base_url).hostname or "")
        self._authorization: str | None = None
        self._client = httpx.AsyncClient(
            transport=transport,
            follow_redirects=True,
            max_redirects=5,
            timeout=httpx.Timeout(60, connect=20),
            event_hooks={"request": [self._check_request]},
        )

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def manifest(self, version: str) -> tuple[str, dict[str, Any]]:
        """A manifest or index by tag or digest: its media type and itself, with the digest checked if there is one."""
        accept = ", ".join((*INDEXES, *MANIFESTS))
        url = f"{self.reference.base_url}/manifests/{version}"
        data, kind = await self._document(url, MAX_DOCUMENT, {"Accept": accept})
        if version.startswith("sha256:"):
            _check_digest(data, version, "the manifest")
        document = _object(data, "the manifest")
        return str(document.get("mediaType") or kind.partition(";")[0].strip()), document

    async def small_blob(self, digest: str, size: int) -> dict[str, Any]:
        """A JSON blob, such as an image's configuration."""
        if size > MAX_DOCUMENT:
            raise BuildFailed(f"the image's configuration has {size} bytes, more than {MAX_DOCUMENT}")
        data, _ = await self._document(f"{self.reference.base_url}/blobs/{digest}", size, {})
        _check_digest(data, digest, "the image's configuration")
        return _object(data, "the image's configuration")

    async def fetch_blob(self, digest: str, size: int, out: IO[bytes]) -> None:
        """Write a blob to ``out``, hashing on the way; a connection that breaks is taken up where it broke."""
        sha, have, attempt = hashlib.sha256(), 0, 0
        while have < size or not attempt:
            headers = {"Range": f"bytes={have}-"} if have else {}
            before = have
            try:
                async with self._stream(f"{self.reference.base_url}/blobs/{digest}", headers) as response:
                    if have and response.status_code != 206:
                        sha, have = hashlib.sha256(), 0
                        out.seek(0)
                        out.truncate()
                    async with body_of(response, CHUNK) as pieces:
                        async for piece in pieces:
                            have += len(piece)
                            if have > size:
                                raise BuildFailed(
                                    f"{self.reference}: blob {digest} is longer than the {size} bytes said"
                                )
                            sha.update(piece)
                            await trio.to_thread.run_sync(out.write, piece)
                break
            except (httpx.HTTPError, _Busy) as error:
                attempt = 1 if have > before else attempt + 1
                if attempt >= ATTEMPTS:
                    raise BuildFailed(f"{self.reference}: blob {digest} broke off: {_said(error)}") from error
                await self._wait(attempt, error)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoSpace("no space left for the layers of the image", hint="forkd prune, forkd rmi") from error
                raise
        if have != size or f"sha256:{sha.hexdigest()}" != digest:
            raise BuildFailed(f"{self.reference}: blob {digest} arrived with other contents ({have} of {size} bytes)")
        out.seek(0)

    # -- below -------------------------------------------------------------------------------------------------------

    async def _document(self, url: str, limit: int, headers: dict[str, str]) -> tuple[bytes, str]:
        attempt = 0
        while True:
            try:
                async with self._stream(url, headers) as response:
                    return await self._bounded(response, limit), response.headers.get("Content-Type", "")
            except (httpx.HTTPError, _Busy) as error:
                attempt += 1
                # Where nobody listens, the name is likelier wrong than the registry busy.
                if attempt >= (2 if isinstance(error, httpx.ConnectError) else ATTEMPTS):
                    raise BuildFailed(f"{self.reference} cannot be fetched: {_said(error)}") from error
                await self._wait(attempt, error)

    async def _wait(self, attempt: int, error: Exception) -> None:
        """Sleep before the next attempt; longer each time, or as long as the registry asks for."""
        asked = error.after if isinstance(error, _Busy) else None
        await trio.sleep(asked if asked is not None else min(self._first_delay * 2 ** (attempt - 1), LONGEST_DELAY))

    async def _bounded(self, response: httpx.Response, limit: int) -> bytes:
        data = bytearray()
        async with body_of(response, 65536) as pieces:
            async for piece in pieces:
                data += piece
                if len(data) > limit:
                    raise BuildFailed(f"{self.reference}: an answer of the registry is longer than {limit} bytes")
        return bytes(data)

    def _stream(self, url: str, headers: dict[str, str]) -> _Answer:
        return _Answer(self, url, headers)

    async def send(self, url: str, headers: dict[str, str]) -> httpx.Response:
        """A GET whose body is yet to be read; logs in when the registry asks for it, once."""
        for again in (False, True):
            said = {"Authorization": self._authorization} if self._authorization else {}
            response = await self._client.send(
                self._client.build_request("GET", url, headers={**headers, **said, "Accept-Encoding": "identity"}),
                stream=True,
            )
            if response.status_code != 401 or again:
                break
            challenge = response.headers.get("WWW-Authenticate", "")
            await response.aclose()
            self._authorization = await self._log_in(challenge)
        if response.status_code in (200, 206):
            return response
        await response.aclose()
        if response.status_code in BUSY:
            raise _Busy(response)
        raise _refused(self.reference, response.status_code)

    async def _log_in(self, challenge: str) -> str:
        """The Authorization header a registry's challenge asks for."""
        kind, _, words = challenge.partition(" ")
        basic = _stored_credentials(self.reference.host)
        if kind.lower() == "basic":
            if basic is None:
                raise _refused(self.reference, 401)
            return f"Basic {basic}"
        fields = dict(_CHALLENGE.findall(words))
        if kind.lower() != "bearer" or "realm" not in fields:
            raise BuildFailed(f"{self.reference}: the registry asks for a login of an unknown kind: {kind[:40]!r}")
        query = {"scope": fields.get("scope") or f"repository:{self.reference.name}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        headers = {"Accept-Encoding": "identity"}
        if basic is not None:
            headers["Authorization"] = f"Basic {basic}"
        try:
            where = httpx.URL(fields["realm"]).copy_merge_params(query)  # a realm may have a query of its own
        except httpx.InvalidURL as error:
            raise BuildFailed(f"{self.reference}: the registry sends us to a malformed URL for a token") from error
        async with self._client.stream("GET", where, headers=headers) as response:
            if response.status_code != 200:
                raise _refused(self.reference, response.status_code)
            answer = _object(await self._bounded(response, MAX_DOCUMENT), "the registry's token")
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str):
            raise BuildFailed(f"{self.reference}: the registry gave no token")
        return f"Bearer {token}"

    async def _check_request(self, request: httpx.Request) -> None:
        """Plain HTTP only from this machine to this machine, whatever a redirect or a challenge says."""
        if request.url.scheme == "https" or (self._local and is_loopback(request.url.host)):
            return
        raise BuildFailed(f"{self.reference}: refusing to follow the registry to {request.url.scheme}://")


class _Busy(Exception):
    """The registry has no time just now; ``after`` is in how many seconds it wants to be asked again, if it is soon."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"HTTP {response.status_code}")
        said = response.headers.get("Retry-After", "")
        self.after = min(float(said), 10 * LONGEST_DELAY) if said.isdecimal() else None


class _Answer:
    """An answer whose body is read inside ``async with``."""

    def __init__(self, registry: Registry, url: str, headers: dict[str, str]) -> None:
        self._registry, self._url, self._headers = registry, url, headers

    async def __aenter__(self) -> httpx.Response:
        self._response = await self._registry.send(self._url, self._headers)
        return self._response

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            await self._response.aclose()


def _stored_credentials(host: str) -> str | None:
    """What ``docker login`` keeps for the host, as base64; credential helpers are not asked."""
    folder = os.environ.get("DOCKER_CONFIG") or os.path.join(os.environ.get("HOME") or "/root", ".docker")
    try:
        auths = json.loads(Path(folder, "config.json").read_bytes()).get("auths", {})
        names = (host, f"https://{host}", *(["https://index.docker.io/v1/"] if host == DEFAULT_REGISTRY else []))
        found = next(auths[name]["auth"] for name in names if auths.get(name, {}).get("auth"))
        return base64.b64encode(base64.b64decode(found)).decode()
    except (OSError, ValueError, AttributeError, TypeError, KeyError, StopIteration):
        return None


def _refused(reference: Reference, status: int) -> BuildFailed:
    if status in (401, 403):
        hint = f"log in first (`docker login {reference.host}` or $DOCKER_CONFIG/config.json), or check the name"
        return BuildFailed(f"the registry does not let us read {reference} (HTTP {status})", hint=hint)
    if status == 404:
        return BuildFailed(f"there is no image {reference}", hint="check name and tag")
    return BuildFailed(f"the registry answers HTTP {status} for {reference}")


def _check_digest(data: bytes, digest: str, what: str) -> None:
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise BuildFailed(f"{what} does not have the digest {digest}")


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BuildFailed(f"{what} is not JSON") from error
    if not isinstance(document, dict):
        raise BuildFailed(f"{what} is not a JSON object")
    return document


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
