"""Is there a Firecracker, which version, and may it use KVM?"""

from __future__ import annotations

import re
from collections.abc import Iterable

from forkd.linux.hostprobe import kvm_truth
from forkd.specs.errors import HostNotReady, ToolMissing
from forkd.specs.hookspecs import Check
from forkd.specs.host import Host

BINARY = "firecracker"
JAILER = "jailer"
MINIMUM = (1, 10)
OLDEST = (1, 5)
GET_IT = "https://github.com/firecracker-microvm/firecracker/releases"


def read_version(out: str) -> tuple[int, int, int] | None:
    """The version in what ``--version`` printed."""
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", out)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def find(host: Host) -> tuple[str, str]:
    """``(path, version)`` of a Firecracker that will do. Raises ToolMissing, HostNotReady."""
    path = host.which(BINARY)
    if path is None:
        raise ToolMissing(f"{BINARY} is not on PATH", hint=f"get it at {GET_IT}, or use engine qemu")
    version = read_version(host.output([BINARY, "--version"]) or "")
    if version is None or version[:2] < MINIMUM:
        shown = ".".join(map(str, version)) if version else "not to be found out"
        raise ToolMissing(f"{path} is version {shown}", hint="Firecracker 1.10 or newer is needed")
    works, why = kvm_truth(host)
    if not works:
        raise HostNotReady(f"Firecracker needs KVM: {why}", hint="use engine qemu, which can do without")
    return path, ".".join(map(str, version))


def why_not(host: Host) -> str | None:
    """Why this engine cannot be used here, if it cannot."""
    try:
        find(host)
    except HostNotReady as error:
        return error.message
    return None


def doctor_checks(host: Host) -> Iterable[Check]:
    """Rows for ``forkd doctor``: Firecracker is one of two engines, so its absence stops nobody."""
    path = host.which(BINARY)
    if path is None:
        yield Check("firecracker", "SKIP", "not on PATH; QEMU is used", f"get it at {GET_IT}")
        yield Check("firecracker version", "SKIP", "no binary")
        return
    yield Check("firecracker", "PASS", path)
    version = read_version(host.output([BINARY, "--version"]) or "")
    if version is None:
        yield Check("firecracker version", "WARN", f"{path} --version is not understood", f"reinstall it: {GET_IT}")
        return
    shown = ".".join(map(str, version))
    if version[:2] >= MINIMUM:
        yield Check("firecracker version", "PASS", f"v{shown}")
    else:
        status = "WARN" if version[:2] >= OLDEST else "FAIL"
        yield Check("firecracker version", status, f"v{shown}", f"1.10 or newer is needed: {GET_IT}")
