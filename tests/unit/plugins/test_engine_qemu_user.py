"""Which user a QEMU becomes, where it may, and what it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forkd.linux.hostprobe import HostProbe
from forkd.plugins.engine_qemu.command import SANDBOX
from forkd.plugins.engine_qemu.user import USERS, as_user, choose_users, give_slot, owner_of, user_of
from forkd.specs.errors import BadInput, HostNotReady

ALL = "0 0 4294967295"


def host(root: Path, *, euid: int = 0, capabilities: str = "1ffffffffff", mapped: str = ALL) -> HostProbe:
    folder = root / "proc/self"
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    for name in ("uid_map", "gid_map"):
        (folder / name).write_text(f"         {mapped}\n")
    return HostProbe(root, euid=euid)


def test_root_that_may_gives_each_machine_a_user_and_the_same_one_again(tmp_path: Path) -> None:
    users = choose_users("auto", host(tmp_path))
    assert users == USERS
    chosen = {user_of(USERS, f"sb-{number}") for number in range(500)}
    assert len(chosen) == 500 and all(user in USERS for user in chosen)
    assert user_of(USERS, "sb-1") == user_of(USERS, "sb-1")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"euid": 1000}, "does not run as root"),
        ({"capabilities": "1fffff7ffff"}, "lacks the capabilities SYS_PTRACE"),
        ({"mapped": "0 100000 65536"}, "this user namespace does not have them"),
    ],
)
def test_who_may_not_goes_without_and_is_told_when_he_insists(tmp_path: Path, what: dict[str, str], why: str) -> None:
    here = host(tmp_path, **what)  # type: ignore[arg-type]
    assert choose_users("auto", here) is None
    with pytest.raises(HostNotReady, match=why):
        choose_users("900000-900010", here)


def test_a_range_or_off_is_taken_as_said(tmp_path: Path) -> None:
    here = host(tmp_path)
    assert choose_users("off", here) is None
    assert choose_users("900000-900010", here) == range(900000, 900011)


@pytest.mark.parametrize("setting", ["", "on", "0-5", "9-5", "1", "1-4294967295", "a-b", "1-2-3"])
def test_what_is_no_range_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(BadInput):
        choose_users(setting, host(tmp_path))


@pytest.mark.parametrize(("version", "words"), [("7.2.22", ["-runas", "5:5"]), ("10.0.1", ["-run-with", "user=5:5"])])
def test_a_qemu_is_told_in_its_own_words_and_its_filter_lets_it(version: str, words: list[str]) -> None:
    line = as_user(["qemu", *SANDBOX], 5, version)
    assert line[-2:] == words
    assert "elevateprivileges=allow" in line[2] and "spawn=deny" in line[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_slot_remembers_whom_it_was_given_to_and_stays_roots(tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    slot.mkdir(mode=0o700)
    assert owner_of(slot) is None
    give_slot(slot, USERS[7])
    assert owner_of(slot) == USERS[7]
    assert slot.stat().st_uid == 0
