"""Hub transport: a registry in the memory of this process, as ``skeleton_hub_transport://NAME``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import trio

from forkd.specs.errors import NotFound, TransferError
from forkd.specs.hookspecs import hookimpl
from forkd.specs.transport import Body, HubTransport, Login, Place, UpdateIndex

forkd_contract = 1
CHUNK = 1 << 16


class SkeletonHubTransport:
    """Things by URL. What is stored is stored whole, after its last byte came."""

    schemes: tuple[str, ...] = ("skeleton_hub_transport",)

    def __init__(self) -> None:
        self._things: dict[str, bytes] = {}

    async def index(self, base: str, login: Login | None) -> bytes | None:
        """None before the first push."""
        await trio.lowlevel.checkpoint()
        return self._things.get(f"{base}/registry.json")

    async def manifest(self, place: Place, version: str, limit: int) -> bytes:
        """What was published under this version."""
        await trio.lowlevel.checkpoint()
        found = self._find(f"{place.base}/manifests/{place.package}/{version}")
        if len(found) > limit:
            raise TransferError(f"the manifest of {place.package} has more than {limit} bytes")
        return found

    async def blob_size(self, place: Place, sha256: str) -> int | None:
        """Its length."""
        await trio.lowlevel.checkpoint()
        found = self._things.get(f"{place.base}/blobs/{sha256}")
        return None if found is None else len(found)

    async def mount_blob(self, place: Place, sha256: str, other: str) -> bool:
        """All packages share their blobs."""
        await trio.lowlevel.checkpoint()
        return False

    async def read_blob(self, place: Place, sha256: str, size: int, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Its bytes, if it has the size it should have."""
        found = self._find(f"{place.base}/blobs/{sha256}")
        if len(found) != size:
            raise TransferError(f"blob {sha256} has {len(found)} bytes; {size} are right")
        for start in range(offset, size, CHUNK):
            await trio.lowlevel.checkpoint()
            yield found[start : start + CHUNK]

    async def write_blob(self, place: Place, sha256: str, size: int, body: Body) -> None:
        """Take all of it, then keep it."""
        await self.write_file(f"{place.base}/blobs/{sha256}", place.login, size, body)

    async def publish(
        self, place: Place, version: str, manifest: bytes, blobs: dict[str, int], update: UpdateIndex
    ) -> None:
        """No await between reading the index and writing it, so nobody comes between."""
        await trio.lowlevel.checkpoint()
        self._things[f"{place.base}/manifests/{place.package}/{version}"] = manifest
        index = f"{place.base}/registry.json"
        self._things[index] = update(self._things.get(index))

    async def read_file(self, url: str, login: Login | None, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """A whole pack."""
        await trio.lowlevel.checkpoint()
        yield self._find(url)[offset:]

    async def write_file(self, url: str, login: Login | None, size: int, body: Body) -> None:
        """A whole pack."""
        taken = bytearray()
        async with aclosing(body(0)) as chunks:
            async for chunk in chunks:
                taken += chunk
                await trio.lowlevel.checkpoint()
        if len(taken) != size:
            raise TransferError(f"{url} got {len(taken)} bytes; {size} were announced")
        self._things[url] = bytes(taken)

    def _find(self, url: str) -> bytes:
        try:
            return self._things[url]
        except KeyError:
            raise NotFound(f"{url} is not there") from None


@hookimpl
def forkd_register_hub_transports(register: Callable[[HubTransport], None]) -> None:
    """Called once at start; a transport serves the URL schemes it names."""
    register(SkeletonHubTransport())
