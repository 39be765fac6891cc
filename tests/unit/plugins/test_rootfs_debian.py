"""Debian from packages: which apt sources are used, what is asked for, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.linux.command import CommandFailed
from forkd.plugins.rootfs_debian import builder as module
from forkd.plugins.rootfs_debian.builder import DebianBuilder
from forkd.plugins.rootfs_debian.sources import Source, parse_deb822, parse_list, read_host_sources, sources_for
from forkd.specs.errors import BadInput, BuildFailed, HostNotReady, ToolMissing
from forkd.specs.rootfs import ImageRequest
from forkd.testing.rootfs import ignore

MAIN = Source("http://deb.example/debian", "bookworm", ("main",))
UPDATES = Source("http://deb.example/debian", "bookworm-updates", ("main",))
SECURITY = Source("http://deb.example/security", "bookworm-security", ("main",))
FOREIGN = Source("http://other.example/apt", "stable/", ())


def test_the_hosts_own_sources_serve_its_own_suite_and_foreign_ones_never() -> None:
    assert sources_for("bookworm", [MAIN, UPDATES, SECURITY, FOREIGN]) == [MAIN, UPDATES, SECURITY]
    assert sources_for("bookworm", [FOREIGN]) == []


def test_another_suite_is_built_from_the_same_mirror() -> None:
    assert [source.suite for source in sources_for("trixie", [MAIN, UPDATES, SECURITY])] == [
        "trixie",
        "trixie-updates",
        "trixie-security",
    ]
    assert [source.suite for source in sources_for("sid", [MAIN, UPDATES, SECURITY])] == ["sid"]


def test_both_formats_of_apt_are_read_and_disabled_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "# comment\ndeb [arch=amd64 signed-by=/k.gpg] http://deb.example/debian bookworm main contrib # why\n"
        "deb-src http://deb.example/debian bookworm main\n"
    )
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://a.example http://b.example\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By: /usr/share/keyrings/debian.gpg\n\n"
        "Types: deb\nEnabled: no\nURIs: http://c.example\nSuites: bookworm\nComponents: main\n"
    )
    found = read_host_sources(tmp_path)
    assert found[0].line() == "deb [arch=amd64 signed-by=/k.gpg] http://deb.example/debian bookworm main contrib"
    assert [(source.uri, source.suite) for source in found[1:]] == [
        ("http://a.example", "bookworm"),
        ("http://a.example", "bookworm-updates"),
        ("http://b.example", "bookworm"),
        ("http://b.example", "bookworm-updates"),
    ]
    assert dict(found[1].options) == {"signed-by": "/usr/share/keyrings/debian.gpg"}
    assert read_host_sources(tmp_path / "nowhere") == []


@pytest.mark.parametrize("text", ["", "deb", "deb http://x", "\0\0", "Types: deb\n URIs"])
def test_nonsense_in_apts_files_is_passed_over(text: str) -> None:
    assert list(parse_list(text)) == []
    assert list(parse_deb822(text)) == []


@pytest.mark.parametrize("reference", ["debian", "debian:trixie", "debian:sid"])
def test_debian_is_accepted(reference: str) -> None:
    assert DebianBuilder().accepts(reference)


@pytest.mark.parametrize("reference", ["debian:", "debian:../x", "debian:a b", "debian:UPPER", "ubuntu", "debian/x"])
def test_what_is_not_debian_is_not(reference: str) -> None:
    assert not DebianBuilder().accepts(reference)


async def test_packages_are_separated_sorted_and_checked() -> None:
    builder = DebianBuilder()
    one = await builder.content_key(ImageRequest("debian", ("python3-numpy jq", "jq")))
    assert one == await builder.content_key(ImageRequest("debian:bookworm", ("jq", "python3-numpy")))
    assert one != await builder.content_key(ImageRequest("debian:trixie", ("jq", "python3-numpy")))
    for bad in ("-o", "a;b", "Upper", "x=1", "$(id)"):
        with pytest.raises(BadInput):
            await builder.content_key(ImageRequest("debian", (bad,)))


async def test_what_the_host_lacks_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_host_sources", list)
    with pytest.raises(HostNotReady):
        await DebianBuilder().build(ImageRequest("debian"), tmp_path, ignore)
    monkeypatch.setattr(module, "read_host_sources", lambda: [MAIN])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolMissing, match="mmdebstrap") as missing:
        await DebianBuilder().build(ImageRequest("debian"), tmp_path, ignore)
    assert "apt-get install" in (missing.value.hint or "")


async def test_a_build_that_fails_has_the_tools_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(argv: list[str], **options: object) -> list[str]:
        raise CommandFailed(argv, 100, ["E: Unable to locate package nope"])

    monkeypatch.setattr(module, "read_host_sources", lambda: [MAIN])
    monkeypatch.setattr(module, "run_command", fail)
    with pytest.raises(BuildFailed, match="Unable to locate package nope"):
        await DebianBuilder().build(ImageRequest("debian", ("nope",)), tmp_path, ignore)
