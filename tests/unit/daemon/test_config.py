"""The daemon's settings: file, then environment, then flags; every refusal names the setting."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forkd.daemon.config import DaemonConfig, load_config, template
from forkd.specs.errors import BadInput
from forkd.specs.requests import RetentionPolicy, RetentionRule


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "forkd.toml"
    path.write_text('bind = "127.0.0.1:1"\ndrain_secs = 5\nbranch_concurrency = 2\n')
    config = load_config(str(path), {"bind": "127.0.0.1:3", "socket": None}, {"FORKD_BRANCH_CONCURRENCY": "7"})
    assert (config.bind, config.drain_secs, config.branch_concurrency) == ("127.0.0.1:3", 5.0, 7)


def test_the_printed_config_says_every_default(tmp_path: Path) -> None:
    text = template()
    plain, table = text.split("# [retention]\n")
    path = tmp_path / "forkd.toml"
    path.write_text("\n".join(line.removeprefix("# ") for line in plain.splitlines() if " = " in line))
    assert load_config(str(path), {}, {}) == DaemonConfig()
    assert tomllib.loads(text) == {}
    path.write_text("[retention]\n" + "\n".join(line.removeprefix("# ") for line in table.splitlines()))
    rule = RetentionRule(labels=["session"], keep_last=3, older_than_secs=7 * 86400, max_bytes=10 << 30)
    assert load_config(str(path), {}, {}).retention == RetentionPolicy(rules=[rule], every_secs=3600)


POLICIES = [
    "retention = 5",
    "[retention]",
    "[retention]\nrules = []",
    "[[retention.rules]]",
    "[[retention.rules]]\nkeep_lats = 1",
    "[[retention.rules]]\nkeep_last = -1",
    "[[retention.rules]]\nolder_than_secs = nan",
    "[retention]\nevery_secs = 0\n[[retention.rules]]\nkeep_last = 1",
]


@pytest.mark.parametrize(
    "text",
    [
        "bind = 5",
        "nonsense = 1",
        "bind = ",
        'bind = "nowhere"',
        "branch_concurrency = 0",
        'tls_cert = "c.pem"',
        *POLICIES,
        'pool = "tag"',
        'pool = "../x=1"',
    ],
)
def test_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "forkd.toml"
    path.write_text(text)
    with pytest.raises(BadInput):
        load_config(str(path), {}, {})


def test_pools_are_sizes_by_tag() -> None:
    assert load_config(None, {}, {"FORKD_POOL": "python-numpy=10, node=4"}).pools() == {"python-numpy": 10, "node": 4}
    assert DaemonConfig().pools() == {}


@pytest.mark.parametrize(
    ("bind", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("none", True),
        ("0.0.0.0:1", False),
        (":1", False),
    ],
)
def test_what_others_can_reach_is_known(bind: str, loopback: bool) -> None:
    assert DaemonConfig(bind=bind).loopback() is loopback
