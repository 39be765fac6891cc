"""Every hub transport of ours keeps the contract: on a directory, on nginx, on Debian's docker-registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.plugins.hub_file.transport import FileTransport
from forkd.plugins.hub_http.transport import HttpTransport
from forkd.plugins.hub_oci.transport import OciTransport
from forkd.specs.errors import BadInput, NotFound, Unauthorized
from forkd.specs.transport import HubTransport, Login, Place
from forkd.testing.hub import HubTransportContract, body_of, digest_of, read_all
from tests.hub_support import running_nginx
from tests.oci_support import running_registry


class TestDirectory(HubTransportContract):
    @pytest.fixture
    def transport(self) -> HubTransport:
        return FileTransport()

    @pytest.fixture
    def base(self, tmp_path: Path) -> str:
        (tmp_path / "hub").mkdir()
        return f"file:{tmp_path}/hub"

    async def test_there_is_no_index_before_the_first_push_and_no_registry_without_a_directory(
        self, transport: HubTransport, base: str
    ) -> None:
        assert await transport.index(base, None) is None
        with pytest.raises(NotFound):
            await transport.index(base + "/nowhere", None)

    async def test_nothing_leaves_the_directory(self, transport: HubTransport, base: str) -> None:
        for package in ("../x/y", "a/..", "a/b/c", "/a/b"):
            with pytest.raises(BadInput):
                await transport.manifest(Place(base, package), "latest", 100)
        with pytest.raises(BadInput):
            await transport.manifest(Place(base, "a/b"), "../../x", 100)

    async def test_a_pack_file_is_written_and_read(self, transport: HubTransport, base: str) -> None:
        await transport.write_file(f"{base}/x.tar.zst", None, 5, body_of(b"bytes"))
        assert await read_all(transport.read_file(f"{base}/x.tar.zst", None, 2)) == b"tes"


class TestWebServer(HubTransportContract):
    @pytest.fixture
    def transport(self) -> HubTransport:
        return HttpTransport()

    @pytest.fixture
    def base(self, tmp_path: Path) -> Iterator[str]:
        with running_nginx(tmp_path) as (url, _):
            yield f"{url}/hub"

    async def test_a_pack_file_is_written_and_read(self, transport: HubTransport, base: str) -> None:
        await transport.write_file(f"{base}/x.tar.zst?signature=1", None, 5, body_of(b"bytes"))
        assert await read_all(transport.read_file(f"{base}/x.tar.zst", None, 2)) == b"tes"
        assert await read_all(transport.read_file(f"{base}/x.tar.zst", None, 5)) == b""


class TestOciRegistry(HubTransportContract):
    @pytest.fixture
    def transport(self) -> HubTransport:
        return OciTransport()

    @pytest.fixture
    def base(self, tmp_path: Path) -> Iterator[str]:
        with running_registry(tmp_path) as registry:
            yield f"oci://{registry.address}"

    async def test_names_with_capitals_are_refused_before_anything_is_sent(
        self, transport: HubTransport, base: str
    ) -> None:
        with pytest.raises(BadInput, match="lower-case"):
            await transport.blob_size(Place(base, "Acme/Thing"), digest_of(b""))


async def test_a_private_oci_registry_lets_us_in_with_a_login_only(tmp_path: Path) -> None:
    with running_registry(tmp_path, private=True) as registry:
        base = f"oci://{registry.address}"
        transport = OciTransport()
        login = Login(username="me", password="secret")
        data = b"a blob"
        await transport.write_blob(Place(base, "a/b", login), digest_of(data), len(data), body_of(data))
        found = await read_all(transport.read_blob(Place(base, "a/b", login), digest_of(data), len(data)))
        assert found == data
        for wrong in (None, Login(username="me", password="guess"), Login(token="guess")):
            with pytest.raises(Unauthorized):
                await transport.blob_size(Place(base, "a/b", wrong), digest_of(data))
            with pytest.raises(Unauthorized):
                await transport.write_blob(Place(base, "a/b", wrong), digest_of(data), len(data), body_of(data))
