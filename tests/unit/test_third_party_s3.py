"""The S3 transport, a package by somebody else: its signature, the contract of transports, and a store that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forkd.specs.errors import Unauthorized
from forkd.specs.transport import Login, Place
from forkd.testing.hub import HubTransportContract, body_of, digest_of, read_all
from tests.conftest import ROOT

THIRD_PARTY = ROOT / "tests" / "third_party"
sys.path[:0] = [str(THIRD_PARTY), str(THIRD_PARTY / "forkd-hub-s3")]

from forkd_hub_s3.sigv4 import Identity, signed_headers  # noqa: E402
from forkd_hub_s3.transport import S3Transport  # noqa: E402
from s3_server import KEY, SECRET, Store, running_store  # noqa: E402


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with running_store() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield made


class TestS3(HubTransportContract):
    @pytest.fixture
    def transport(self) -> S3Transport:
        return S3Transport()

    @pytest.fixture
    def base(self, store: Store) -> str:
        return "s3://bucket/some prefix/of it"


def test_the_signature_is_the_one_amazon_prints_in_its_documentation() -> None:
    identity = Identity("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    moment = datetime(2013, 5, 24, tzinfo=UTC)
    host = "examplebucket.s3.amazonaws.com"
    headers = signed_headers(identity, "GET", host, "/test.txt", empty, moment, {"Range": "bytes=0-9"})
    assert headers["authorization"].endswith("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")


async def test_a_store_that_is_busy_is_asked_again(store: Store) -> None:
    transport, place, data = S3Transport(), Place("s3://bucket/x", "a/b"), b"bytes" * 1000
    store.fail_next = 2
    await transport.write_blob(place, digest_of(data), len(data), body_of(data))
    store.fail_next = 2
    assert await read_all(transport.read_blob(place, digest_of(data), len(data))) == data


async def test_a_wrong_secret_is_refused_and_a_login_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guess")
    with pytest.raises(Unauthorized):
        await S3Transport().blob_size(Place("s3://bucket/x", "a/b"), digest_of(b""))
    login = Login(username=KEY, password=SECRET)
    assert await S3Transport().blob_size(Place("s3://bucket/x", "a/b", login), digest_of(b"")) is None


async def test_somebody_quicker_with_the_index_is_not_overwritten(store: Store) -> None:
    transport, place = S3Transport(), Place("s3://bucket/x", "a/b")
    calls: list[bytes | None] = []

    def update(old: bytes | None) -> bytes:
        calls.append(old)
        if len(calls) == 1:  # between our reading and our writing
            store.objects["/bucket/x/registry.json"] = b"theirs"
        return (old or b"") + b"ours"

    await transport.publish(place, "1", b"m", {}, update)
    assert calls == [None, b"theirs"]
    assert store.objects["/bucket/x/registry.json"] == b"theirsours"


def test_it_imports_public_names_only() -> None:
    import ast

    public: tuple[str, ...] = ("forkd.specs", "forkd.linux", "forkd_")
    for path in THIRD_PARTY.glob("*/**/forkd_*/*.py"):
        _only(path, public)
    for path in THIRD_PARTY.glob("*/forkd_*.py"):
        _only(path, public)
    assert ast


def _only(path: Path, public: tuple[str, ...]) -> None:
    import ast

    def names(node: Any) -> list[str]:
        if isinstance(node, ast.ImportFrom):
            return [node.module or ""]
        return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []

    for node in ast.walk(ast.parse(path.read_text())):
        for name in names(node):
            assert not name.startswith("forkd") or name.startswith(public), f"{path.name} imports {name}"
