"""The user a QEMU runs as: one of its own where forkd is root, so that it can touch nothing but what it was given.

QEMU opens its files, tap and accelerator as root, then becomes that user for good, before its guest's first answer.
Its slot belongs to root, with the user's group on it: the user may work there, and can neither list nor change it.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path

from forkd.specs.errors import BadInput, HostNotReady
from forkd.specs.host import Host

USERS = range(0x70000000, 0x78000000)
"""Numbers that neither people, services nor containers are given on common systems."""
_SLOT_MODE = 0o710
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7, "SYS_PTRACE": 19}
"""What it takes to become another user, and to end, freeze and clone its processes."""


def choose_users(setting: str, host: Host) -> range | None:
    """The users for the setting ``auto``, ``off`` or ``FIRST-LAST``; None: QEMU runs as the user forkd runs as.

    Raises BadInput, and HostNotReady where a range is asked for and cannot be had.
    """
    if setting == "off":
        return None
    if setting == "auto":
        return USERS if why_not(USERS, host) is None else None
    match = re.fullmatch(r"(\d{1,10})-(\d{1,10})", setting)
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 0xFFFFFFFF:
        raise BadInput(
            f"vmm_users is {setting[:40]!r}", hint="give auto, off, or two user numbers: 1879048192-1879113727"
        )
    users = range(int(match[1]), int(match[2]) + 1)
    if (why := why_not(users, host)) is not None:
        raise HostNotReady(f"QEMU cannot run as one of the users {setting}: {why}", hint="set FORKD_VMM_USERS=off")
    return users


def why_not(users: range, host: Host) -> str | None:
    """Why machines cannot run as these users, if they cannot."""
    if host.euid != 0:
        return "forkd does not run as root"
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", host.read("/proc/self/status") or "", re.MULTILINE)
    held = int(found[1], 16) if found else 0
    if missing := [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        return f"forkd lacks the capabilities {', '.join(missing)}"
    for table in ("/proc/self/uid_map", "/proc/self/gid_map"):
        spans = [line.split() for line in (host.read(table) or "").splitlines()]
        if not any(int(first) <= users[0] and users[-1] < int(first) + int(count) for first, _, count in spans):
            return "this user namespace does not have them"
    return None


def user_of(users: range, slot_id: str) -> int:
    """The user of a slot, by its id, which nobody else has: so nothing needs to be kept about who has which."""
    return users[zlib.crc32(slot_id.encode()) % len(users)]


def as_user(qemu: Sequence[str], user: int, version: str) -> list[str]:
    """QEMU that becomes ``user``, with a group of the same number, once it has opened all it needs.

    Its seccomp filter lets it: who is no longer root gains nothing by the calls it did that with.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    how = ["-run-with", f"user={user}:{user}"] if (major, minor) >= (9, 1) else ["-runas", f"{user}:{user}"]
    return [*(word.replace("elevateprivileges=deny", "elevateprivileges=allow") for word in qemu), *how]


def give_slot(directory: Path, user: int) -> None:
    """Let ``user`` work in a slot."""
    os.chown(directory, -1, user)
    os.chmod(directory, _SLOT_MODE)


def owner_of(directory: Path) -> int | None:
    """The user a slot was given to, if any: the slot itself remembers, across restarts of its owner."""
    status = os.stat(directory)
    return status.st_gid if status.st_gid and stat.S_IMODE(status.st_mode) & 0o777 == _SLOT_MODE else None


def let_read(path: Path) -> None:
    """Make a file readable for every user; the directories above it stay private, so who was not given it has none."""
    mode = os.stat(path).st_mode
    if mode & 0o444 != 0o444:
        os.chmod(path, stat.S_IMODE(mode) | 0o444)
