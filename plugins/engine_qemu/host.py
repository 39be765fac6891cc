"""What QEMU and this host can do: version, accelerator truth, the TSC's rate. Remembered on disk while it holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from forkd.linux.hostprobe import HostProbe, kvm_truth
from forkd.linux.tsc import measure_tsc_khz
from forkd.plugins.engine_qemu.command import SANDBOX
from forkd.plugins.engine_qemu.user import USERS, why_not
from forkd.specs.errors import BadInput, ToolMissing
from forkd.specs.hookspecs import Check
from forkd.specs.host import Host

BINARY = "qemu-system-x86_64"
MINIMUM = (7, 2)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that cost tens of milliseconds to find out, keyed by what would change them."""

    key: str
    version: str
    tsc_khz: int
    sandbox: bool


def find_qemu() -> str:
    """The QEMU binary's path; raises ToolMissing with the package to install."""
    path = shutil.which(BINARY)
    if path is None:
        raise ToolMissing(f"{BINARY} is not on PATH", hint="install it: apt-get install qemu-system-x86")
    return path


def pick_accelerator(wanted: str) -> tuple[str, str]:
    """``(accelerator, why)`` for the setting ``auto``, ``kvm`` or ``tcg``."""
    if wanted == "auto":
        works, why = kvm_truth(HostProbe())
        return ("kvm" if works else "tcg"), why
    if wanted in ("kvm", "tcg"):
        return wanted, "the setting says so"
    raise BadInput(f"accelerator {wanted!r} is not known", hint="use auto, kvm or tcg")


def gather(binary: str, cache_dir: Path) -> HostFacts:
    """Version and TSC rate, from the cache unless the binary or the boot changed."""
    status = os.stat(binary)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    key = f"{binary}:{status.st_mtime_ns}:{status.st_size}:{boot}"
    cache = cache_dir / "qemu.json"
    try:
        facts = HostFacts(**json.loads(cache.read_text()))
        if facts.key == key:
            return facts
    except (OSError, ValueError, TypeError):
        pass  # absent or of another shape: found out again below
    facts = HostFacts(key, _version(binary), measure_tsc_khz(), _can_sandbox(binary))
    cache_dir.mkdir(parents=True, exist_ok=True)
    staged = cache.with_suffix(f".{os.getpid()}")
    staged.write_text(json.dumps(asdict(facts)))
    staged.replace(cache)
    return facts


def _can_sandbox(binary: str) -> bool:
    """Whether this QEMU starts under its own seccomp filters: some are built without."""
    command = [binary, "-M", "none", "-nodefaults", "-display", "none", "-monitor", "stdio", *SANDBOX]
    done = subprocess.run(command, input=b"quit\n", capture_output=True, timeout=30)
    return done.returncode == 0


def _version(binary: str) -> str:
    out = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return read_version(binary, out)


def read_version(binary: str, out: str) -> str:
    """The version in what ``--version`` printed; raises ToolMissing if it is none, or too old."""
    match = re.search(r"version (\d+\.\d+\.\d+)", out)
    if match is None:
        raise ToolMissing(f"{binary} --version says {out[:80]!r}, which is not understood")
    version = match[1]
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM:
        raise ToolMissing(f"{binary} is version {version}", hint="QEMU 7.2 or newer is needed")
    return version


def doctor_checks(host: Host) -> Iterable[Check]:
    """Rows for ``forkd doctor``."""
    yield _user_check(host)
    path = host.which(BINARY)
    if path is None:
        yield Check("qemu", "FAIL", f"{BINARY} is not on PATH", "apt-get install qemu-system-x86")
        return
    try:
        yield Check("qemu", "PASS", f"{path} {read_version(path, host.output([BINARY, '--version']) or '')}")
    except ToolMissing as error:
        yield Check("qemu", "FAIL", error.message, error.hint or "reinstall it: apt-get install qemu-system-x86")


def _user_check(host: Host) -> Check:
    why = why_not(USERS, host)
    if why is None:
        return Check("vmm user", "PASS", "each QEMU of a root daemon runs as a user of its own")
    if host.euid != 0:
        return Check("vmm user", "SKIP", f"QEMU runs as the user forkd runs as: {why}")
    return Check("vmm user", "WARN", f"QEMU runs as root: {why}", "give forkd the capabilities, or set FORKD_VMM_USERS")
