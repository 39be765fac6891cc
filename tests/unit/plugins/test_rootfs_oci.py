"""Images from a real registry: right to the last bit, or refused; and never a byte outside the target."""

from __future__ import annotations

import base64
import errno
import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkd.pluginmanager import load_plugins
from forkd.plugins.rootfs_oci.builder import OciBuilder
from forkd.plugins.rootfs_oci.image import read_image
from forkd.plugins.rootfs_oci.layers import Limits
from forkd.plugins.rootfs_oci.reference import parse_reference, require_reference
from forkd.plugins.rootfs_oci.registry import ATTEMPTS
from forkd.plugins.rootfs_oci.registry import Registry as Client
from forkd.specs.errors import BadInput, BuildFailed, NoSpace
from forkd.specs.rootfs import ImageConfig, ImageRequest
from tests.oci_support import Entry, Registry, digest_of, folder, hardlink, running_registry, symlink, tar_of
from tests.token_server import running_token_server

SMALL = Limits(members=2000, unpacked=8 << 20)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "work" / "tree"
    path.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("as it was")
    return path


async def build(reference: str, target: Path, limits: Limits = SMALL) -> ImageConfig:
    return await OciBuilder(limits).build(ImageRequest(reference), target, lambda step, fraction: None)


def names(target: Path) -> set[str]:
    return {str(path.relative_to(target)) for path in target.rglob("*")}


# -- references ------------------------------------------------------------------------------------------------------


def test_references_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKD_REGISTRY", raising=False)
    pinned = "sha256:" + "a" * 64
    expected = {
        "python:3.12-slim": "docker.io/library/python:3.12-slim",
        "alpine": "docker.io/library/alpine:latest",
        "someone/thing": "docker.io/someone/thing:latest",
        "docker://ghcr.io/a/b/c:v1": "ghcr.io/a/b/c:v1",
        "oci://localhost:5000/x": "localhost:5000/x:latest",
        f"quay.io/a/b:tag@{pinned}": f"quay.io/a/b@{pinned}",
        "[::1]:5000/x:1": "[::1]:5000/x:1",
    }
    assert {text: str(parse_reference(text)) for text in expected} == expected
    for text in ("", "/etc", "./x", "A:b", "a:b:c", "x@sha256:12", "a/../b", "http://x/y", "a b", "x" * 600):
        assert parse_reference(text) is None, text
    monkeypatch.setenv("FORKD_REGISTRY", "127.0.0.1:5000")
    assert str(parse_reference("alpine")) == "127.0.0.1:5000/alpine:latest"


def test_plain_http_is_for_this_machine_only() -> None:
    urls = {
        text: parse_reference(text) for text in ("localhost:1/x", "127.0.0.1:1/x", "[::1]:1/x", "10.0.0.1:1/x", "a.b/x")
    }
    assert [ref.base_url.partition(":")[0] for ref in urls.values() if ref] == [
        "http",
        "http",
        "http",
        "https",
        "https",
    ]


def test_names_of_other_builders_stay_theirs() -> None:
    plugins = load_plugins()
    expected = {"debian:bookworm": "debian", "/srv/tree": "dir", "./x.tar": "dir", "python:3.12-slim": "oci"}
    assert {text: plugins.rootfs_builder(text).name for text in expected} == expected


# -- right -----------------------------------------------------------------------------------------------------------


async def test_three_layers_of_a_multi_arch_index_become_one_tree(registry: Registry, target: Path) -> None:
    long = "deep/" + "/".join(["directory-with-a-long-name"] * 20) + "/file"
    bottom = tar_of(
        [
            folder("./"),
            folder("etc"),
            Entry("etc/keep", b"kept"),
            Entry("etc/gone", b"x"),
            folder("opaque"),
            Entry("opaque/old", b"x"),
            folder("usr"),
            folder("usr/lib", 0o555),
            symlink("lib", "usr/lib"),
            Entry("usr/su", b"root", mode=0o4755),
            hardlink("usr/su2", "usr/su"),
            symlink("escape", "../../../../etc"),
        ]
    )
    middle = tar_of(
        [
            Entry("etc/.wh.gone"),
            Entry("opaque/new", b"new"),
            Entry("opaque/.wh..wh..opq"),
            Entry("lib/through-a-link", b"inside"),
            Entry("escape/passwd", b"still inside"),
            Entry(long, b"long"),
            Entry("dev/null", type=tarfile.CHRTYPE),
        ]
    )
    top = tar_of(
        [Entry("etc/keep", b"newer", uid=1000, gid=1001, mode=0o640), folder("tmp", 0o1777), symlink("abs", "/etc")]
    )
    config = {"Env": ["PATH=/x:/y", "A=b=c"], "WorkingDir": "/srv", "User": "me", "Entrypoint": ["run"], "Cmd": ["it"]}
    mine = registry.push_image("multi", [bottom, middle, top], packing=["+gzip", "+zstd", ""], config=config)
    other = registry.push_image("multi", [tar_of([Entry("wrong")])], architecture="arm64", version="arm")
    index = registry.push_index("multi", "both", {"arm64": other, "amd64": mine})

    found = await build(registry.reference("multi", "both"), target)

    assert found == ImageConfig({"PATH": "/x:/y", "A": "b=c"}, "/srv", "me", ("run", "it"))
    assert (target / "etc/keep").read_bytes() == b"newer"
    assert not (target / "etc/gone").exists()
    assert sorted(os.listdir(target / "opaque")) == ["new"]
    assert (target / "usr/lib/through-a-link").read_bytes() == b"inside"
    assert (target / "etc/passwd").read_bytes() == b"still inside"
    assert (target / long).read_bytes() == b"long"
    assert os.readlink(target / "abs") == "/etc"
    assert not (target / "dev/null").exists()
    su = (target / "usr/su").stat()
    assert stat.S_IMODE(su.st_mode) == 0o4755
    assert su.st_ino == (target / "usr/su2").stat().st_ino
    assert stat.S_IMODE((target / "usr/lib").stat().st_mode) == 0o555
    assert stat.S_IMODE((target / "tmp").stat().st_mode) == 0o1777
    if os.geteuid() == 0:
        keep = (target / "etc/keep").stat()
        assert (keep.st_uid, keep.st_gid, stat.S_IMODE(keep.st_mode)) == (1000, 1001, 0o640)

    pinned = f"oci://{registry.address}/multi@{index['digest']}"
    again = target.parent / "again"
    again.mkdir()
    await build(pinned, again)
    assert names(again) == names(target)
    by_tag = await OciBuilder().content_key(ImageRequest(registry.reference("multi", "both")))
    assert by_tag == await OciBuilder().content_key(ImageRequest(registry.reference("multi")))
    assert by_tag != await OciBuilder().content_key(ImageRequest(pinned))


async def test_a_directory_replaces_a_link_and_a_file_replaces_a_directory(registry: Registry, target: Path) -> None:
    below = tar_of([folder("a"), Entry("a/x", b"1"), symlink("b", "a"), Entry("c", b"1"), folder("d"), Entry("d/e/f")])
    above = tar_of(
        [
            folder("b"),
            Entry("b/y", b"2"),
            Entry("a", b"file"),
            folder("c"),
            Entry("c/z"),
            Entry(".wh.d"),
            Entry("d/new"),
        ]
    )
    registry.push_image("replace", [below, above])
    await build(registry.reference("replace"), target)
    assert (target / "a").read_bytes() == b"file"
    assert not (target / "b").is_symlink()
    assert names(target) == {"a", "b", "b/y", "c", "c/z", "d", "d/new"}


async def test_a_whiteout_spares_what_its_own_layer_wrote(registry: Registry, target: Path) -> None:
    below = tar_of([folder("d"), Entry("d/old"), folder("d/sub"), Entry("d/sub/old")])
    above = tar_of([Entry("d/sub/new", b"n"), Entry("d/new", b"n"), Entry(".wh.d"), Entry("e"), Entry(".wh.e")])
    registry.push_image("spare", [below, above])
    await build(registry.reference("spare"), target)
    assert names(target) == {"d", "d/sub", "d/sub/new", "d/new", "e"}


async def test_a_registry_that_asks_for_a_password_gets_the_one_docker_keeps(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private").mkdir()
    with running_registry(tmp_path / "private", private=True) as private:
        private.push_image("mine", [tar_of([Entry("file", b"x")])])
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        with pytest.raises(BuildFailed, match="401") as caught:
            await build(private.reference("mine"), target)
        assert "log in" in str(caught.value.hint)
        login = base64.b64encode(b"me:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {private.address: {"auth": login}}}))
        await build(private.reference("mine"), target)
    assert names(target) == {"file"}


async def test_a_registry_that_asks_for_a_token_gets_one_from_where_it_says(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "private"
    work.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with running_registry(work) as public:
        public.push_image("team/mine", [tar_of([Entry("file", b"x")])])
    with running_token_server(work) as tokens, running_registry(work, auth=tokens.auth_config()) as private:
        reference = private.reference("team/mine")
        with pytest.raises(BuildFailed, match="401"):
            await build(reference, target)
        tokens.may["", "team/mine"] = frozenset({"pull"})
        (tmp_path / "anybody").mkdir()
        await build(reference, tmp_path / "anybody")
        tokens.may["", "team/mine"] = frozenset()
        login = base64.b64encode(b"me:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {private.address: {"auth": login}}}))
        await build(reference, target)
        assert tokens.asked == [(who, ("repository:team/mine:pull",)) for who in ("", "", "me")]
    assert names(target) == names(tmp_path / "anybody") == {"file"}


# -- refused ---------------------------------------------------------------------------------------------------------


def big_header() -> bytes:
    """An extended header that says it has two gigabytes."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 2 << 30
    return info.tobuf() + bytes(10240)


def old_sparse() -> bytes:
    """A file of four gigabytes in one block."""
    info = tarfile.TarInfo("holes")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (0, 512)
    header[483:495] = b"%011o\0" % (4 << 30)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"x" * 512 + bytes(1024)


def new_sparse(**fields: str) -> bytes:
    """The same with extended headers."""
    pax = {f"GNU.sparse.{name}": value for name, value in fields.items()}
    return tar_of([Entry("holes", b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512, pax=pax)])


HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "a name with ..": ([tar_of([Entry("../outside/precious", b"stolen")])], "leave the tree"),
    "a name with .. inside": ([tar_of([folder("a"), Entry("a/../../x", b"stolen")])], "leave the tree"),
    "a directory with ..": ([tar_of([folder("../outside")])], "leave the tree"),
    "a hard link outside": ([tar_of([hardlink("x", "../../outside/precious")])], "leave the tree"),
    "an absolute hard link": ([tar_of([hardlink("x", "/outside/precious")])], "cannot be unpacked"),
    "a hard link through a link": (
        [tar_of([symlink("up", "../../.."), hardlink("x", "up/outside/precious")])],
        "cannot be unpacked",
    ),
    "a hard link to a directory": ([tar_of([folder("d"), hardlink("x", "d")])], "to a directory"),
    "a whiteout of ..": ([tar_of([folder("d"), Entry("d/.wh...")])], "no file"),
    "a circle of links": ([tar_of([symlink("a", "b"), symlink("b", "a"), Entry("a/x")])], "cannot be unpacked"),
    "a file as a directory": ([tar_of([Entry("f", b"x"), Entry("f/g", b"y")])], "cannot be unpacked"),
    "a bomb": ([tar_of([Entry("zeros", bytes(9 << 20))])], "more than 8 MiB"),
    "too many files": ([tar_of([Entry(f"f{n}") for n in range(2001)])], "more than 2000 files"),
    "a name too long": ([tar_of([Entry("x" * 5000)])], "impossible name"),
    "a part too long": ([tar_of([Entry("x" * 300)])], "cannot be unpacked"),
    "a giant header": ([big_header()], "header of"),
    "a torn archive": ([tar_of([Entry("x", b"y" * 9000)])[:4000]], "damaged"),
    "a sparse file": ([old_sparse()], "sparse"),
    "a sparse file of version 0": ([new_sparse(map="0,512", size=str(4 << 30))], "sparse"),
    "a sparse file of version 1": ([new_sparse(major="1", minor="0", name="x", realsize=str(4 << 30))], "sparse"),
    "an owner out of range": ([tar_of([Entry("x", pax={"uid": str(1 << 40)})])], "impossible owner"),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_layer_is_refused_and_nothing_outside_is_touched(
    registry: Registry, target: Path, what: str
) -> None:
    layers, said = HOSTILE[what]
    name = "hostile-" + "".join(letter if letter.isalnum() else "-" for letter in what).strip("-").replace("---", "-")
    registry.push_image(name.replace("--", "-"), layers)
    with pytest.raises(BuildFailed, match=said):
        await build(registry.reference(name.replace("--", "-")), target)
    outside = target.parents[1] / "outside"
    assert sorted(os.listdir(outside)) == ["precious"]
    assert (outside / "precious").read_text() == "as it was"
    assert (outside / "precious").stat().st_nlink == 1
    assert sorted(os.listdir(target.parent)) == ["tree"]


async def test_absolute_links_and_writes_through_them_stay_inside(registry: Registry, target: Path) -> None:
    outside = target.parents[1] / "outside"
    layer = tar_of(
        [
            symlink("out", str(outside)),
            Entry("out/precious", b"stolen"),
            symlink("file", str(outside / "precious")),
            Entry("file", b"mine"),
            folder("out2"),
            symlink("out2", str(outside)),
            folder("out2"),
        ]
    )
    registry.push_image("links", [layer])
    await build(registry.reference("links"), target)
    assert (outside / "precious").read_text() == "as it was"
    assert (target / str(outside).lstrip("/") / "precious").read_bytes() == b"stolen"
    assert (target / "file").read_bytes() == b"mine"
    assert not (target / "out2").is_symlink()


async def test_a_blob_altered_in_the_registry_is_noticed_before_it_is_unpacked(
    registry: Registry, target: Path
) -> None:
    raw = tar_of([Entry("x", b"altered later")])
    registry.push_image("altered", [raw])
    packed = gzip.compress(raw, 1, mtime=0)
    wrong = bytearray(packed)
    wrong[-9] ^= 1
    registry.blob_file(digest_of(packed)).write_bytes(wrong)
    with pytest.raises(BuildFailed, match="other contents"):
        await build(registry.reference("altered"), target)
    assert names(target) == set()


async def test_layers_that_are_not_what_the_configuration_says_are_refused(registry: Registry, target: Path) -> None:
    registry.push_image("swapped", [tar_of([Entry("x", b"right")])], diff_ids=["sha256:" + "0" * 64])
    with pytest.raises(BuildFailed, match="configuration says"):
        await build(registry.reference("swapped"), target)
    registry.push_image("fewer", [tar_of([Entry("x")])], diff_ids=["sha256:" + "0" * 64] * 2)
    with pytest.raises(BuildFailed, match="disagree"):
        await build(registry.reference("fewer"), target)


async def test_what_is_not_there_is_said_with_what_is(registry: Registry, target: Path) -> None:
    with pytest.raises(BuildFailed, match="no image"):
        await build(registry.reference("nothing"), target)
    other = registry.push_image("arm-only", [tar_of([Entry("x")])], architecture="arm64", version="arm")
    registry.push_index("arm-only", "latest", {"arm64": other})
    with pytest.raises(BuildFailed) as caught:
        await build(registry.reference("arm-only"), target)
    assert caught.value.hint == "there are: linux/arm64"
    with pytest.raises(BuildFailed, match="arm64"):
        await build(registry.reference("arm-only", "arm"), target)
    with pytest.raises(BadInput, match="no extra packages"):
        await OciBuilder().content_key(ImageRequest(registry.reference("x"), ("numpy",)))


@pytest.mark.parametrize(
    "config", [{"Env": ["=x"]}, {"Env": "A=b"}, {"Env": [1]}, {"WorkingDir": 7}, {"User": "a\0b"}, {"Cmd": {"a": 1}}]
)
async def test_a_configuration_that_makes_no_sense_is_refused(
    registry: Registry, target: Path, config: dict[str, Any]
) -> None:
    registry.push_image("nonsense", [tar_of([Entry("x")])], config=config)
    with pytest.raises(BuildFailed):
        await build(registry.reference("nonsense"), target)


class Moody(httpx.AsyncBaseTransport):
    """A registry of one image; ``bad`` answers come before right ones, for each path."""

    def __init__(self, documents: dict[str, bytes], bad: list[httpx.Response | Exception]) -> None:
        self.documents, self.bad = documents, bad
        self.asked: dict[str, int] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        number = self.asked[path] = self.asked.get(path, 0) + 1
        if number <= len(self.bad):
            answer = self.bad[number - 1]
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(answer.status_code, headers=answer.headers)
        return httpx.Response(200, stream=httpx.ByteStream(self.documents[path]))


async def test_a_registry_that_is_busy_or_breaks_off_is_asked_again() -> None:
    reference = require_reference("localhost:1/x")
    blob = b"layer" * 1000
    documents = {"/v2/x/manifests/latest": b"{}", f"/v2/x/blobs/{digest_of(blob)}": blob}
    slow = httpx.Response(429, headers={"Retry-After": "0"})
    moody = Moody(documents, [slow, httpx.Response(503), httpx.ReadError("gone")])
    async with Client(reference, transport=moody, first_delay=0.0) as registry:
        assert await registry.manifest("latest") == ("", {})
        out = io.BytesIO()
        await registry.fetch_blob(digest_of(blob), len(blob), out)
        assert out.getvalue() == blob
        moody.bad, moody.asked = [httpx.Response(500)] * 99, {}
        with pytest.raises(BuildFailed, match="500"):
            await registry.manifest("latest")
        assert moody.asked == {"/v2/x/manifests/latest": ATTEMPTS}


async def test_a_full_disk_is_said_to_be_one() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "full")

    moody = Moody({f"/v2/x/blobs/{digest_of(b'x')}": b"x"}, [])
    async with Client(require_reference("localhost:1/x"), transport=moody) as registry:
        with pytest.raises(NoSpace):
            await registry.fetch_blob(digest_of(b"x"), 1, Full())


@pytest.mark.parametrize("where", ["platform", "rootfs", "config"])
async def test_an_image_with_text_where_a_table_belongs_is_refused(where: str) -> None:
    config = {"rootfs": {"diff_ids": []}, "config": {}, where: "text"}
    data = json.dumps(config).encode()
    manifest: dict[str, Any] = {"config": {"digest": digest_of(data), "size": len(data)}, "layers": []}
    if where == "platform":
        manifest = {"manifests": [{"digest": digest_of(data), "platform": "text"}]}
    documents = {"/v2/x/manifests/latest": json.dumps(manifest).encode(), f"/v2/x/blobs/{digest_of(data)}": data}
    async with Client(require_reference("localhost:1/x"), transport=Moody(documents, [])) as registry:
        with pytest.raises(BuildFailed, match="not a table"):
            await read_image(registry)
