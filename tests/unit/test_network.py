"""Allow-lists and the resolver's messages, without a network."""

from __future__ import annotations

import ipaddress
import socket
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from forkd.network import AllowList, check_network, system_resolver
from forkd.network_dns import (
    NAME_ERROR,
    NotDns,
    Question,
    Resolver,
    allowed,
    answer,
    ask,
    parse_addresses,
    parse_question,
)
from forkd.network_rules import child_rules
from forkd.specs.errors import BadInput, CapabilityMissing

QUERY = bytes.fromhex("beef01000001000000000000") + b"\x03www\x07Example\x03com\x00\x00\x01\x00\x01"


def test_an_allow_list_has_networks_and_names() -> None:
    made = AllowList.parse(["198.51.100.7", "198.51.100.6/31", "PyPI.org.", "*.pythonhosted.org", "localhost"])
    assert made.networks == (ipaddress.IPv4Network("198.51.100.6/31"),)
    assert made.domains == ("pypi.org", "*.pythonhosted.org", "localhost")


@pytest.mark.parametrize(
    "entry", ["", "not a name", "*", "a..b", "1.2.3", "300.1.1.1", "::1/64", "a" * 64, "*.*.a", "x/8"]
)
def test_what_is_neither_is_refused(entry: str) -> None:
    with pytest.raises(BadInput):
        AllowList.parse([entry])


def test_a_wildcard_has_all_below_and_not_the_name_itself() -> None:
    domains = ("pypi.org", "*.example.com")
    assert allowed("pypi.org", domains) and allowed("a.b.example.com", domains)
    assert not any(allowed(name, domains) for name in ("example.com", "notexample.com", "x.pypi.org", "", "org"))


def test_a_mode_that_cannot_be_had_says_what_would_help() -> None:
    with pytest.raises(CapabilityMissing, match="without a network device"):
        check_network("nat", (), has_device=False, root=True, user_mode=True)
    with pytest.raises(CapabilityMissing, match="needs root"):
        check_network("allowlist", ("a.test",), has_device=True, root=False, user_mode=True)
    with pytest.raises(CapabilityMissing, match="no user-mode networking"):
        check_network("nat", (), has_device=True, root=False, user_mode=False)
    (note,) = check_network("nat", (), has_device=True, root=False, user_mode=True)
    assert "loopback" in note and "metadata" in note
    assert check_network("none", (), has_device=False, root=False, user_mode=True) == []
    assert check_network("nat", (), has_device=True, root=True, user_mode=True) == []


def test_rules_drop_by_default_and_metadata_before_anything_is_let_through() -> None:
    for mode in ("nat", "allowlist"):
        text = child_rules(mode, ["198.51.100.0/24"], "10.201.0.0/16")
        assert (
            text.index("policy drop")
            < text.index("169.254.0.0/16")
            < text.rindex("accept", 0, text.index("chain input"))
        )


def test_a_question_is_read_and_answered() -> None:
    question = parse_question(QUERY)
    assert (question.ident, question.name, question.kind) == (0xBEEF, "www.example.com", 1)
    made = answer(question, NAME_ERROR)
    assert made[:4] == bytes.fromhex("beef8183") and made[12:] == QUERY[12:]


def test_addresses_are_found_behind_an_alias() -> None:
    alias = b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x3c\x00\x02\xc0\x10"
    record = b"\xc0\x10\x00\x01\x00\x01\x00\x00\x01\x2c\x00\x04\xc6\x33\x64\x14"
    message = bytes.fromhex("beef81800001000200000000") + QUERY[12:] + alias + record
    assert list(parse_addresses(message)) == [("198.51.100.20", 300)]


def test_a_label_with_a_dot_is_refused_as_it_would_look_like_another_name() -> None:
    with pytest.raises(NotDns, match="a dot in a label"):
        parse_question(QUERY[:12] + b"\x0bexample.com\x00\x00\x01\x00\x01")


def test_an_answer_has_as_many_addresses_as_every_guest_takes_and_nothing_else() -> None:
    made = answer(parse_question(QUERY), 0, [(f"198.51.100.{number}", 60) for number in range(100)])
    assert len(made) <= 512 and made[:4] == bytes.fromhex("beef8180")
    found = list(parse_addresses(made))
    assert found == [(f"198.51.100.{number}", 60) for number in range(len(found))] and len(found) > 25


async def test_what_a_nameserver_cannot_say_in_one_packet_is_asked_for_by_tcp() -> None:
    question = parse_question(QUERY)
    record = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x01\x2c\x00\x04\xc6\x33\x64\x14"
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]

    async def by_tcp(stream: trio.SocketStream) -> None:
        query = await stream.receive_some(1000)
        full = query[2:4] + b"\x81\x80\x00\x01\x00\x28" + bytes(4) + query[14:] + 40 * record
        for byte in len(full).to_bytes(2, "big") + full:
            await stream.send_all(bytes([byte]))

    async def by_udp(sock: trio.socket.SocketType) -> None:
        query, peer = await sock.recvfrom(1000)
        await sock.sendto(query[:2] + b"\x83\x80\x00\x01" + bytes(6) + query[12:], peer)

    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", port))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, by_tcp, [listener])
            nursery.start_soon(by_udp, sock)
            found = await ask("127.0.0.1", question, port)
            nursery.cancel_scope.cancel()
    assert found is not None and len(list(parse_addresses(found))) == 40


async def test_asking_again_and_again_opens_the_way_once(monkeypatch: pytest.MonkeyPatch, autojump_clock: Any) -> None:
    opened: list[str] = []
    life = 300

    async def upstream(address: str, question: Question) -> bytes:
        return answer(question, 0, [("198.51.100.20", life)])

    def within(namespace: str, work: partial[None]) -> None:
        opened.append(work.args[0])

    monkeypatch.setattr("forkd.network_dns.ask", upstream)
    monkeypatch.setattr("forkd.linux.netns.within", within)
    resolver = Resolver("forkd-x", "allowlist", ("www.example.com",), "192.0.2.1")
    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(resolver._reply, QUERY)
    assert len(opened) == 1 and f"198.51.100.20 timeout {2 * life}s" in opened[0]
    await trio.sleep(life - 1)
    await resolver._reply(QUERY)
    assert len(opened) == 1, "it is open for as long as the guest may remember this answer"
    await trio.sleep(2)
    await resolver._reply(QUERY)
    assert len(opened) == 2


@given(st.binary(max_size=600))
def test_whatever_a_guest_sends_is_a_question_or_refused(message: bytes) -> None:
    try:
        question = parse_question(message)
    except NotDns:
        return
    assert isinstance(question, Question) and len(question.raw) <= 260
    assert parse_question(bytes.fromhex("000001000001000000000000") + question.raw).name == question.name


@given(st.binary(max_size=600), st.integers(0, 40))
def test_whatever_a_server_sends_is_read_or_refused(tail: bytes, answers: int) -> None:
    message = bytes.fromhex("beef81800001") + answers.to_bytes(2, "big") + bytes(4) + QUERY[12:] + tail
    try:
        found = list(parse_addresses(message))
    except NotDns:
        return
    assert len(found) <= answers


def test_the_hosts_nameserver_is_the_first_with_an_ipv4_address(tmp_path: pytest.TempPathFactory) -> None:
    path = tmp_path / "resolv.conf"  # type: ignore[operator]
    path.write_text("# x\nnameserver fd00::1\nnameserver 198.51.100.53\n")
    assert system_resolver(path) == "198.51.100.53"
    assert system_resolver(tmp_path / "none") == "127.0.0.1"  # type: ignore[operator]
