"""A registry behind a web server: GET with Range to read, PUT to write, one URL a file."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from urllib.parse import quote

from forkd.httpclient import HttpClient, LoginAuth, Patience
from forkd.specs.errors import TransferError
from forkd.specs.transport import Body, Login, Place, UpdateIndex

MAX_INDEX = 16 << 20
INDEX_ATTEMPTS = 5


class HttpTransport:
    """URLs are those of the registry's directory."""

    schemes: tuple[str, ...] = ("http", "https")

    def __init__(self, patience: Patience | None = None) -> None:
        self._http = HttpClient(patience)

    async def index(self, base: str, login: Login | None) -> bytes | None:
        """``registry.json``."""
        answer = await self._index(base, login)
        return answer[0]

    async def manifest(self, place: Place, version: str, limit: int) -> bytes:
        """The manifest's file."""
        return (await self._http.request("GET", _manifest(place, version), LoginAuth(place.login), limit=limit)).body

    async def blob_size(self, place: Place, sha256: str) -> int | None:
        """What a HEAD says."""
        url = _blob(place, sha256)
        answer = await self._http.request("HEAD", url, LoginAuth(place.login), accept=(200, 404))
        if answer.status == 404:
            return None
        size = answer.headers.get("content-length", "")
        if not size.isdigit():
            raise TransferError(f"{url} does not say how large it is")
        return int(size)

    async def mount_blob(self, place: Place, sha256: str, other: str) -> bool:
        """All packages share their blobs."""
        return False

    def read_blob(self, place: Place, sha256: str, size: int, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """GET with Range."""
        return self._http.read(_blob(place, sha256), LoginAuth(place.login), offset, size)

    async def write_blob(self, place: Place, sha256: str, size: int, body: Body) -> None:
        """PUT."""
        await self._put(_blob(place, sha256), place.login, size, body)

    async def publish(
        self, place: Place, version: str, manifest: bytes, blobs: dict[str, int], update: UpdateIndex
    ) -> None:
        """PUT the manifest, then the index: only over the one we read, where the server can check that."""
        await self._put(_manifest(place, version), place.login, len(manifest), _bytes(manifest))
        for _ in range(INDEX_ATTEMPTS):
            old, etag = await self._index(place.base, place.login)
            new = update(old)
            guard = {"if-match": etag} if etag else {"if-none-match": "*"} if old is None else {}
            if await self._put(f"{place.base}/registry.json", place.login, len(new), _bytes(new), guard):
                return
        raise TransferError(f"{place.base}/registry.json is changed by others all the time", hint="push again")

    def read_file(self, url: str, login: Login | None, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """GET with Range."""
        return self._http.read(url, LoginAuth(login), offset)

    async def write_file(self, url: str, login: Login | None, size: int, body: Body) -> None:
        """One PUT, as presigned URLs want it."""
        await self._put(url, login, size, body)

    async def _index(self, base: str, login: Login | None) -> tuple[bytes | None, str | None]:
        url = f"{base}/registry.json"
        answer = await self._http.request("GET", url, LoginAuth(login), accept=(200, 404), limit=MAX_INDEX)
        if answer.status == 404:
            return None, None
        etag = answer.headers.get("etag")
        return answer.body, etag if etag and not etag.startswith("W/") else None

    async def _put(
        self, url: str, login: Login | None, size: int, body: Body, headers: dict[str, str] | None = None
    ) -> bool:
        """Whether it was stored; False only if a condition in ``headers`` did not hold."""
        sent = {"content-length": str(size), "content-type": "application/octet-stream", **(headers or {})}
        accept = (200, 201, 202, 204, 405, 412) if headers else (200, 201, 202, 204, 405)
        answer = await self._http.request("PUT", url, LoginAuth(login), headers=sent, body=body, accept=accept)
        if answer.status == 405:
            raise TransferError(
                "the web server takes no PUT", hint="push to its directory with file:, or to an OCI registry"
            )
        return answer.status != 412


def _manifest(place: Place, version: str) -> str:
    return f"{place.base}/manifests/{quote(place.package)}/{quote(version, safe='')}.toml"


def _blob(place: Place, sha256: str) -> str:
    return f"{place.base}/blobs/sha256/{sha256}"


def _bytes(data: bytes) -> Body:
    async def body(offset: int) -> AsyncGenerator[bytes, None]:
        yield data[offset:]

    return body
