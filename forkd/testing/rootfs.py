"""The contract of rootfs builders."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import trio

from forkd.specs.errors import BadInput
from forkd.specs.rootfs import ImageConfig, ImageRequest, RootfsBuilder

STRANGE = ("", " ", "\0", "-x", "a" * 10_000, "../../..", "debian:\n", "http://", "ünï", "no-such-scheme:x")


def ignore(step: str, fraction: float | None) -> None:
    """Progress nobody looks at."""


def offspring() -> set[int]:
    """Every process below ours."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"{entry.path}/stat", encoding="utf-8", errors="replace") as source:
                    parents[int(entry.name)] = int(source.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {os.getpid()}


class RootfsBuilderContract:
    """Subclass it and give the fixtures ``builder``, ``request_`` (something it can build) and ``bad_request``.

    ``request_`` and ``bad_request`` have references it accepts; the second one makes no sense all the same.
    """

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        """The empty directory to fill."""
        (tmp_path / "beside").write_text("not the builder's")
        (tmp_path / "tree").mkdir()
        return tmp_path / "tree"

    def test_it_accepts_by_form_alone_and_never_raises(
        self, builder: RootfsBuilder, request_: ImageRequest, bad_request: ImageRequest
    ) -> None:
        assert builder.accepts(request_.reference)
        assert builder.accepts(bad_request.reference)
        for reference in STRANGE:
            assert builder.accepts(reference) in (True, False)
        assert not builder.accepts("no-such-scheme:x")
        assert not builder.accepts("")

    async def test_the_key_is_the_same_for_the_same_and_needs_no_tools(
        self, builder: RootfsBuilder, request_: ImageRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = await builder.content_key(request_)
        monkeypatch.setenv("PATH", "/nowhere")
        assert await builder.content_key(request_) == key
        extras = tuple(reversed(request_.extras))
        assert await builder.content_key(ImageRequest(request_.reference, extras)) == key

    async def test_a_request_that_makes_no_sense_is_refused_by_key_and_by_build(
        self, builder: RootfsBuilder, bad_request: ImageRequest, target: Path
    ) -> None:
        with pytest.raises(BadInput) as by_key:
            await builder.content_key(bad_request)
        assert by_key.value.message
        with pytest.raises(BadInput):
            await builder.build(bad_request, target, ignore)
        assert list(target.iterdir()) == []

    async def test_it_fills_the_directory_and_nothing_else(
        self, builder: RootfsBuilder, request_: ImageRequest, target: Path
    ) -> None:
        steps: list[str] = []

        def progress(step: str, fraction: float | None) -> None:
            assert fraction is None or 0 <= fraction <= 1
            steps.append(step)

        before = offspring()
        config = await builder.build(request_, target, progress)
        assert isinstance(config, ImageConfig)
        assert config.workdir.startswith("/")
        assert steps
        assert offspring() <= before
        assert sorted(os.listdir(target.parent)) == ["beside", "tree"]
        assert os.path.lexists(target / "bin") or os.path.lexists(target / "usr")
        assert (target / "etc").is_dir()
        for path in target.rglob("*"):
            mode = path.lstat().st_mode
            assert not stat.S_ISBLK(mode) and not stat.S_ISCHR(mode), f"{path} is a device"

    async def test_cancelled_it_ends_what_it_started(
        self, builder: RootfsBuilder, request_: ImageRequest, target: Path
    ) -> None:
        before = offspring()
        with trio.fail_after(120), trio.move_on_after(0.05):
            await builder.build(request_, target, ignore)
        assert offspring() <= before
