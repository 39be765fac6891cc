"""The contract of hub transports."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest
import trio

from forkd.specs.errors import ForkdError, NotFound, TransferError
from forkd.specs.transport import HubTransport, Login, Place

SIZE = 3 * (1 << 20) + 17
LIMIT = 1 << 20


def digest_of(data: bytes) -> str:
    """The name of a blob."""
    return hashlib.sha256(data).hexdigest()


def body_of(data: bytes) -> Callable[[int], AsyncGenerator[bytes, None]]:
    """A blob's bytes in pieces, from any offset."""

    async def body(offset: int) -> AsyncGenerator[bytes, None]:
        for start in range(offset, len(data), 1 << 18):
            yield data[start : start + (1 << 18)]

    return body


async def read_all(chunks: AsyncGenerator[bytes, None]) -> bytes:
    """All that a transport reads."""
    found = bytearray()
    async with aclosing(chunks) as open_chunks:
        async for chunk in open_chunks:
            found += chunk
    return bytes(found)


class HubTransportContract:
    """Subclass it and give the fixtures ``transport`` and ``base``, the URL of an empty registry one may write to.

    Where that takes a login, give ``login`` too.
    """

    @pytest.fixture
    def login(self) -> Login | None:
        """Who may write."""
        return None

    @pytest.fixture
    def place(self, base: str, login: Login | None) -> Place:
        """A package nobody has pushed yet."""
        return Place(base, "acme/thing", login)

    @pytest.fixture
    def blob(self) -> bytes:
        """Bytes nobody has sent yet."""
        return os.urandom(SIZE)

    async def put(self, transport: HubTransport, place: Place, data: bytes) -> str:
        await transport.write_blob(place, digest_of(data), len(data), body_of(data))
        return digest_of(data)

    def test_it_names_its_schemes(self, transport: HubTransport, base: str) -> None:
        assert base.partition(":")[0] in transport.schemes

    async def test_a_blob_is_read_back_as_it_was_written(
        self, transport: HubTransport, place: Place, blob: bytes
    ) -> None:
        name = await self.put(transport, place, blob)
        assert await transport.blob_size(place, name) == len(blob)
        assert await read_all(transport.read_blob(place, name, len(blob))) == blob

    @pytest.mark.parametrize("offset", [1, SIZE // 2, SIZE - 1])
    async def test_reading_goes_on_from_any_offset(
        self, transport: HubTransport, place: Place, blob: bytes, offset: int
    ) -> None:
        name = await self.put(transport, place, blob)
        assert await read_all(transport.read_blob(place, name, len(blob), offset)) == blob[offset:]

    async def test_writing_a_blob_twice_is_fine(self, transport: HubTransport, place: Place, blob: bytes) -> None:
        await self.put(transport, place, blob)
        name = await self.put(transport, place, blob)
        assert await read_all(transport.read_blob(place, name, len(blob))) == blob

    async def test_a_blob_of_one_package_need_not_be_sent_again_for_another(
        self, transport: HubTransport, place: Place, blob: bytes
    ) -> None:
        name = await self.put(transport, place, blob)
        other = Place(place.base, "acme/other", place.login)
        mounted = await transport.mount_blob(other, name, place.package)
        assert mounted or await transport.blob_size(other, name) == len(blob)
        assert await read_all(transport.read_blob(other, name, len(blob))) == blob
        assert not await transport.mount_blob(other, digest_of(b"never sent"), place.package)

    async def test_what_is_not_there_is_said_so(self, transport: HubTransport, place: Place, blob: bytes) -> None:
        await self.put(transport, place, b"something else")  # so that the registry and the package are there
        assert await transport.blob_size(place, digest_of(blob)) is None
        with pytest.raises(NotFound):
            await read_all(transport.read_blob(place, digest_of(blob), len(blob)))
        with pytest.raises(NotFound):
            await transport.manifest(place, "latest", LIMIT)

    async def test_a_blob_of_another_size_is_an_error(self, transport: HubTransport, place: Place, blob: bytes) -> None:
        name = await self.put(transport, place, blob)
        for size in (len(blob) - 1, len(blob) + 1):
            with pytest.raises(TransferError):
                await read_all(transport.read_blob(place, name, size))

    async def test_a_published_version_is_found_and_listed(
        self, transport: HubTransport, place: Place, blob: bytes
    ) -> None:
        name = await self.put(transport, place, blob)
        for version, manifest in (("1", b"first = 1\n"), ("latest", b"second = 2\n"), ("latest", b"third = 3\n")):
            seen: list[bytes | None] = []

            def update(old: bytes | None, seen: list[bytes | None] = seen) -> bytes:
                seen.append(old)
                return b'{"schema_version": 1, "packages": {"acme/thing": {"versions": {"1": {}, "latest": {}}}}}'

            await transport.publish(place, version, manifest, {name: len(blob)}, update)
        assert await transport.manifest(place, "1", LIMIT) == b"first = 1\n"
        assert await transport.manifest(place, "latest", LIMIT) == b"third = 3\n"
        index = await transport.index(place.base, place.login)
        assert index is not None
        assert b"acme/thing" in index
        assert b"latest" in index

    async def test_a_manifest_over_the_limit_is_not_read(
        self, transport: HubTransport, place: Place, blob: bytes
    ) -> None:
        name = await self.put(transport, place, blob)
        await transport.publish(place, "big", b"x = 1\n" * 1000, {name: len(blob)}, lambda old: old or b"{}")
        with pytest.raises(TransferError):
            await transport.manifest(place, "big", 100)

    async def test_a_body_that_fails_leaves_nothing_visible(
        self, transport: HubTransport, place: Place, blob: bytes
    ) -> None:
        async def broken(offset: int) -> AsyncGenerator[bytes, None]:
            yield blob[: 1 << 18]
            raise NotFound("the file is gone")

        with pytest.raises(ForkdError):
            await transport.write_blob(place, digest_of(blob), len(blob), broken)
        assert await transport.blob_size(place, digest_of(blob)) is None

    async def test_a_cancelled_write_leaves_nothing_visible(
        self, transport: HubTransport, place: Place, blob: bytes
    ) -> None:
        begun = trio.Event()

        async def endless(offset: int) -> AsyncGenerator[bytes, None]:
            yield blob[: 1 << 18]
            begun.set()
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.write_blob, place, digest_of(blob), len(blob), endless)
            with trio.fail_after(30):
                await begun.wait()
            nursery.cancel_scope.cancel()
        assert await transport.blob_size(place, digest_of(blob)) is None

    async def test_many_at_once(self, transport: HubTransport, place: Place) -> None:
        blobs = [os.urandom(100_000 + number) for number in range(8)]

        async def round_trip(data: bytes) -> None:
            name = await self.put(transport, place, data)
            assert await read_all(transport.read_blob(place, name, len(data))) == data

        async with trio.open_nursery() as nursery:
            for data in blobs:
                nursery.start_soon(round_trip, data)
