"""The network of sandboxes: a namespace each, with a tap for its guest, a default-deny filter and a resolver.

Every guest has the same address, each in a namespace of its own; what differs is the link from that namespace to the
host, two addresses of the pool. ``ip_forward`` of the host is needed and never changed here (``forkd setup --host``).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from forkd.linux import netns
from forkd.linux.netns import NetworkError
from forkd.network_dns import Resolver
from forkd.network_rules import (
    GATEWAY,
    GATEWAY_MAC,
    GUEST,
    HOST_RULES,
    HOST_TABLE,
    LINK_PREFIX,
    PREFIX_LENGTH,
    TAP,
    UPLINK,
    child_rules,
)
from forkd.specs.engine import Slot
from forkd.specs.errors import BadInput, CapabilityMissing, HostNotReady
from forkd.specs.models import SandboxInfo

MODES = ("none", "nat", "allowlist")
POOL = ipaddress.ip_network("10.201.0.0/16")
RECORD = "network.json"
LOCK = Path("/run/forkd-network.lock")
MAX_ALLOW = 256
IFF_TAP = 2
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}")
HOST_TAP_NETWORK: dict[str, object] = {"address": GUEST, "prefix": PREFIX_LENGTH, "gateway": GATEWAY, "dns": GATEWAY}
"""What a parent is told whose device leads to a tap of the host: what is behind it is the host's business."""
_DOMAIN = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


@dataclass(frozen=True, slots=True)
class AllowList:
    """What a guest may reach: networks, and names (``*.example.com`` has all below, not ``example.com`` itself)."""

    networks: tuple[ipaddress.IPv4Network, ...]
    domains: tuple[str, ...]

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowList:
        """Addresses, CIDRs and domains. Raises BadInput for anything else."""
        networks, domains = [], []
        for entry in entries:
            try:
                networks.append(ipaddress.IPv4Network(entry, strict=False))
                continue
            except ValueError:
                pass  # no address: a name, or nothing at all
            if ":" in entry:
                raise BadInput(f"allow has {entry[:80]!r}", hint="guests have IPv4 only")
            name = entry.rstrip(".").lower()
            if len(name) > 253 or not _DOMAIN.fullmatch(name) or name.replace(".", "").isdigit():
                raise BadInput(
                    f"allow has {entry[:80]!r}, which is neither an address, a network nor a name",
                    hint="for example 203.0.113.7, 198.51.100.0/24, pypi.org, *.pythonhosted.org",
                )
            domains.append(name)
        if len(networks) + len(domains) > MAX_ALLOW:
            raise BadInput(f"allow has more than {MAX_ALLOW} entries")
        return cls(tuple(ipaddress.collapse_addresses(networks)), tuple(domains))


def check_network(mode: str, allow: Sequence[str], *, has_device: bool, root: bool, user_mode: bool) -> list[str]:
    """Raise for a network that cannot be had; what the user should know about the one there will be."""
    if mode not in MODES:
        raise BadInput(f"network is {mode[:40]!r}", hint=f"use {', '.join(MODES)}")
    if allow and mode != "allowlist":
        raise BadInput("allow needs network allowlist")
    AllowList.parse(allow)
    if mode == "none":
        return []
    if not has_device:
        raise CapabilityMissing(
            "the snapshot was made without a network device", hint="build it again: forkd from-image"
        )
    if root:
        return []
    if mode == "allowlist":
        raise CapabilityMissing("an allow-list needs root: user-mode networking cannot filter", hint="use nat or none")
    if not user_mode:
        raise CapabilityMissing(
            "this engine has no user-mode networking, and without root there is no other",
            hint="run forkd as root, use network none, or a snapshot made with the engine qemu",
        )
    return [
        "user-mode networking: the guest can reach services on this host's loopback and link-local addresses"
        " (metadata of clouds); as root it cannot"
    ]


def check_host_tap(name: str) -> str:
    """The name of a tap device that exists on this host, or BadInput."""
    try:
        flags = int((Path("/sys/class/net") / name / "tun_flags").read_text(), 16) if _DEVICE.fullmatch(name) else 0
    except OSError:
        flags = 0
    if not flags & IFF_TAP:
        raise BadInput(
            f"there is no tap device {name[:40]!r} on this host",
            hint="make it (ip tuntap add NAME mode tap), or do without: children have --network nat",
        )
    return name


class Networks:
    """The namespaces of one owner's machines."""

    def __init__(self, *, root: bool) -> None:
        self.root = root
        self._resolvers: dict[str, Resolver] = {}

    async def attach(
        self, slot: Slot, info: SandboxInfo, nursery: trio.Nursery, *, upstream: str, tap: bool = False
    ) -> Slot:
        """Give a slot the network its sandbox is described with; one that is there already (a restart) is kept.

        With ``tap`` there is one even without networking: it leads nowhere, but the machine needs it.
        Raises HostNotReady; giving the slot back removes what there is.
        """
        if not self.root:
            user = info.network != "none"
            info.guest_addr = GUEST if user else ""
            return dataclasses.replace(slot, user_network=user)
        if info.network == "none" and not info.per_child_netns and not tap:
            return slot
        name = f"forkd-{slot.id}"
        try:
            await trio.to_thread.run_sync(_make, slot.directory, name, info, tap)
            if info.network != "none":
                resolver = Resolver(name, info.network, AllowList.parse(info.allow).domains, upstream)
                await nursery.start(resolver.serve)
                self._resolvers[slot.id] = resolver
        except (NetworkError, OSError) as error:
            self.close(slot.id)
            raise HostNotReady(f"the network of {slot.id} cannot be made: {error}", hint="see forkd doctor") from error
        info.netns = name
        info.guest_addr = GUEST if info.network != "none" else ""
        return dataclasses.replace(
            slot, netns=str(netns.path_of(name)), tap=TAP if tap or info.network != "none" else None
        )

    def close(self, slot_id: str) -> None:
        """Stop answering for a slot, so that its namespace can go."""
        if (resolver := self._resolvers.pop(slot_id, None)) is not None:
            resolver.close()


def guest_network(info: SandboxInfo) -> dict[str, object] | None:
    """What the agent is told about its network at resume."""
    if info.network == "none":
        return None
    dns = GATEWAY if info.netns else "10.42.0.3"
    return {"address": GUEST, "prefix": PREFIX_LENGTH, "gateway": GATEWAY, "dns": dns}


def _make(directory: Path, name: str, info: SandboxInfo, tap: bool) -> None:
    record = directory / RECORD
    if record.exists() and netns.exists(name):
        return  # made before a restart
    if info.network != "none":
        _check_host()
    # Written before anything is made, so that whatever kills us leaves a trace of what to remove.
    _write_record(record, name, None)
    netns.ip([f"netns add {name}"])
    if info.network == "none":
        lines = ["link set lo up", *(_tap_lines() if tap else ())]
        netns.within(name, lambda: netns.ip(lines))
        return
    with netns.exclusively(LOCK):
        index = _free_index()
        link = f"{LINK_PREFIX}{index}"
        _write_record(record, name, link)
        ours, theirs = POOL[2 * index], POOL[2 * index + 1]
        netns.ip(
            [
                f"link add {link} type veth peer name {UPLINK} netns {name}",
                f"addr add {ours}/31 dev {link}",
                f"link set {link} up",
            ]
        )
        netns.nft(HOST_RULES.format(pool=POOL))
    rules = child_rules(info.network, [str(network) for network in AllowList.parse(info.allow).networks], str(POOL))

    def inside() -> None:
        netns.forward_packets()
        netns.nft(rules)  # before anything can pass
        netns.ip(
            [
                "link set lo up",
                *_tap_lines(),
                f"addr add {GATEWAY}/{PREFIX_LENGTH} dev {TAP}",
                f"addr add {theirs}/31 dev {UPLINK}",
                f"link set {UPLINK} up",
                f"route add default via {ours}",
            ]
        )

    netns.within(name, inside)


def _write_record(record: Path, name: str, link: str | None) -> None:
    """Replace it as a whole: half of one would tell nobody what to remove."""
    staged = record.with_suffix(".tmp")
    staged.write_text(json.dumps({"namespace": name, "link": link}))
    staged.replace(record)


def _tap_lines() -> list[str]:
    return [f"tuntap add dev {TAP} mode tap", f"link set {TAP} address {GATEWAY_MAC}", f"link set {TAP} up"]


def remove_network(directory: Path) -> bool:
    """Remove the network a slot directory tells of; the last takes the host's rules along. True if there was one."""
    record = directory / RECORD
    try:
        known = json.loads(record.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    name = known["namespace"]
    if known["link"] is not None:
        with netns.exclusively(LOCK):
            # By its other end: on the host a name that was never taken, or was given back, may be another's by now.
            if netns.exists(name) and UPLINK in netns.within(name, lambda: netns.links(UPLINK)):
                netns.within(name, lambda: netns.ip([f"link del {UPLINK}"]))
            if not netns.links(LINK_PREFIX):
                netns.nft(f"table inet {HOST_TABLE} {{}}\ndelete table inet {HOST_TABLE}\n")
    if netns.exists(name):
        netns.ip([f"netns del {name}"])
    record.unlink(missing_ok=True)
    return True


def _free_index() -> int:
    taken = set(netns.links(LINK_PREFIX))
    index = next(i for i in range(len(taken) + 1) if f"{LINK_PREFIX}{i}" not in taken)
    if 2 * index + 1 >= POOL.num_addresses:
        raise NetworkError(f"all {POOL.num_addresses // 2} links of the pool {POOL} are in use")
    return index


def _check_host() -> None:
    if Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() != "1":
        raise HostNotReady("the host does not forward packets", hint="forkd setup --host, once, as root")
    for program in ("ip", "nft"):
        if shutil.which(program) is None:
            raise HostNotReady(f"{program} is not on PATH", hint="apt-get install iproute2 nftables")


def system_resolver(path: Path = Path("/etc/resolv.conf")) -> str:
    """The host's first IPv4 nameserver, or its own loopback."""
    try:
        text = path.read_text()
    except OSError:
        return "127.0.0.1"
    for address in re.findall(r"^nameserver\s+(\S+)", text, re.MULTILINE):
        try:
            socket.inet_aton(address)
            return str(address)
        except OSError:
            continue  # IPv6
    return "127.0.0.1"
