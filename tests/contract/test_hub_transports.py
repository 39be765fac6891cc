"""Every hub transport of ours keeps the contract: on a directory, on nginx, on Debian's docker-registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.plugins.hub_file.transport import FileTransport
from forkd.plugins.hub_http.transport import HttpTransport
from forkd.plugins.hub_oci.transport import OciTransport
from forkd.specs.errors import BadInput, NotFound, TransferError, Unauthorized
from forkd.specs.transport import HubTransport, Login, Place
from forkd.testing.hub import HubTransportContract, body_of, digest_of, read_all
from tests.hub_support import Faulty, faulty_server, running_nginx
from tests.oci_support import running_registry
from tests.token_server import TokenServer, running_token_server


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


class TestOciRegistryWithPasswords(HubTransportContract):
    @pytest.fixture
    def transport(self) -> HubTransport:
        return OciTransport()

    @pytest.fixture
    def login(self) -> Login:
        return Login(username="me", password="secret")

    @pytest.fixture
    def base(self, tmp_path: Path) -> Iterator[str]:
        with running_registry(tmp_path, private=True) as registry:
            yield f"oci://{registry.address}"


class TestOciRegistryWithTokens(HubTransportContract):
    @pytest.fixture
    def transport(self) -> HubTransport:
        return OciTransport()

    @pytest.fixture
    def tokens(self, tmp_path: Path) -> Iterator[TokenServer]:
        with running_token_server(tmp_path) as server:
            yield server

    @pytest.fixture
    def login(self) -> Login:
        return Login(username="me", password="secret")

    @pytest.fixture
    def base(self, tmp_path: Path, tokens: TokenServer) -> Iterator[str]:
        with running_registry(tmp_path, auth=tokens.auth_config()) as registry:
            yield f"oci://{registry.address}"

    async def test_wrong_logins_and_tokens_of_others_are_refused(
        self, transport: HubTransport, base: str, tmp_path: Path
    ) -> None:
        data = b"a blob"
        (tmp_path / "other").mkdir()
        with running_token_server(tmp_path / "other") as other:
            forged = other.token("me", ("repository:acme/thing:pull,push",))
        for wrong in (None, Login(username="me", password="guess"), Login(token=forged), Login(token="guess")):
            place = Place(base, "acme/thing", wrong)
            with pytest.raises(Unauthorized):
                await transport.blob_size(place, digest_of(data))
            with pytest.raises(Unauthorized):
                await transport.write_blob(place, digest_of(data), len(data), body_of(data))

    async def test_a_token_of_ones_own_is_used_as_it_is(
        self, transport: HubTransport, base: str, tokens: TokenServer
    ) -> None:
        token = tokens.token("me", ("repository:acme/thing:pull,push",))
        place = Place(base, "acme/thing", Login(token=token))
        name = await self.put(transport, place, b"a blob")
        assert await read_all(transport.read_blob(place, name, 6)) == b"a blob"
        assert tokens.asked == []
        with pytest.raises(Unauthorized):
            await transport.blob_size(Place(base, "acme/other", Login(token=token)), name)

    async def test_what_everybody_may_read_needs_no_login(
        self, transport: HubTransport, place: Place, tokens: TokenServer
    ) -> None:
        name = await self.put(transport, place, b"a blob")
        tokens.may["", place.package] = frozenset({"pull"})
        anybody = Place(place.base, place.package)
        assert await read_all(transport.read_blob(anybody, name, 6)) == b"a blob"
        with pytest.raises(Unauthorized):
            await self.put(transport, anybody, b"another")

    async def test_a_package_we_may_not_read_is_not_mounted_from(
        self, transport: HubTransport, place: Place, tokens: TokenServer
    ) -> None:
        name = await self.put(transport, place, b"a blob")
        tokens.may["me", place.package] = frozenset()
        assert not await transport.mount_blob(Place(place.base, "acme/other", place.login), name, place.package)

    async def test_a_token_that_ran_out_is_not_tried_for_ever(
        self, transport: HubTransport, place: Place, tokens: TokenServer
    ) -> None:
        tokens.seconds = -120  # the registry bears 60 s of wrong clocks
        with pytest.raises(Unauthorized):
            await self.put(transport, place, b"a blob")
        assert len(tokens.asked) == 1
        tokens.seconds = 60
        assert await self.put(transport, place, b"a blob")


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


async def test_a_place_we_are_redirected_to_is_given_no_login_even_if_it_asks_for_one(tmp_path: Path) -> None:
    given: list[str | None] = []

    def challenge(request: Faulty, name: str, number: int) -> bool:
        given.append(request.headers.get("Authorization"))
        basic = 'Basic realm="x"' if name == "file" else f'Bearer realm="{request.state.url}/token",service="x"'
        request.answer(401, b"", WWW_Authenticate=basic)
        return True

    login = Login(username="me", password="secret")
    with faulty_server(tmp_path, challenge) as other:

        def redirect(request: Faulty, name: str, number: int) -> bool:
            request.answer(302, b"", Location=f"{other.url}/{'file' if 'ba' in name else 'blob'}")
            return True

        with faulty_server(tmp_path, redirect) as first:
            base = first.url.replace("http:", "oci:")
            for package in ("a/ba", "a/b"):
                with pytest.raises(Unauthorized):
                    await OciTransport().blob_size(Place(base, package, login), digest_of(b""))
    assert given == [None, None]


@pytest.mark.parametrize("realm", ["http://[::1", "http://elsewhere.example/token", "", "ftp://x"])
async def test_a_registry_that_sends_us_to_no_good_place_for_a_token_is_refused(tmp_path: Path, realm: str) -> None:
    def challenge(request: Faulty, name: str, number: int) -> bool:
        request.answer(401, b"", WWW_Authenticate=f'Bearer realm="{realm}",service="x"')
        return True

    with faulty_server(tmp_path, challenge) as server:
        place = Place(server.url.replace("http:", "oci:"), "a/b", Login(username="me", password="secret"))
        with pytest.raises(TransferError, match="token"):
            await OciTransport().blob_size(place, digest_of(b""))
