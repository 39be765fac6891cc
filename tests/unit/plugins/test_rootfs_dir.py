"""Root file systems from a directory or a tar file nobody has to trust."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
import zstandard

from forkd.plugins.rootfs_dir import builder as module
from forkd.plugins.rootfs_dir.builder import DirBuilder
from forkd.specs.errors import BuildFailed
from forkd.specs.rootfs import ImageRequest
from forkd.testing.rootfs import ignore


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive(path: Path, *entries: tarfile.TarInfo, content: bytes = b"") -> ImageRequest:
    with tarfile.open(path, "w") as out:
        for info in entries:
            info.size = len(content) if info.isreg() else 0
            out.addfile(info, io.BytesIO(content))
    return ImageRequest(str(path))


async def build(request: ImageRequest, tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    await DirBuilder().build(request, target, ignore)
    return target


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../escaped")],
        [entry("etc/../../escaped")],
        [entry("out", tarfile.SYMTYPE, linkname=".."), entry("out/escaped")],
        [entry("out", tarfile.SYMTYPE, linkname="/"), entry("out/tmp/forkd-escaped")],
        [entry("hard", tarfile.LNKTYPE, linkname="../outside")],
        [entry("hard", tarfile.LNKTYPE, linkname="/etc/passwd")],
    ],
    ids=["dots", "inner-dots", "through-link", "through-root", "hard-dots", "hard-absolute"],
)
async def test_nothing_leaves_the_tree(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    (tmp_path / "outside").write_text("secret")
    request = archive(tmp_path / "evil.tar", *entries, content=b"gotcha")
    with pytest.raises(BuildFailed) as refused:
        await build(request, tmp_path)
    assert "could not be unpacked" in refused.value.message
    assert not (tmp_path / "escaped").exists()
    assert not os.path.exists("/tmp/forkd-escaped")
    assert (tmp_path / "outside").read_text() == "secret"


async def test_an_absolute_name_lands_inside(tmp_path: Path) -> None:
    tree = await build(archive(tmp_path / "a.tar", entry("/etc"), content=b"x"), tmp_path)
    assert (tree / "etc").read_bytes() == b"x"


async def test_modes_links_and_setuid_stay_and_devices_are_left_out(tmp_path: Path) -> None:
    request = archive(
        tmp_path / "image.tar",
        entry("bin", tarfile.DIRTYPE, mode=0o755),
        entry("bin/su", mode=0o4755),
        entry("etc-localtime", tarfile.SYMTYPE, linkname="/usr/share/zoneinfo/UTC"),
        entry("bin/su2", tarfile.LNKTYPE, linkname="bin/su", mode=0o4755),
        entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        entry("tmp", tarfile.DIRTYPE, mode=0o1777),
        content=b"#!",
    )
    tree = await build(request, tmp_path)
    assert stat.S_IMODE((tree / "bin/su").stat().st_mode) == 0o4755
    assert (tree / "bin/su").stat().st_ino == (tree / "bin/su2").stat().st_ino
    assert os.readlink(tree / "etc-localtime") == "/usr/share/zoneinfo/UTC"
    assert stat.S_IMODE((tree / "tmp").stat().st_mode) == 0o1777
    assert not (tree / "null").exists()


async def test_zstd_archives_are_read(tmp_path: Path) -> None:
    archive(tmp_path / "image.tar", entry("file"), content=b"x" * 100_000)
    packed = tmp_path / "image.tar.zst"
    packed.write_bytes(zstandard.compress((tmp_path / "image.tar").read_bytes()))
    tree = await build(ImageRequest(str(packed)), tmp_path)
    assert (tree / "file").stat().st_size == 100_000


@pytest.mark.parametrize("name", ["cut.tar", "junk.tar", "cut.tar.zst"])
async def test_a_damaged_archive_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    archive(tmp_path / "good.tar", entry("file"), content=os.urandom(100_000))
    whole = (tmp_path / "good.tar").read_bytes()
    broken = {
        "cut.tar": whole[:50_000],
        "junk.tar": os.urandom(5_000),
        "cut.tar.zst": zstandard.compress(whole)[:50_000],
    }
    (tmp_path / name).write_bytes(broken[name])
    with pytest.raises(BuildFailed, match=name):
        await build(ImageRequest(str(tmp_path / name)), tmp_path)


async def test_too_much_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = archive(tmp_path / "bomb.tar", *(entry(f"f{index}") for index in range(20)), content=b"x" * 1000)
    monkeypatch.setattr(module, "MAX_MEMBERS", 10)
    with pytest.raises(BuildFailed, match="more than 10"):
        await build(request, tmp_path)
    monkeypatch.setattr(module, "MAX_MEMBERS", 1000)
    monkeypatch.setattr(module, "MAX_BYTES", 5000)
    (tmp_path / "again").mkdir()
    with pytest.raises(BuildFailed, match="more than"):
        await build(request, tmp_path / "again")


async def test_the_key_changes_when_the_tree_does(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("one")
    request = ImageRequest(str(tree))
    keys = [await DirBuilder().content_key(request)]
    (tree / "file").write_text("longer")
    keys.append(await DirBuilder().content_key(request))
    (tree / "file").chmod(0o600)
    keys.append(await DirBuilder().content_key(request))
    (tree / "link").symlink_to("file")
    keys.append(await DirBuilder().content_key(request))
    (tree / "link").unlink()
    (tree / "link").symlink_to("else")
    keys.append(await DirBuilder().content_key(request))
    assert len(set(keys)) == len(keys)
