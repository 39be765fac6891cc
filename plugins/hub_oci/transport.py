"""A registry that speaks the OCI distribution protocol: blobs, and an image manifest with our media types."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

import msgspec

from forkd.httpclient import HttpClient, Patience
from forkd.plugins.hub_oci.auth import LOOPBACK, OciAuth
from forkd.specs.errors import BadInput, NotFound, TransferError, Unauthorized
from forkd.specs.packs import Package, Registry, Version
from forkd.specs.transport import Body, Login, Place, UpdateIndex

IMAGE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST = "application/vnd.forkd.manifest.v3+toml"
BLOB = "application/vnd.forkd.blob.v3+zstd"
MAX_PACKAGES = 1000
UPLOAD_ATTEMPTS = 3
_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*/[a-z0-9]+(?:[._-]+[a-z0-9]+)*")


class OciTransport:
    """URLs are ``oci://HOST[:PORT]``; ``oci+http://`` for a registry without TLS that is not on this host."""

    schemes: tuple[str, ...] = ("oci", "oci+http")

    def __init__(self, patience: Patience | None = None) -> None:
        self._http = HttpClient(patience)

    async def index(self, base: str, login: Login | None) -> bytes | None:
        """The catalog with the tags of each repository, as far as the registry shows them."""
        root, auth = _root(base), OciAuth(self._http, login)
        answer = await self._http.request("GET", f"{root}/v2/_catalog?n={MAX_PACKAGES}", auth, limit=4 << 20)
        packages = {}
        for name in _json(answer.body).get("repositories") or []:
            if isinstance(name, str) and _REPOSITORY.fullmatch(name):
                tags = await self._http.request("GET", f"{root}/v2/{name}/tags/list", auth, accept=(200, 404))
                found = _json(tags.body).get("tags") or [] if tags.status == 200 else []
                packages[name] = Package(versions={str(tag): Version() for tag in found})
        return msgspec.json.encode(Registry(packages={name: one for name, one in packages.items() if one.versions}))

    async def manifest(self, place: Place, version: str, limit: int) -> bytes:
        """The config blob of the image manifest, which is our manifest."""
        auth = OciAuth(self._http, place.login)
        url = f"{_repository(place)}/manifests/{version}"
        image = _json((await self._http.request("GET", url, auth, headers={"accept": IMAGE}, limit=4 << 20)).body)
        config = image.get("config")
        if not isinstance(config, dict) or config.get("mediaType") != MANIFEST:
            raise BadInput(f"{place.package}@{version} is in the registry but is not a forkd pack")
        digest, size = str(config.get("digest")), config.get("size")
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or not isinstance(size, int) or not 0 < size <= limit:
            raise TransferError(f"{place.package}@{version} has a manifest over {limit} bytes, or none")
        blob = await self._http.request("GET", f"{_repository(place)}/blobs/{digest}", auth, limit=limit)
        if hashlib.sha256(blob.body).hexdigest() != digest.removeprefix("sha256:"):
            raise TransferError(f"the registry sent other bytes than the manifest of {place.package}@{version}")
        return blob.body

    async def blob_size(self, place: Place, sha256: str) -> int | None:
        """What a HEAD says."""
        auth = OciAuth(self._http, place.login)
        url = f"{_repository(place)}/blobs/sha256:{sha256}"
        answer = await self._http.request("HEAD", url, auth, accept=(200, 404))
        size = answer.headers.get("content-length", "")
        return int(size) if answer.status == 200 and size.isdigit() else None

    async def mount_blob(self, place: Place, sha256: str, other: str) -> bool:
        """A cross-repository mount; the upload that is opened instead where it fails is given up.

        A registry may show us one package and not the other: then nothing is mounted, and the blob is sent.
        """
        if not _REPOSITORY.fullmatch(other):
            return False
        auth = OciAuth(self._http, place.login)
        url = f"{_repository(place)}/blobs/uploads/?mount=sha256:{sha256}&from={other}"
        try:
            answer = await self._http.request("POST", url, auth, accept=(201, 202))
        except Unauthorized:
            return False
        location = urljoin(answer.url, answer.headers.get("location", ""))
        if answer.status == 202 and urlsplit(location)[:2] == urlsplit(url)[:2]:
            with suppress(Unauthorized):  # who may push may not always delete; the registry drops old uploads itself
                await self._http.request("DELETE", location, auth, accept=(200, 202, 204, 404, 405))
        return answer.status == 201

    def read_blob(self, place: Place, sha256: str, size: int, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """GET with Range."""
        url = f"{_repository(place)}/blobs/sha256:{sha256}"
        return self._http.read(url, OciAuth(self._http, place.login), offset, size)

    async def write_blob(self, place: Place, sha256: str, size: int, body: Body) -> None:
        """An upload session and one PUT; the registry checks the digest. A session it forgot is opened again."""
        for attempt in range(UPLOAD_ATTEMPTS):
            try:
                await self._upload(place, sha256, size, body)
                return
            except NotFound:
                if attempt == UPLOAD_ATTEMPTS - 1:
                    raise

    async def _upload(self, place: Place, sha256: str, size: int, body: Body) -> None:
        auth = OciAuth(self._http, place.login)
        uploads = f"{_repository(place)}/blobs/uploads/"
        opened = await self._http.request("POST", uploads, auth, accept=(202,))
        location = urljoin(opened.url, opened.headers.get("location", ""))
        if urlsplit(location)[:2] != urlsplit(uploads)[:2]:  # it would get our login
            raise TransferError(f"the registry wants the blob to be sent to {urlsplit(location).netloc}; refused")
        joint = "&" if urlsplit(location).query else "?"
        headers = {"content-length": str(size), "content-type": "application/octet-stream"}
        url = f"{location}{joint}digest=sha256:{sha256}"
        await self._http.request("PUT", url, auth, headers=headers, body=body, accept=(201, 204))

    async def publish(
        self, place: Place, version: str, manifest: bytes, blobs: dict[str, int], update: UpdateIndex
    ) -> None:
        """The manifest as a blob, then the image manifest under the version's tag."""
        digest = hashlib.sha256(manifest).hexdigest()
        if await self.blob_size(place, digest) is None:
            await self.write_blob(place, digest, len(manifest), _bytes(manifest))
        image = {
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "config": _descriptor(MANIFEST, digest, len(manifest)),
            "layers": [_descriptor(BLOB, sha256, size) for sha256, size in blobs.items()],
        }
        data = json.dumps(image).encode()
        headers = {"content-type": IMAGE, "content-length": str(len(data))}
        auth = OciAuth(self._http, place.login)
        url = f"{_repository(place)}/manifests/{version}"
        await self._http.request("PUT", url, auth, headers=headers, body=_bytes(data), accept=(200, 201, 202))

    def read_file(self, url: str, login: Login | None, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """There are no files in such a registry."""
        raise _no_files()

    async def write_file(self, url: str, login: Login | None, size: int, body: Body) -> None:
        """There are no files in such a registry."""
        raise _no_files()


def _no_files() -> BadInput:
    return BadInput("an OCI registry holds packages, not pack files", hint="write oci://HOST/OWNER/NAME[@VERSION]")


def _root(base: str) -> str:
    parts = urlsplit(base)
    if not parts.netloc or parts.path.strip("/") or "@" in parts.netloc:
        raise BadInput(f"{base!r} is not an OCI registry", hint="write oci://HOST[:PORT]")
    plain = parts.scheme == "oci+http" or parts.hostname in LOOPBACK
    return f"{'http' if plain else 'https'}://{parts.netloc}"


def _repository(place: Place) -> str:
    if not _REPOSITORY.fullmatch(place.package):
        raise BadInput(f"OCI registries want lower-case names, not {place.package!r}", hint="push it as owner/name")
    return f"{_root(place.base)}/v2/{place.package}"


def _descriptor(media_type: str, sha256: str, size: int) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{sha256}", "size": size}


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TransferError("the registry's answer is not JSON") from error
    if not isinstance(value, dict):
        raise TransferError("the registry's answer is not a JSON object")
    return value


def _bytes(data: bytes) -> Body:
    async def body(offset: int) -> AsyncGenerator[bytes, None]:
        yield data[offset:]

    return body
