"""What forkd itself needs of a host, as rows of ``forkd doctor``; plugins add their own.

FAIL means that forkd cannot work here, WARN that something is slower, missing or refused, PASS and SKIP what they say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forkd.linux import cgroup
from forkd.linux.hostprobe import kvm_truth
from forkd.specs.hookspecs import Check
from forkd.specs.host import Host

GIB = 1 << 30
PLENTY, LITTLE = 5 * GIB, GIB
NAMESPACES = "/run/netns"
NAMESPACE_PREFIX = "forkd-"


@dataclass(frozen=True, slots=True)
class Place:
    """What the settings say: where data lives, and the kernel image given, if any."""

    data_dir: Path
    kernel: Path | None = None


def core_checks(host: Host, place: Place) -> Iterator[Check]:
    """All rows that do not belong to a plugin."""
    yield from _machine(host)
    yield from _limits(host)
    yield from _network(host)
    yield from _files(host, place)
    yield from _memory(host)
    yield from _tracing(host)
    yield _docker(host)


def _machine(host: Host) -> Iterator[Check]:
    version = host.read("/proc/version")
    if version is None:
        yield Check("platform", "FAIL", "/proc/version cannot be read", "forkd needs Linux with /proc mounted")
    else:
        yield Check("platform", "PASS", " ".join(version.split()[:3]))
    flags = re.search(r"^flags\s*:.*\b(vmx|svm)\b", host.read("/proc/cpuinfo") or "", re.MULTILINE)
    works, why = kvm_truth(host)
    software = "VMs run by software emulation: slower inside, forked just the same"
    if flags is not None:
        yield Check("hw virt", "PASS", f"{flags[1]} (the CPU supports virtualization)")
    else:
        yield Check("hw virt", "WARN", "the CPU shows neither vmx nor svm", f"turn it on in the firmware; {software}")
    if works:
        yield Check("kvm", "PASS", why)
    else:
        group = "join the kvm group: usermod -aG kvm $USER" if "denied" in why else software
        yield Check("kvm", "WARN", why, group)


def _limits(host: Host) -> Iterator[Check]:
    table = cgroup.homes(cgroup.hierarchies(host.read))
    missing = [name for name in cgroup.CONTROLLERS if name not in table]
    found = ", ".join(f"{name} (v{table[name].version})" for name in cgroup.CONTROLLERS if name in table)
    if missing:
        detail = f"no controller for {', '.join(missing)}" + (f"; there are: {found}" if found else "")
        yield Check("cgroup", "WARN", detail, "these limits are refused: mount cgroup2 at /sys/fs/cgroup")
    elif host.euid != 0:
        yield Check("cgroup", "WARN", f"{found}; not root", "limits need root, or a unit with Delegate=yes")
    else:
        yield Check("cgroup", "PASS", found)


def _network(host: Host) -> Iterator[Check]:
    if host.euid != 0:
        hint = "as root each child has a namespace with a default-deny firewall"
        for name in ("ip_forward", "tap device", "per-child netns", "nftables"):
            yield Check(name, "SKIP", "not root: networking is user-mode, inside the VMM", hint)
        return
    forward = host.read("/proc/sys/net/ipv4/ip_forward")
    fix = "forkd setup --host, or: sysctl -w net.ipv4.ip_forward=1"
    if forward == "1":
        yield Check("ip_forward", "PASS", "1 (forwarding enabled)")
    else:
        yield Check("ip_forward", "WARN", f"{forward}: children with networking reach nothing outside", fix)
    why = host.why_not_open("/dev/net/tun")
    if why is None:
        yield Check("tap device", "PASS", "/dev/net/tun opens; a tap is made for each child that wants one")
    else:
        yield Check("tap device", "WARN", f"/dev/net/tun: {why}", "modprobe tun")
    why = host.why_not("netns")
    if why is None:
        now = [name for name in host.names(NAMESPACES) or [] if name.startswith(NAMESPACE_PREFIX)]
        yield Check("per-child netns", "PASS", f"made for each child that wants one; {len(now)} now")
    else:
        yield Check("per-child netns", "WARN", f"namespaces cannot be made: {why}", "give forkd CAP_SYS_ADMIN")
    if host.which("nft") is None:
        yield Check("nftables", "WARN", "nft is not on PATH", "networking needs it: apt-get install nftables")
    else:
        yield Check("nftables", "PASS", (host.output(["nft", "--version"]) or "nft").strip())


def _files(host: Host, place: Place) -> Iterator[Check]:
    kernels = host.names(str(place.data_dir / "kernels")) or []
    if place.kernel is not None:
        there = host.read(str(place.kernel)) is not None
        hint = None if there else "unset FORKD_KERNEL, or point it at a kernel image"
        yield Check("kernel image", "PASS" if there else "FAIL", str(place.kernel), hint)
    elif kernels:
        yield Check("kernel image", "PASS", str(place.data_dir / "kernels"))
    else:
        yield Check("kernel image", "WARN", "no guest kernel yet", "forkd setup fetches it; so does the first image")
    snapshots = str(place.data_dir / "snapshots")
    names = host.names(snapshots)
    if names is None:
        yield Check("snapshot dir", "WARN", f"{snapshots} is not there yet", "the first snapshot makes it")
    else:
        count = sum(not name.startswith(".") for name in names)
        yield Check("snapshot dir", "PASS", f"{snapshots} ({count} snapshots)")
    yield _space(host, snapshots)
    why = host.why_not(f"reflink:{place.data_dir}")
    if why is None:
        yield Check("reflink", "PASS", "files can share blocks: memory images of chains cost no copy")
    else:
        yield Check("reflink", "WARN", f"{why}: images of chains are copied", "use btrfs or xfs for the data directory")


def _space(host: Host, path: str) -> Check:
    free = host.free_bytes(path)
    if free is None:
        return Check("snapshot dir space", "WARN", f"free space at {path} cannot be found out")
    detail = f"{free / GIB:.1f} GiB free at {path}"
    if free >= PLENTY:
        return Check("snapshot dir space", "PASS", detail)
    hint = "free some space, or set FORKD_DATA_DIR to a larger disk"
    return Check("snapshot dir space", "WARN" if free >= LITTLE else "FAIL", detail, hint)


def _memory(host: Host) -> Iterator[Check]:
    why = host.why_not("userfaultfd")
    if why is None:
        yield Check("uffd_wp", "PASS", "userfaultfd works")
    else:
        hint = "sysctl -w vm.unprivileged_userfaultfd=1"
        yield Check("uffd_wp", "WARN", f"userfaultfd: {why}; only wp-bench needs it", hint)
    yield _ksm(host)
    overcommit = host.read("/proc/sys/vm/overcommit_memory")
    if overcommit == "2":
        hint = "sysctl -w vm.overcommit_memory=0"
        yield Check("overcommit", "WARN", "2: each child counts with all its RAM, so few can be forked", hint)
    else:
        yield Check("overcommit", "PASS", f"{overcommit}: children count with what they use")


def _ksm(host: Host) -> Check:
    run, scan = host.read("/sys/kernel/mm/ksm/run"), host.read("/sys/kernel/mm/ksm/pages_to_scan")
    if run is None:
        return Check("ksm", "SKIP", "this kernel has none; children share memory without it")
    if run == "1" and scan not in (None, "0"):
        return Check("ksm", "PASS", f"on, {scan} pages a pass")
    return Check("ksm", "SKIP", "off; children share what they inherit without it")


def _tracing(host: Host) -> Iterator[Check]:
    why = host.why_not("ptrace")
    if why is not None:
        scope = host.read("/proc/sys/kernel/yama/ptrace_scope")
        hint = "sysctl -w kernel.yama.ptrace_scope=1" if scope in ("2", "3") else "allow ptrace (CAP_SYS_PTRACE)"
        yield Check("ptrace", "WARN", f"{why}: no live branch, no cloned children", hint)
        return
    yield Check("ptrace", "PASS", "our own machines can be traced")
    why = host.why_not("suspend_seccomp")
    if why is None:
        yield Check("live branch", "PASS", "a machine's seccomp filter can rest for the injected call")
    else:
        detail = f"a seccomp filter cannot be suspended ({why}): live branch needs machines without one"
        yield Check("live branch", "WARN", detail, "run forkd as root on a kernel with CHECKPOINT_RESTORE")


def _docker(host: Host) -> Check:
    if host.which("docker") is None:
        return Check("docker", "SKIP", "not there and not needed: images are built and pulled without it")
    if host.output(["docker", "info"]) is None:
        return Check("docker", "SKIP", "not reachable and not needed")
    return Check("docker", "PASS", "reachable (not needed)")
