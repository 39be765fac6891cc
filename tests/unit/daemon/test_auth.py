"""Tokens: strong ones from a private file, compared without telling how much fits; without them no foreign pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.daemon.auth import Tokens, check_local
from forkd.specs.errors import BadInput, ForeignOrigin, TokenTooNarrow, Unauthorized

GOOD = "0123456789abcdef0123"
OTHER = "fedcba98765432100123"


def token_file(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_each_token_has_a_name(tmp_path: Path) -> None:
    tokens = Tokens(token_file(tmp_path, f"# who\n{GOOD}\nci {OTHER}  # nightly\n"))
    assert tokens.name_of(f"Bearer {GOOD}") == "default"
    assert tokens.name_of(f"bearer {OTHER}") == "ci"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", f"Basic {GOOD}", "Bearer wrong", f"Bearer {GOOD}x"])
def test_anything_else_is_refused(tmp_path: Path, header: str | None) -> None:
    with pytest.raises(Unauthorized):
        Tokens(token_file(tmp_path, GOOD)).name_of(header)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no token"),
        ("# only a comment\n", "no token"),
        ("short", "weak"),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaa", "weak"),
        ("REPLACE_ME_with_a_real_token", "placeholder"),
        ("CHANGE_ME_0123456789abcdef", "placeholder"),
        (f"{GOOD}\n{OTHER}", "second token"),
        (f"a b {GOOD}", "neither"),
        (f"a {GOOD} hub x", "neither"),
        (f"a {GOOD} all", "neither"),
    ],
)
def test_files_that_protect_nothing_are_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Tokens(token_file(tmp_path, text))


def test_a_token_for_the_registry_reads_it_and_does_nothing_else(tmp_path: Path) -> None:
    tokens = Tokens(token_file(tmp_path, f"{GOOD}\nmirror {OTHER} hub\n"))
    for method, path in (("GET", "/hub/registry.json"), ("HEAD", "/hub/blobs/sha256/00"), ("GET", "/hub/")):
        assert tokens.admit(f"Bearer {OTHER}", method, path) == "mirror"
    for method, path in (
        ("GET", "/v1/hub/packages"),
        ("POST", "/hub/registry.json"),
        ("WEBSOCKET", "/hub/x"),
        ("GET", "/hub"),
        ("GET", "/metrics"),
    ):
        with pytest.raises(TokenTooNarrow):
            tokens.admit(f"Bearer {OTHER}", method, path)
        assert tokens.admit(f"Bearer {GOOD}", method, path) == "default"
    token_file(tmp_path, f"mirror {OTHER}\n")
    tokens.reload()
    assert tokens.admit(f"Bearer {OTHER}", "GET", "/metrics") == "mirror"


def test_a_file_everybody_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="everybody"):
        Tokens(token_file(tmp_path, GOOD, 0o644))


def test_a_file_gone_bad_leaves_the_tokens_as_they_were(tmp_path: Path) -> None:
    tokens = Tokens(token_file(tmp_path, GOOD))
    token_file(tmp_path, "weak")
    with pytest.raises(BadInput):
        tokens.reload()
    assert tokens.name_of(f"Bearer {GOOD}") == "default"
    token_file(tmp_path, OTHER)
    tokens.reload()
    with pytest.raises(Unauthorized):
        tokens.name_of(f"Bearer {GOOD}")


@pytest.mark.parametrize("host", ["127.0.0.1:8889", "localhost", "[::1]:8889", "a.localhost:1"])
def test_the_hosts_own_names_are_welcome(host: str) -> None:
    check_local(host, None)
    check_local(host, f"http://{host}")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example", None),
        ("127.0.0.1.evil.example:8889", None),
        ("127.0.0.1", "https://evil.example"),
        ("", None),
        ("[", None),
        ("127.0.0.1", "http://["),
        ("127.0.0.1", "null"),
    ],
)
def test_foreign_names_and_pages_are_not(host: str, origin: str | None) -> None:
    with pytest.raises(ForeignOrigin):
        check_local(host, origin)
