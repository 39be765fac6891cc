"""Packs from strangers: each refused with a named error, nothing written outside staging, staging removed."""

from __future__ import annotations

import hashlib
import io
import resource
import struct
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkd.hub import glue, manifest, pack, signatures, sparsestream
from forkd.ops.pack import pack as make_pack
from forkd.ops.unpack import unpack
from forkd.runtime import Runtime
from forkd.specs.errors import ForkdError, PackError, SnapshotBroken, TagTaken, TrustError
from forkd.specs.models import Snapshot
from forkd.specs.packs import PackManifest
from forkd.specs.requests import PackRequest, UnpackRequest
from forkd.store.snapshots import content_id
from tests.hub_support import add_snapshot, quiet, runtime_at, tree

Table = dict[str, Any]
Change = Callable[[Table, dict[str, bytes]], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A right pack of a chain of three layers, with its disk inside."""
    import trio

    work = tmp_path_factory.mktemp("good")

    async def main() -> None:
        async with runtime_at(work / "data") as runtime:
            root = add_snapshot(runtime, "root")
            middle = add_snapshot(runtime, "middle", root, seed=8)
            add_snapshot(runtime, "head", middle, seed=9)
            request = PackRequest(tag="head", out=str(work / "good.tar.zst"), bundle=True)
            await make_pack(runtime, request, quiet)

    trio.run(main)
    return (work / "good.tar.zst").read_bytes()


def taken_apart(data: bytes) -> tuple[Table, dict[str, bytes]]:
    """A pack as its manifest's table and its blobs."""
    found = pack.read(io.BytesIO(data))
    blobs = {
        blob.sha256: data[found.offsets[blob.sha256] : found.offsets[blob.sha256] + blob.stored]
        for blob in found.manifest.blobs
    }
    return tomllib.loads(found.body.decode()), blobs


def refit(table: Table) -> None:
    """Give the layers the content ids of what they are now, so that only what is tested is wrong."""
    parent = None
    for row in table["layers"]:
        if parent is not None and "parent" in row:
            row["parent"]["content"] = parent
        parent = row["content"] = content_id(msgspec.convert(row, Snapshot))


def replace_blob(table: Table, blobs: dict[str, bytes], kind: str, data: bytes, **fields: object) -> None:
    """Put other bytes in place of the last blob of a kind, with a right SHA-256."""
    row = [row for row in table["blobs"] if row["kind"] == kind][-1]
    del blobs[row["sha256"]]
    row.update(sha256=hashlib.sha256(data).hexdigest(), stored=len(data), **fields)
    blobs[row["sha256"]] = data


def edit(*path: object, value: object) -> Change:
    def change(table: Table, blobs: dict[str, bytes]) -> None:
        place: Any = table
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def edit_fitting(*path: object, value: object) -> Change:
    def change(table: Table, blobs: dict[str, bytes]) -> None:
        edit(*path, value=value)(table, blobs)
        refit(table)

    return change


def drop(*path: object) -> Change:
    def change(table: Table, blobs: dict[str, bytes]) -> None:
        place: Any = table
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def bomb(table: Table, blobs: dict[str, bytes]) -> None:
    data = zstandard.compress(bytes(200 << 20))
    replace_blob(table, blobs, "rootfs", data, stream=200 << 20)


def quiet_bomb(table: Table, blobs: dict[str, bytes]) -> None:
    """The manifest says it is small."""
    row = next(row for row in table["blobs"] if row["kind"] == "rootfs")
    replace_blob(table, blobs, "rootfs", zstandard.compress(bytes(200 << 20)), stream=row["stream"])


def huge_window(table: Table, blobs: dict[str, bytes]) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    row = next(row for row in table["blobs"] if row["kind"] == "rootfs")
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    replace_blob(table, blobs, "rootfs", frame.compress(bytes(row["stream"])) + frame.flush())


def sparse_blob(stream: bytes) -> Change:
    return lambda table, blobs: replace_blob(table, blobs, "rootfs", zstandard.compress(stream), stream=len(stream))


def sparse_head(size: int = 4 << 20) -> bytes:
    return sparsestream.MAGIC + struct.pack("<Q", size)


def record(offset: int, data: bytes) -> bytes:
    return struct.pack("<QI", offset, len(data)) + data


END = struct.pack("<QI", 4 << 20, 0)


def two_frames(table: Table, blobs: dict[str, bytes]) -> None:
    row = [row for row in table["blobs"] if row["kind"] == "vmstate"][-1]
    replace_blob(table, blobs, "vmstate", blobs[row["sha256"]] + zstandard.compress(b"more"))


def cut_blob(table: Table, blobs: dict[str, bytes]) -> None:
    row = [row for row in table["blobs"] if row["kind"] == "vmstate"][-1]
    replace_blob(table, blobs, "vmstate", blobs[row["sha256"]][:-5])


def garbage_blob(table: Table, blobs: dict[str, bytes]) -> None:
    replace_blob(table, blobs, "vmstate", b"not zstd at all, but as long as you like")


def other_content(table: Table, blobs: dict[str, bytes]) -> None:
    """A blob that is right in itself, but not the file that was promised."""
    row = [row for row in table["blobs"] if row["kind"] == "vmstate"][-1]
    replace_blob(table, blobs, "vmstate", zstandard.compress(bytes(row["stream"])))


def no_delta(table: Table, blobs: dict[str, bytes]) -> None:
    """Bytes with the digest that is promised, but no delta."""
    junk = b"junk" * 5000
    digest = "delta256:" + hashlib.sha256(junk[4096:] + junk[:4096]).hexdigest()
    replace_blob(table, blobs, "memory", zstandard.compress(junk), stream=len(junk), size=len(junk), digest=digest)
    table["layers"][-1]["memory"].update(digest=digest, size=len(junk))
    refit(table)


def flip(table: Table, blobs: dict[str, bytes]) -> None:
    name, data = max(blobs.items(), key=lambda item: len(item[1]))
    blobs[name] = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]


def swap_layers(table: Table, blobs: dict[str, bytes]) -> None:
    table["layers"][1], table["layers"][2] = table["layers"][2], table["layers"][1]
    table["tag"] = table["layers"][-1]["tag"]


def circle(table: Table, blobs: dict[str, bytes]) -> None:
    table["layers"][2].update(tag="root")
    table["tag"] = "root"
    refit(table)


def without_root(table: Table, blobs: dict[str, bytes]) -> None:
    root = table["layers"].pop(0)
    table["blobs"] = [
        row for row in table["blobs"] if row["digest"] not in (root["vmstate"]["digest"], root["memory"]["digest"])
    ]


def many_layers(table: Table, blobs: dict[str, bytes]) -> None:
    table["layers"] = [{**table["layers"][0], "tag": f"t{number}"} for number in range(40)]


def twice(table: Table, blobs: dict[str, bytes]) -> None:
    table["blobs"].append(dict(table["blobs"][0]))


def extra_blob(table: Table, blobs: dict[str, bytes]) -> None:
    data = zstandard.compress(b"extra")
    sha256 = hashlib.sha256(data).hexdigest()
    table["blobs"].append(
        {
            "kind": "vmstate",
            "digest": "sha256:" + "0" * 64,
            "size": 5,
            "sha256": sha256,
            "stored": len(data),
            "stream": 5,
        }
    )
    blobs[sha256] = data


MANIFESTS: dict[str, Change] = {
    "future version": edit("forkd_pack_version", value=4),
    "old version": edit("forkd_pack_version", value=2),
    "version is text": edit("forkd_pack_version", value="3"),
    "version is a boolean": edit("forkd_pack_version", value=True),
    "unknown field": edit("target_path", value="/etc/passwd"),
    "unknown field of a blob": edit("blobs", 0, "path", value="/etc/passwd"),
    "tag with dots": edit("layers", 0, "tag", value="../../etc"),
    "tag is absolute": edit_fitting("layers", 2, "tag", value="/etc/cron.d/x"),
    "tag is hidden": edit("tag", value=".lock"),
    "tag is empty": edit("layers", 2, "tag", value=""),
    "tag of another layer": edit("tag", value="middle"),
    "digest is a path": edit_fitting("layers", 0, "rootfs", "digest", value="sparse256:../../../../etc/passwd"),
    "digest of another kind": edit_fitting("layers", 0, "vmstate", "digest", value="sparse256:" + "0" * 64),
    "blob's name is a path": edit("blobs", 0, "sha256", value="../../etc/passwd"),
    "blob's kind is a path": edit("blobs", 0, "kind", value="../vmstate"),
    "wrong types": edit("layers", value="none"),
    "layer without memory": drop("layers", 1, "memory"),
    "no layers": edit("layers", value=[]),
    "too many layers": many_layers,
    "token is no hexadecimal": edit("layers", 2, "agent_sync", value="zz"),
    "token is short": edit("layers", 0, "agent_sync", value="00"),
    "token has another letter": edit("layers", 1, "agent_sync", value="0" * 31 + "g"),
    "token has spaces": edit("layers", 1, "agent_sync", value="00 " * 10 + "00"),
    "negative size": edit_fitting("layers", 0, "vmstate", "size", value=-1),
    "RAM of no size": edit_fitting("layers", 0, "hardware", "mem_mib", value=0),
    "RAM beyond measure": edit_fitting("layers", 0, "hardware", "mem_mib", value=1 << 40),
    "image smaller than RAM": edit_fitting("layers", 0, "memory", "size", value=4096),
    "number is not one": edit("layers", 0, "pause_ms", value=float("nan")),
    "control characters": edit("description", value="\x1b[2J\x1b]0;owned\x07"),
    "missing parent": without_root,
    "layers in the wrong order": swap_layers,
    "cyclic chain": circle,
    "parent of another content": edit("layers", 1, "parent", "content", value="sha256:" + "1" * 64),
    "altered layer": edit("layers", 2, "hardware", "vcpus", value=7),
    "says where it came from": edit("layers", 0, "source", value={"from": "https://trusted.example"}),
    "blob twice": twice,
    "blob nobody needs": extra_blob,
    "blob missing": lambda table, blobs: table["blobs"].pop(),
    "blob not inside": edit("blobs", 0, "inside", value=False),
    "wrong SHA-256": flip,
    "wrong content": other_content,
    "not a delta": no_delta,
    "bomb": bomb,
    "bomb that lies": quiet_bomb,
    "huge window": huge_window,
    "two frames": two_frames,
    "blob cut short": cut_blob,
    "no zstd": garbage_blob,
    "sparse: wrong magic": sparse_blob(b"FORKDSPX" + struct.pack("<Q", 4 << 20) + END),
    "sparse: another size": sparse_blob(sparse_head(1 << 50) + END),
    "sparse: past the end": sparse_blob(sparse_head() + record(4 << 20, bytes(4096)) + END),
    "sparse: overlapping": sparse_blob(sparse_head() + record(8192, b"x" * 8192) + record(8192, b"y" * 4096) + END),
    "sparse: no whole pages": sparse_blob(sparse_head() + record(5, b"x" * 4096) + END),
    "sparse: record too long": sparse_blob(sparse_head() + struct.pack("<QI", 0, 1 << 31) + b"x" * 100),
    "sparse: no end": sparse_blob(sparse_head() + record(0, b"x" * 4096)),
    "sparse: bytes after the end": sparse_blob(sparse_head() + record(0, b"x" * 4096) + END + b"more"),
}


async def refused(runtime: Runtime, data: bytes, path: Path, **fields: Any) -> ForkdError:
    """Unpack bytes that must be refused; nothing of them may be left."""
    before = tree(path)
    (path.parent / "hostile.tar.zst").write_bytes(data)
    with pytest.raises(ForkdError) as caught:
        await unpack(runtime, UnpackRequest(path=str(path.parent / "hostile.tar.zst"), **fields), quiet)
    assert tree(path) == before
    assert [entry.name for entry in (path / "blobs").glob(".*")] == []
    return caught.value


@pytest.mark.parametrize("case", MANIFESTS)
async def test_a_hostile_manifest_or_blob_is_refused(case: str, good: bytes, tmp_path: Path) -> None:
    table, blobs = taken_apart(good)
    MANIFESTS[case](table, blobs)
    async with runtime_at(tmp_path / "data") as runtime:
        error = await refused(runtime, packed(table, blobs), tmp_path / "data")
    assert isinstance(error, PackError | SnapshotBroken), error


def packed(table: Table, blobs: dict[str, bytes]) -> bytes:
    """A pack of what it was taken apart into."""
    out = io.BytesIO()
    out.write(glue_of("manifest.toml", tomli_w.dumps(table).encode()))
    for row in table["blobs"]:
        if row.get("inside", True):
            out.write(glue.frame(glue.header(f"{row['kind']}-{row['sha256'][:16]}", row["stream"])))
            out.write(blobs.get(row["sha256"], b""))
            out.write(glue.frame(padding) if (padding := glue.padding(row["stream"])) else b"")
    out.write(glue.trailer())
    return out.getvalue()


def glue_of(name: str, data: bytes) -> bytes:
    return glue.frame(glue.header(name, len(data)) + data + glue.padding(len(data)))


def tarred(*members: tuple[str, bytes, bytes, str]) -> bytes:
    """An ordinary tar.zst, as other tools make them: ``(name, data, type, link)`` each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data, kind, link in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data) if kind == tarfile.REGTYPE else 0, kind, link
            archive.addfile(info, io.BytesIO(data))
    return zstandard.compress(out.getvalue())


FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "one byte": lambda good: good[:1],
    "cut in the manifest": lambda good: good[:700],
    "cut in a blob": lambda good: good[: len(good) // 2],
    "cut by one byte": lambda good: good[:-1],
    "bytes after the end": lambda good: good + b"x",
    "a second pack after it": lambda good: good + good,
    "not compressed": lambda good: b"hello" * 1000,
    "a real tar.zst": lambda good: tarred(("manifest.toml", b"forkd_pack_version = 1\n", tarfile.REGTYPE, "")),
    "absolute path": lambda good: tarred(("/etc/cron.d/x", b"x", tarfile.REGTYPE, "")),
    "dots": lambda good: tarred(("../../etc/cron.d/x", b"x", tarfile.REGTYPE, "")),
    "symbolic link": lambda good: tarred(("memory.bin", b"", tarfile.SYMTYPE, "/etc/shadow")),
    "hard link": lambda good: tarred(("memory.bin", b"", tarfile.LNKTYPE, "/etc/shadow")),
    "device": lambda good: tarred(("memory.bin", b"", tarfile.CHRTYPE, "")),
    "duplicate names": lambda good: tarred(*[("manifest.toml", b"", tarfile.REGTYPE, "")] * 2),
    "manifest too long": lambda good: glue_of("manifest.toml", b"#" * (3 << 20)),
    "manifest under another name": lambda good: glue_of("../manifest.toml", b"forkd_pack_version = 3\n"),
    "manifest is no text": lambda good: glue_of("manifest.toml", b"\xff\xfe\x00"),
    "manifest is no TOML": lambda good: glue_of("manifest.toml", b"a = = b\n"),
    "manifest is deep": lambda good: glue_of("manifest.toml", b"a = " + b"[" * 100_000),
    "a header was changed": lambda good: good.replace(b"vmstate-", b"vmst\0te-", 1),
    "a mode was changed": lambda good: good.replace(b"0000644\0", b"0004755\0", 2),
}


@pytest.mark.parametrize("case", FILES)
async def test_a_hostile_file_is_refused(case: str, good: bytes, tmp_path: Path) -> None:
    async with runtime_at(tmp_path / "data") as runtime:
        assert isinstance(await refused(runtime, FILES[case](good), tmp_path / "data"), PackError)


def signed(good: bytes, *keys: Any, spoil: bool = False) -> bytes:
    found = pack.read(io.BytesIO(good))
    document = found.document
    for key in keys:
        document = signatures.sign(document, key)
    if spoil:
        document = document[:-2] + (b"0" if document[-2:-1] != b"0" else b"1") + b"\n"
    out = io.BytesIO()
    pack.resign(io.BytesIO(good), out, document)
    return out.getvalue()


async def test_a_bad_signature_is_refused_and_an_unknown_key_only_if_one_is_required(
    good: bytes, tmp_path: Path
) -> None:
    key = signatures.load_key(signatures.new_key())
    async with runtime_at(tmp_path / "data") as runtime:
        for policy in ("warn", "require"):
            bad = await refused(runtime, signed(good, key, spoil=True), tmp_path / "data", trust=policy)
            assert isinstance(bad, TrustError)
        for data in (good, signed(good, key)):
            assert isinstance(await refused(runtime, data, tmp_path / "data", trust="require"), TrustError)
        path = tmp_path / "signed.tar.zst"
        path.write_bytes(signed(good, key))
        result = await unpack(runtime, UnpackRequest(path=str(path), trust="warn"), quiet)
        assert (result["trust"], result["signed_by"]) == ("unknown", [signatures.public_hex(key)])
        assert "unknown" in result["warning"]


async def test_a_signature_by_a_trusted_key_is_enough_and_is_remembered(good: bytes, tmp_path: Path) -> None:
    from forkd.ops.keys import trust

    key = signatures.load_key(signatures.new_key())
    path = tmp_path / "signed.tar.zst"
    path.write_bytes(signed(good, key))
    async with runtime_at(tmp_path / "data", trust="require") as runtime:
        trust(runtime, "acme", signatures.public_hex(key))
        result = await unpack(runtime, UnpackRequest(path=str(path)), quiet)
        assert (result["trust"], result["signed_by"], result["added"]) == (
            "trusted",
            ["acme"],
            ["root", "middle", "head"],
        )
        source = runtime.snapshots.load("head").manifest.source
        assert source is not None
        assert (source["trust"], source["signed_by"], source["from"]) == ("trusted", ["acme"], f"file:{path}")
        trust(runtime, "acme", None)
        again = signed(good, key)
        await refused(runtime, again, tmp_path / "data", tag="again")


async def test_a_manifest_changed_after_signing_is_refused(good: bytes, tmp_path: Path) -> None:
    key = signatures.load_key(signatures.new_key())
    found = pack.read(io.BytesIO(signed(good, key)))
    document = found.document.replace(b'base_image = "debian:bookworm"', b'base_image = "debian:trixie!!"')
    out = io.BytesIO()
    out.write(glue_of("manifest.toml", document))
    out.write(good[len(glue_of("manifest.toml", found.body)) :])
    async with runtime_at(tmp_path / "data") as runtime:
        assert isinstance(await refused(runtime, out.getvalue(), tmp_path / "data"), TrustError)


async def test_a_layer_with_another_token_is_not_the_one_that_is_here(good: bytes, tmp_path: Path) -> None:
    """No content id has the token, so a stranger's snapshot could pass for the one that is signed."""
    table, blobs = taken_apart(good)
    table["layers"][2]["agent_sync"] = "ab" * 16
    key = signatures.load_key(signatures.new_key())
    (tmp_path / "right.tar.zst").write_bytes(signed(good, key))
    (tmp_path / "other.tar.zst").write_bytes(packed(table, blobs))
    async with runtime_at(tmp_path / "data") as runtime:
        await unpack(runtime, UnpackRequest(path=str(tmp_path / "other.tar.zst")), quiet)
        with pytest.raises(TagTaken):
            await unpack(runtime, UnpackRequest(path=str(tmp_path / "right.tar.zst")), quiet)
        result = await unpack(runtime, UnpackRequest(path=str(tmp_path / "right.tar.zst"), force=True), quiet)
        assert (result["added"], result["present"]) == (["head"], ["root", "middle"])
        assert runtime.snapshots.load("head").manifest.agent_sync == "00" * 16


async def test_the_right_pack_is_taken(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "good.tar.zst").write_bytes(good)
    async with runtime_at(tmp_path / "data") as runtime:
        result = await unpack(runtime, UnpackRequest(path=str(tmp_path / "good.tar.zst")), quiet)
        assert result["added"] == ["root", "middle", "head"]
        assert result["trust"] == "unsigned"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_pack_with_any_bytes_changed_is_refused_or_the_same(good: bytes, data: st.DataObject) -> None:
    spoiled = bytearray(good)
    where = data.draw(st.integers(0, min(len(good), 6000) - 1))
    change = data.draw(st.binary(min_size=1, max_size=40))
    if data.draw(st.booleans()):
        spoiled[where : where + len(change)] = change
    else:
        spoiled[where:where] = change
    try:
        found = pack.read(io.BytesIO(bytes(spoiled)))
    except PackError:
        return
    assert all(blob.inside for blob in found.manifest.blobs)  # whatever it is, it passed every check
    assert sum(blob.stored for blob in found.manifest.blobs) < len(spoiled)


LEAVES = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(max_size=20), st.datetimes(), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_with_any_value_changed_is_refused_with_a_named_error_or_is_harmless(
    good: bytes, data: st.DataObject
) -> None:
    table, _ = taken_apart(good)
    place: Any = table
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.integers(0, 5)):
            place = place[key]
        else:
            break
    place[key] = data.draw(LEAVES)
    try:
        body = tomli_w.dumps(table).encode()
    except (ValueError, UnicodeEncodeError):
        return
    try:
        found = manifest.decode(body)
    except PackError:
        return
    assert isinstance(found, PackManifest)
    for blob in found.blobs:
        assert set(blob.sha256) <= set("0123456789abcdef")
        assert blob.stored > 0
    for layer in found.layers:
        assert "/" not in layer.tag
        assert 0 < layer.hardware.mem_mib <= 1 << 20


@given(st.binary(max_size=300))
def test_no_bytes_make_decoding_a_manifest_fail_in_any_other_way(data: bytes) -> None:
    with pytest.raises(PackError):
        manifest.decode(data)


@given(st.binary(max_size=2000))
def test_no_bytes_make_reading_a_pack_fail_in_any_other_way(data: bytes) -> None:
    with pytest.raises(PackError):
        pack.read(io.BytesIO(data))
    with pytest.raises(PackError):
        pack.read(io.BytesIO(glue_of("manifest.toml", data)))


@given(st.binary(max_size=4096 * 3))
def test_no_bytes_make_a_sparse_stream_fail_in_any_other_way(data: bytes) -> None:
    for source in (data, sparse_head() + data):
        stream = io.BytesIO(source)
        try:
            for offset, content in sparsestream.decode(stream.read, 4 << 20):
                assert 0 <= offset < offset + len(content) <= 4 << 20
        except PackError:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b".".join([b"a"] * 100_000) + b" = 1\n",
        b"[" + b" . ".join([b'"a.b"'] * 100_000) + b"]\n",
        b'x = ["""\n""", {' + b".".join([b"a"] * 100_000) + b' = 1}] # "\n',
        b'"' + b'\\"' * 400_000,
        b"x = " + b"9" * 5000 + b"\n",
    ],
    ids=["dotted key", "dotted table", "behind a text of several lines", "text without an end", "thousands of digits"],
)
def test_a_manifest_that_would_keep_the_parser_busy_is_refused_at_once(body: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(PackError):
        manifest.decode(body)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 10
    assert after.ru_maxrss - before.ru_maxrss < 400 << 10
