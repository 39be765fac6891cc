"""The transport: objects below a prefix of a bucket, laid out as a directory registry is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio

from forkd.specs.errors import BadInput, NotFound, TransferError, Unauthorized
from forkd.specs.transport import Body, Login, Place, UpdateIndex
from forkd_hub_s3.sigv4 import UNSIGNED, Identity, encoded, signed_headers

if TYPE_CHECKING:
    import httpx

MAX_INDEX = 16 << 20
MAX_PUT = 5 << 30
ATTEMPTS = 4
FIRST_WAIT = 0.2
BUSY = (429, 500, 502, 503, 504)
EMPTY = hashlib.sha256(b"").hexdigest()


class S3Transport:
    """``s3://BUCKET/PREFIX``. An object is there whole or not at all: that is S3's own promise."""

    schemes: tuple[str, ...] = ("s3",)

    async def index(self, base: str, login: Login | None) -> bytes | None:
        """``registry.json``."""
        return (await self._index(base, login))[0]

    async def manifest(self, place: Place, version: str, limit: int) -> bytes:
        """The manifest's object."""
        body, _ = await self._get(_manifest(place, version), place.login, limit)
        return body

    async def blob_size(self, place: Place, sha256: str) -> int | None:
        """What a HEAD says."""
        url = _blob(place, sha256)
        answer = await _asked("HEAD", url, place.login)
        if answer.status_code == 404:
            return None
        _check(answer, url)
        return int(answer.headers["content-length"])

    async def mount_blob(self, place: Place, sha256: str, other: str) -> bool:
        """All packages share their blobs."""
        return False

    def read_blob(self, place: Place, sha256: str, size: int, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """GET with Range, resumed where it broke."""
        return self._read(_blob(place, sha256), place.login, offset, size)

    async def write_blob(self, place: Place, sha256: str, size: int, body: Body) -> None:
        """PUT; the store checks the digest, which is signed with the request."""
        await self._put(_blob(place, sha256), place.login, size, body, sha256)

    async def publish(
        self, place: Place, version: str, manifest: bytes, blobs: dict[str, int], update: UpdateIndex
    ) -> None:
        """The manifest, then the index: only over the one that was read."""
        await self._put_bytes(_manifest(place, version), place.login, manifest, {})
        url = f"{place.base}/registry.json"
        for _ in range(ATTEMPTS):
            old, etag = await self._index(place.base, place.login)
            guard = {"if-none-match": "*"} if etag is None else {"if-match": etag}
            if await self._put_bytes(url, place.login, update(old), guard):
                return
        raise TransferError(f"{url} is changed by others all the time", hint="push again")

    def read_file(self, url: str, login: Login | None, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """A pack's object."""
        return self._read(url, login, offset, None)

    async def write_file(self, url: str, login: Login | None, size: int, body: Body) -> None:
        """A pack as one object."""
        await self._put(url, login, size, body, UNSIGNED)

    async def _index(self, base: str, login: Login | None) -> tuple[bytes | None, str | None]:
        try:
            return await self._get(f"{base}/registry.json", login, MAX_INDEX)
        except NotFound:
            return None, None

    async def _get(self, url: str, login: Login | None, limit: int) -> tuple[bytes, str | None]:
        for attempt in range(ATTEMPTS):
            async with _opened("GET", url, login) as answer:
                if answer.status_code not in BUSY or attempt == ATTEMPTS - 1:
                    _check(answer, url)
                    found = bytearray()
                    async with _chunks(answer) as chunks:
                        async for chunk in chunks:
                            found += chunk
                            if len(found) > limit:
                                raise TransferError(f"{url} has more than {limit} bytes")
                    return bytes(found), answer.headers.get("etag")
            await _wait(attempt)
        raise AssertionError("unreachable")

    async def _read(self, url: str, login: Login | None, offset: int, size: int | None) -> AsyncGenerator[bytes, None]:
        import httpx

        position, failures = offset, 0
        while size is None or position < size:
            try:
                async with _opened("GET", url, login, {"range": f"bytes={position}-"}) as answer:
                    if answer.status_code in BUSY and failures < ATTEMPTS:
                        raise httpx.ReadError(f"status {answer.status_code}")
                    if answer.status_code == 416:  # nothing from there on
                        break
                    _check(answer, url)
                    async with _chunks(answer) as chunks:
                        async for chunk in chunks:
                            position += len(chunk)
                            if size is not None and position > size:
                                raise TransferError(f"{url} has more than the {size} bytes it should have")
                            yield chunk
                    break
            except (httpx.TransportError, httpx.StreamError) as error:
                failures += 1
                if failures > ATTEMPTS:
                    raise TransferError(f"{url} cannot be read: {error}") from error
                await _wait(failures)
        if size is not None and position != size:
            raise TransferError(f"{url} has {position} bytes; {size} are right")

    async def _put_bytes(self, url: str, login: Login | None, data: bytes, guard: Mapping[str, str]) -> bool:
        async def body(offset: int) -> AsyncGenerator[bytes, None]:
            yield data[offset:]

        return await self._put(url, login, len(data), body, hashlib.sha256(data).hexdigest(), guard)

    async def _put(
        self, url: str, login: Login | None, size: int, body: Body, payload: str, guard: Mapping[str, str] | None = None
    ) -> bool:
        """Whether it was stored; False only if the guard's condition did not hold."""
        if size > MAX_PUT:
            raise BadInput(f"{size >> 30} GiB is more than one object can be stored with", hint="split the layer")
        for attempt in range(ATTEMPTS):
            headers = {"content-length": str(size), **(guard or {})}
            async with aclosing(body(0)) as chunks:
                answer = await _asked("PUT", url, login, headers, payload, chunks)
            if guard and answer.status_code in (409, 412):
                return False
            if answer.status_code not in BUSY:
                _check(answer, url)
                return True
            await _wait(attempt)
        raise TransferError(f"{url} cannot be stored: the store answers {answer.status_code}")


def _manifest(place: Place, version: str) -> str:
    return f"{place.base}/manifests/{place.package}/{version}.toml"


def _blob(place: Place, sha256: str) -> str:
    return f"{place.base}/blobs/sha256/{sha256}"


def _identity(login: Login | None) -> Identity:
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    if login is not None and login.username and login.password:
        return Identity(login.username, login.password, region)
    try:
        key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    except KeyError as error:
        raise Unauthorized("nobody said who we are to the store", hint=f"set {error.args[0]}") from None
    return Identity(key, secret, region, os.environ.get("AWS_SESSION_TOKEN"))


def _location(url: str, region: str) -> tuple[str, str]:
    """The endpoint (scheme and host) and the plain path of an ``s3:`` URL."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or ".." in parts.path.split("/"):
        raise BadInput(f"{url!r} is not the URL of an S3 object", hint="write s3://BUCKET/PREFIX")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return (endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/"), f"/{parts.netloc}{parts.path}"


@asynccontextmanager
async def _opened(
    method: str,
    url: str,
    login: Login | None,
    extra: Mapping[str, str] | None = None,
    payload: str = EMPTY,
    content: AsyncGenerator[bytes, None] | None = None,
) -> AsyncGenerator[httpx.Response, None]:
    import httpx

    identity = _identity(login)
    endpoint, path = _location(url, identity.region)
    host = urlsplit(endpoint).netloc
    headers = signed_headers(identity, method, host, path, payload, datetime.now(UTC), extra or {})
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(60.0)) as client,
        client.stream(method, endpoint + encoded(path), headers=headers, content=content) as answer,
    ):
        yield answer


@asynccontextmanager
async def _chunks(answer: httpx.Response) -> AsyncGenerator[AsyncIterator[bytes], None]:
    """The answer's body, which may be left unread: the generators that httpx nests are brought to their end."""
    import httpx

    chunks = answer.aiter_raw()
    try:
        yield chunks
    finally:
        with trio.CancelScope(shield=True):
            await answer.aclose()
        with suppress(httpx.HTTPError, httpx.StreamError):  # the connection is closed: they end at once
            async for _ in chunks:
                pass


async def _asked(
    method: str,
    url: str,
    login: Login | None,
    extra: Mapping[str, str] | None = None,
    payload: str = EMPTY,
    content: AsyncGenerator[bytes, None] | None = None,
) -> httpx.Response:
    """One request, and a short answer. Raises TransferError if nobody answers."""
    import httpx

    try:
        async with _opened(method, url, login, extra, payload, content) as answer:
            await answer.aread()
            return answer
    except httpx.TransportError as error:
        raise TransferError(f"{url} cannot be reached: {error}") from error


def _check(answer: httpx.Response, url: str) -> None:
    if answer.status_code == 404:
        raise NotFound(f"{url} is not there")
    if answer.status_code in (401, 403):
        raise Unauthorized(f"the store does not let us at {url}", hint="check the keys, the bucket and its policy")
    if not answer.is_success:
        raise TransferError(f"{url}: the store answers {answer.status_code}")


async def _wait(attempt: int) -> None:
    await trio.sleep(FIRST_WAIT * 2**attempt)
