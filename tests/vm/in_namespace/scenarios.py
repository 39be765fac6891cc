"""What networked children can and cannot reach. Run by test_network.py, inside a namespace that plays the host.

The world outside is a second namespace: 198.51.100.10 is the server on the allow-list by address, .20 the one by name
(allowed.test), .30 one that nobody allowed; .53 answers for all names; 169.254.169.254 is a metadata service.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import trio

from forkd.linux import netns
from forkd.network_dns import CLASS_IN, TYPE_A, parse_question
from forkd.network_rules import GATEWAY, GATEWAY_MAC, GUEST, TAP
from forkd.plugins.engine_qemu.command import MAC
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError
from forkd.slots import SlotOwner
from forkd.specs.models import SandboxInfo

WORLD = "forkd-test-world"
SERVERS = ("198.51.100.10", "198.51.100.20", "198.51.100.30", "169.254.169.254")
NAMES = {"allowed.test": "198.51.100.20", "other.test": "198.51.100.30", "deep.below.test": "198.51.100.30"}
PARENT = "t-networked"
BLOCKED = {"OSError", "TimeoutError"}
"""Refused by a filter; ConnectionRefusedError would mean that somebody was reached."""
REACH = textwrap.dedent(
    """
    import socket
    from concurrent.futures import ThreadPoolExecutor
    def many(*hosts):
        with ThreadPoolExecutor(len(hosts)) as pool:
            return sorted(set(pool.map(reach, hosts)))
    def reach(host, port=80):
        try:
            with socket.create_connection((host, port), 5) as s:
                s.settimeout(5)
                return s.recv(64).decode()
        except OSError as error:
            return type(error).__name__
    """
)


def serve_tcp(address: str) -> None:
    listener = socket.create_server((address, 80))

    def run() -> None:
        while True:
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(f"{address} saw {peer[0]}".encode())

    threading.Thread(target=run, daemon=True).start()


def serve_dns(address: str) -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, 53))

    def run() -> None:
        while True:
            message, peer = sock.recvfrom(4096)
            question = parse_question(message)
            found = NAMES.get(question.name)
            header = message[:2] + bytes([0x81, 0x80 if found else 0x83, 0, 1, 0, 1 if found else 0, 0, 0, 0, 0])
            record = b""
            if found:
                record = b"\xc0\x0c" + bytes([0, TYPE_A, 0, CLASS_IN, 0, 0, 0, 60, 0, 4]) + socket.inet_aton(found)
            sock.sendto(header + question.raw + record, peer)

    threading.Thread(target=run, daemon=True).start()


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """Forwarding on, a way out, and the world behind it."""
    assert netns.links("eth") == [], "this must run in a namespace of its own"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=False)
    Path("/run/netns").mkdir(exist_ok=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    netns.ip(
        [
            "link set lo up",
            f"netns add {WORLD}",
            f"link add wan type veth peer name wan netns {WORLD}",
            "addr add 198.51.100.1/24 dev wan",
            "link set wan up",
            "route add 169.254.0.0/16 dev wan",
        ]
    )

    def inside() -> None:
        addresses = [f"addr add {address}/24 dev wan" for address in (*SERVERS[:3], "198.51.100.53")]
        netns.ip(["link set lo up", *addresses, "addr add 169.254.169.254/32 dev wan", "link set wan up"])
        for address in SERVERS:
            serve_tcp(address)
        serve_dns("198.51.100.53")

    netns.within(WORLD, inside)
    serve_tcp("198.51.100.1")  # a service of the host itself
    yield


@pytest.fixture(autouse=True)
def dns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are asked of the world."""
    monkeypatch.setenv("FORKD_DNS", "198.51.100.53")


@pytest.fixture
async def parent(controller: AsyncController) -> str:
    """A parent with a network device, made once and kept with the other test data."""
    if PARENT not in {row["tag"] for row in await controller.list_snapshots()}:
        known = await controller.get_snapshot("python-numpy")
        await controller.create_snapshot(PARENT, image=known["image"], extras=["python3-numpy"], mem_size_mib=192)
    return PARENT


async def value(controller: AsyncController, sandbox: dict[str, Any], code: str) -> Any:
    import ast

    answer = await controller.eval_code(sandbox["id"], REACH + code, 120)
    assert answer["error"] is None, answer
    return ast.literal_eval(answer["result"])


def leftovers() -> list[str]:
    names = [name for name in os.listdir("/run/netns") if name != WORLD]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [*names, *netns.links("fkd"), *filter(None, tables)]


async def test_an_allowlist_lets_through_what_it_names_and_nothing_else(
    controller: AsyncController, parent: str
) -> None:
    allow = ["198.51.100.10", "allowed.test", "*.below.test"]
    one, two = await controller.spawn_sandboxes(parent, 2, network="allowlist", allow=allow)
    assert one["netns"] == f"forkd-{one['id']}" and one["guest_addr"] == "10.42.0.2"
    assert (await value(controller, one, "reach('198.51.100.10')")).startswith("198.51.100.10 saw 198.51.100.1")
    # by address it is closed until its name has been asked for
    assert set(await value(controller, one, "many('198.51.100.20', '198.51.100.30')")) <= BLOCKED
    assert (await value(controller, one, "reach('allowed.test')")).startswith("198.51.100.20 saw")
    assert (await value(controller, one, "reach('198.51.100.20')")).startswith("198.51.100.20 saw")
    assert await value(controller, two, "reach('198.51.100.20')") in BLOCKED, "a sibling's lookup opens nothing"
    assert (await value(controller, two, "reach('deep.below.test')")).startswith("198.51.100.30 saw")
    assert await value(controller, one, "many('other.test', 'below.test', 'nowhere.test')") == ["gaierror"]
    blocked = ("169.254.169.254", "198.51.100.1", "10.201.0.0", "10.201.0.1", "10.201.0.3", "10.42.0.1")
    assert set(await value(controller, one, f"many{blocked}")) <= BLOCKED
    await controller.kill_sandbox(one["id"])
    await controller.kill_sandbox(two["id"])
    assert leftovers() == []


async def test_nat_reaches_the_world_but_neither_the_host_nor_siblings_nor_metadata(
    controller: AsyncController, parent: str
) -> None:
    one, two = await controller.spawn_sandboxes(parent, 2, network="nat")
    assert (await value(controller, one, "reach('other.test')")).startswith("198.51.100.30 saw 198.51.100.1")
    assert await value(controller, one, "reach('nowhere.test')") == "gaierror"
    listen = "import socket; keep = socket.create_server(('0.0.0.0', 80)); 1"
    await value(controller, two, listen)
    blocked = ("198.51.100.1", "169.254.169.254", "10.201.0.1", "10.201.0.3", "10.201.0.2", "10.42.0.1")
    assert set(await value(controller, one, f"many{blocked}")) <= BLOCKED
    await controller.kill_sandbox(one["id"])
    await controller.kill_sandbox(two["id"])
    assert leftovers() == []


async def test_a_daemons_machine_has_its_network_although_it_is_no_longer_root(
    controller: AsyncController, parent: str, daemon: Any
) -> None:
    async with AsyncController(daemon.url, timeout=120) as served:
        (one,) = await served.spawn_sandboxes(parent, 1, network="allowlist", allow=["198.51.100.10"])
        assert "\nUid:\t0" not in (status := Path(f"/proc/{one['pid']}/status").read_text())
        assert "\nCapEff:\t0000000000000000\n" in status
        assert (await value(served, one, "reach('198.51.100.10')")).startswith("198.51.100.10 saw 198.51.100.1")
        assert await value(served, one, "reach('198.51.100.20')") in BLOCKED
        await served.kill_sandbox(one["id"])
    assert leftovers() == []


async def test_without_networking_there_is_no_way_out_and_nothing_is_made(
    controller: AsyncController, parent: str
) -> None:
    (plain,) = await controller.spawn_sandboxes(parent, 1)
    assert plain["netns"] is None
    assert await value(controller, plain, "reach('198.51.100.10')") == "OSError"
    assert leftovers() == []
    (own,) = await controller.spawn_sandboxes(parent, 1, per_child_netns=True)
    assert leftovers() == [own["netns"]]
    assert os.readlink(f"/proc/{own['pid']}/ns/net") != os.readlink("/proc/self/ns/net")
    assert await value(controller, own, "reach('198.51.100.10')") == "OSError"


async def test_a_branch_of_a_networked_child_is_networked_as_its_fork_says(
    controller: AsyncController, parent: str
) -> None:
    (source,) = await controller.spawn_sandboxes(parent, 1, network="nat")
    assert "saw" in await value(controller, source, "reach('198.51.100.30')")
    made = await controller.branch_sandbox(source["id"], mode="live")
    try:
        (silent,) = await controller.spawn_sandboxes(made["tag"], 1)
        (some,) = await controller.spawn_sandboxes(made["tag"], 1, network="allowlist", allow=["198.51.100.10"])
        assert await value(controller, silent, "reach('198.51.100.10')") in BLOCKED
        assert "saw" in await value(controller, some, "reach('198.51.100.10')")
        assert await value(controller, some, "reach('198.51.100.30')") in BLOCKED
        assert "saw" in await value(controller, source, "reach('198.51.100.30')")
        for child in (silent, some):
            await controller.kill_sandbox(child["id"])
    finally:
        await controller.delete_snapshot(made["tag"], force=True)


async def test_what_a_killed_process_left_is_found_and_removed(controller: AsyncController, parent: str) -> None:
    code = (
        "import subprocess, sys, os\n"
        "os.execvp(sys.executable, [sys.executable, '-m', 'forkd', 'fork', '--tag', sys.argv[1], '-n', '1',"
        " '--network', 'nat', '--settle-secs', '600'])"
    )
    victim = await trio.lowlevel.open_process([sys.executable, "-c", code, parent], stdout=subprocess.DEVNULL)
    with trio.fail_after(120):
        while not any(name.startswith("forkd-sb") for name in os.listdir("/run/netns")):
            assert victim.poll() is None
            await trio.sleep(0.05)
    victim.kill()
    await victim.wait()
    assert leftovers() != []
    await controller.cleanup(remove=True)
    assert leftovers() == []


async def test_refusals_say_what_to_do(
    controller: AsyncController, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(**fields: Any) -> str:
        with pytest.raises(ControllerError) as caught:
            await controller.spawn_sandboxes(parent, 1, **fields)
        return str(caught.value)

    assert "network is 'bridge'" in await refused(network="bridge")
    assert "neither an address" in await refused(network="allowlist", allow=["not a name"])
    assert "allow needs network allowlist" in await refused(network="nat", allow=["a.test"])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
    try:
        assert "does not forward" in await refused(network="nat")
    finally:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    assert leftovers() == []


async def test_without_root_the_vmm_is_the_network_and_says_what_that_means(data_dir: Path, parent: str) -> None:
    from forkd.config import load_settings
    from forkd.ops.fork import ForkOptions, fork
    from forkd.runtime import open_runtime
    from forkd.specs.errors import CapabilityMissing

    async with open_runtime(load_settings(data_dir=data_dir)) as runtime:
        runtime.slots.networks.root = False
        (child,) = await fork(runtime, parent, 1, ForkOptions(network="nat"))
        assert child.sandbox is not None, child.error
        assert "loopback" in child.sandbox.info.warnings[0]
        answer = await child.sandbox.link.eval(REACH + "reach('198.51.100.10')", timeout=60)
        assert answer.result is not None and "198.51.100.10 saw 198.51.100.1" in answer.result, answer
        with pytest.raises(CapabilityMissing, match="allow-list needs root"):
            await fork(runtime, parent, 1, ForkOptions(network="allowlist", allow=("a.test",)))
    assert leftovers() == []


async def test_a_guest_that_opens_flows_without_end_fills_no_table_of_the_host(tmp_path: Path) -> None:
    from forkd.network_rules import MAX_FLOWS

    count = Path("/proc/sys/net/netfilter/nf_conntrack_count")
    owner = SlotOwner(tmp_path)
    async with trio.open_nursery() as nursery:
        slot = owner.take("sb-flood")
        info = SandboxInfo(id=slot.id, snapshot_tag="", created_at_unix=0, network="nat")
        slot = await owner.attach(slot, info, nursery, "198.51.100.53")
        before = int(count.read_text())

        def flood() -> None:
            with tap() as frames:
                for port in range(MAX_FLOWS + 2000):
                    frames.write(datagram("198.51.100.30", 1024 + port))

        await trio.to_thread.run_sync(netns.within, f"forkd-{slot.id}", flood)
        assert MAX_FLOWS // 2 < int(count.read_text()) - before <= MAX_FLOWS + 100
        await owner.release(slot)
    assert leftovers() == []
    owner.close()


async def test_a_guest_that_forges_its_address_has_nothing_answered_to_anybody_else(tmp_path: Path) -> None:
    allowed, victim, upstream = "198.51.100.10", "198.51.100.30", "198.51.100.53"
    owner = SlotOwner(tmp_path)
    async with trio.open_nursery() as nursery:
        slot = owner.take("sb-forger")
        allow = [allowed, "allowed.test"]
        info = SandboxInfo(id=slot.id, snapshot_tag="", created_at_unix=0, network="allowlist", allow=allow)
        slot = await owner.attach(slot, info, nursery, upstream)

        def forge() -> None:
            with tap() as frames:
                frames.write(datagram(GATEWAY, 53, victim, question("secret")))  # the resolver would answer it
                frames.write(datagram(GATEWAY, 80, victim, b"secret"))  # a refusal would quote it
                frames.write(datagram(victim, 80, victim, b"secret"))
                frames.write(datagram(allowed, 80, victim, b"secret"))
                frames.write(datagram(GATEWAY, 53, GUEST, question("allowed")))  # honest, and last: we ask upstream

        packets = trio.socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))  # ETH_P_ALL
        await packets.bind(("wan", 0x0003))
        with packets, trio.fail_after(20):
            await trio.to_thread.run_sync(netns.within, f"forkd-{slot.id}", forge)
            seen: list[str] = []
            while upstream not in seen:
                seen.append(socket.inet_ntoa((await packets.recv(2048))[16:20].ljust(4, b"\0")))
        assert victim not in seen and allowed not in seen
        await owner.release(slot)
    assert leftovers() == []
    owner.close()


async def test_a_slot_whose_link_was_never_made_takes_nobody_elses(tmp_path: Path) -> None:
    owner = SlotOwner(tmp_path)
    async with trio.open_nursery() as nursery:
        slot = owner.take("sb-lives")
        info = SandboxInfo(id=slot.id, snapshot_tag="", created_at_unix=0, network="nat")
        slot = await owner.attach(slot, info, nursery, "198.51.100.53")
        (link,) = netns.links("fkd")
        half = owner.take("sb-half")  # of a process killed before it made the link that another has taken since
        netns.ip([f"netns add forkd-{half.id}"])
        (half.directory / "network.json").write_text(json.dumps({"namespace": f"forkd-{half.id}", "link": link}))
        await owner.release(half)
        assert netns.links("fkd") == [link] and not netns.exists(f"forkd-{half.id}")
        await owner.release(slot)
    assert leftovers() == []
    owner.close()


@contextmanager
def tap() -> Iterator[IO[bytes]]:
    """The end of this namespace's tap that a machine would have."""
    with open("/dev/net/tun", "r+b", buffering=0) as device:
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", TAP.encode(), 0x1002))  # TUNSETIFF, IFF_TAP | IFF_NO_PI
        yield device


def datagram(target: str, port: int, source: str = GUEST, payload: bytes = b"") -> bytes:
    """A frame from the guest, with a UDP datagram (no checksum)."""
    udp = struct.pack(">HHHH", 40000, port, 8 + len(payload), 0) + payload
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    head = struct.pack(">BBHHHBBH8s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, addresses)
    total = sum(struct.unpack(">10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    head = head[:10] + struct.pack(">H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + head[12:]
    return bytes.fromhex((GATEWAY_MAC + MAC).replace(":", "")) + b"\x08\x00" + head + udp


def question(name: str) -> bytes:
    """A resolver is asked for an address of ``name``.test."""
    head = struct.pack(">6H", 0x1234, 0x0100, 1, 0, 0, 0)
    return head + bytes([len(name)]) + name.encode() + b"\x04test\0\0\x01\0\x01"


@pytest.mark.slow
async def test_three_hundred_namespaces_come_and_go(tmp_path: Path) -> None:
    owner = SlotOwner(tmp_path)
    async with trio.open_nursery() as nursery:
        slots = []
        limit = trio.Semaphore(4)

        async def make(number: int) -> None:
            async with limit:
                slot = owner.take(f"sb-{number}")
                info = SandboxInfo(id=slot.id, snapshot_tag="", created_at_unix=0, network="nat")
                slots.append(await owner.attach(slot, info, nursery, "198.51.100.53"))

        async with trio.open_nursery() as makers:
            for number in range(300):
                makers.start_soon(make, number)
        assert len(netns.links("fkd")) == 300
        assert len({slot.netns for slot in slots}) == 300

        async def remove(slot: Any) -> None:
            async with limit:
                await owner.release(slot)

        async with trio.open_nursery() as removers:
            for slot in slots:
                removers.start_soon(remove, slot)
        assert leftovers() == []
    owner.close()
