"""Looks at a host: its files below a root directory, its programs, and system facilities tried for real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from forkd.linux import ptrace, sparse
from forkd.linux.arch import host_arch
from forkd.linux.userfaultfd import UserFaultFd

MAX_READ = 1 << 20
PROGRAM_TIMEOUT = 5.0
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Attempt = Callable[[], str | None]


class HostProbe:
    """The machine below ``root``; ``abilities`` (name to what ``why_not`` answers) stand in for real attempts."""

    def __init__(
        self, root: Path = Path("/"), *, euid: int | None = None, abilities: Mapping[str, str | None] | None = None
    ) -> None:
        self._root = root
        self._real = root == Path("/")
        self.euid = os.geteuid() if euid is None else euid
        self._abilities = abilities

    def read(self, path: str) -> str | None:
        """A small text file's content."""
        try:
            with open(self._at(path), encoding="utf-8", errors="replace") as source:
                return source.read(MAX_READ).strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str] | None:
        """A directory's entries."""
        try:
            return sorted(os.listdir(self._at(path)))
        except OSError:
            return None

    def why_not_open(self, path: str) -> str | None:
        """Whether a device opens."""
        try:
            os.close(os.open(self._at(path), os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return os.strerror(error.errno or 0)
        return None

    def which(self, program: str) -> str | None:
        """Where a program is."""
        places = (os.environ.get("PATH", "") + ":" if self._real else "") + SEARCH
        path = os.pathsep.join(str(self._at(place)) for place in places.split(":") if place)
        return shutil.which(program, path=path)

    def output(self, command: Sequence[str]) -> str | None:
        """What a program prints."""
        binary = self.which(command[0])
        if binary is None:
            return None
        try:
            done = subprocess.run(
                [binary, *command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROGRAM_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def free_bytes(self, path: str) -> int | None:
        """Space left where ``path`` is, or would be."""
        place = self._at(path)
        while not place.exists():
            if place == place.parent:
                return None
            place = place.parent
        return sparse.disk_free(place)

    def why_not(self, ability: str) -> str | None:
        """Try it."""
        if self._abilities is not None:
            return self._abilities.get(ability.partition(":")[0], "not known on this machine")
        name, _, argument = ability.partition(":")
        attempts: dict[str, Attempt] = {
            "userfaultfd": _userfaultfd,
            "memfd": _memfd,
            "ptrace": lambda: _ptrace(0),
            "suspend_seccomp": lambda: _ptrace(ptrace.SUSPEND_SECCOMP),
            "netns": _netns,
            "reflink": lambda: _reflink(Path(argument)),
        }
        try:
            return attempts[name]()
        except OSError as error:
            return error.strerror or str(error)

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


class Looks(Protocol):
    """The part of a host that tells whether KVM works."""

    def read(self, path: str) -> str | None: ...

    def why_not_open(self, path: str) -> str | None: ...


def kvm_truth(host: Looks) -> tuple[bool, str]:
    """Whether KVM can run an ordinary guest here, and why (not): the device alone proves nothing."""
    if (why := host.why_not_open("/dev/kvm")) is not None:
        return False, f"/dev/kvm cannot be opened ({why})"
    if re.search(r"^flags\s*:.*\b(vmx|svm)\b", host.read("/proc/cpuinfo") or "", re.MULTILINE):
        return True, "/dev/kvm opens and the CPU has vmx or svm"
    return False, "/dev/kvm opens, but the CPU shows neither vmx nor svm, so an ordinary guest would hang"


def _userfaultfd() -> str | None:
    UserFaultFd().close()
    return None


def _memfd() -> str | None:
    os.close(os.memfd_create("forkd-doctor", os.MFD_CLOEXEC))
    return None


def _ptrace(options: int) -> str | None:
    """Seize a process of our own, as live branch and templates do."""
    victim = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        ptrace.Tracee(victim.pid, host_arch(), ptrace.Tracees()).seize(options)
        return None
    except ptrace.TraceError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    finally:
        victim.kill()
        victim.wait()


def _netns() -> str | None:
    done = subprocess.run(["unshare", "--net", "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()[:200] or "refused"


def _reflink(directory: Path) -> str | None:
    while not directory.exists():
        directory = directory.parent
    with tempfile.TemporaryDirectory(dir=directory, prefix=".doctor-") as folder:
        source = Path(folder, "a")
        source.write_bytes(b"x" * 4096)
        if sparse.clone_file(source, Path(folder, "b")):
            return None
    return "the file system cannot share blocks between files"
