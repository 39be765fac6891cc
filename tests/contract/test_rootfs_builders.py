"""Every rootfs builder of ours keeps the contract."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from forkd.plugins.rootfs_debian.builder import DebianBuilder
from forkd.plugins.rootfs_dir.builder import DirBuilder
from forkd.specs.rootfs import ImageRequest, RootfsBuilder
from forkd.testing.rootfs import RootfsBuilderContract


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small root file system, with what root file systems have."""
    root = tmp_path_factory.mktemp("image")
    for name in ("etc", "usr/bin", "root", "dev"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/os-release").write_text("ID=test\n")
    (root / "etc/localtime").symlink_to("/usr/share/zoneinfo/UTC")
    shutil.copy("/bin/true", root / "usr/bin/true")
    (root / "usr/bin/true").chmod(0o4755)
    os.link(root / "usr/bin/true", root / "usr/bin/also-true")
    return root


class TestDirectory(RootfsBuilderContract):
    @pytest.fixture
    def builder(self) -> DirBuilder:
        return DirBuilder()

    @pytest.fixture
    def request_(self, tree: Path) -> ImageRequest:
        return ImageRequest(str(tree))

    @pytest.fixture
    def bad_request(self, tree: Path) -> ImageRequest:
        return ImageRequest(str(tree), ("python3-numpy",))


class TestTar(RootfsBuilderContract):
    @pytest.fixture
    def builder(self) -> DirBuilder:
        return DirBuilder()

    @pytest.fixture(params=["tar", "tar.gz", "tar.xz"])
    def suffix(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def request_(self, tree: Path, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> ImageRequest:
        path = tmp_path_factory.mktemp("archive") / f"image.{suffix}"
        with tarfile.open(path, "w:" + suffix.partition(".")[2]) as archive:  # type: ignore[call-overload]
            archive.add(tree, ".")
            device = tarfile.TarInfo("./dev/null")
            device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
            archive.addfile(device)
        return ImageRequest(f"tar:{path}")

    @pytest.fixture
    def bad_request(self) -> ImageRequest:
        return ImageRequest("tar:/no/such/file.tar")


class TestDebian(RootfsBuilderContract):
    @pytest.fixture
    def builder(self) -> DebianBuilder:
        return DebianBuilder()

    @pytest.fixture
    def request_(self) -> ImageRequest:
        return ImageRequest("debian:bookworm", ("busybox-static", "jq"))

    @pytest.fixture
    def bad_request(self) -> ImageRequest:
        return ImageRequest("debian:bookworm", ("not a package; rm -rf /",))

    @pytest.mark.slow
    async def test_it_fills_the_directory_and_nothing_else(
        self, builder: RootfsBuilder, request_: ImageRequest, target: Path
    ) -> None:
        await super().test_it_fills_the_directory_and_nothing_else(builder, request_, target)
