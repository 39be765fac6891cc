"""A guest's resolver: answers on the tap's address, asks upstream for what the guest may know, and opens the way there.

A guest sends whatever it likes, so messages are short, parsed without recursion, and dropped if they are no questions.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import trio

from forkd.linux import netns
from forkd.linux.netns import NetworkError
from forkd.network_rules import GATEWAY

MAX_MESSAGE = 4096
MAX_WAITING = 32
UPSTREAM_TIMEOUT = 5.0
MIN_TTL, MAX_TTL = 60, 3600
TYPE_A, CLASS_IN = 1, 1
NO_ERROR, SERVER_FAILURE, NAME_ERROR, NOT_IMPLEMENTED = 0, 2, 3, 4
_HEADER = struct.Struct(">HHHHHH")
log = logging.getLogger("forkd")


class NotDns(ValueError):
    """Bytes that are no DNS message we understand."""


@dataclass(frozen=True, slots=True)
class Question:
    """A query with its one question; ``raw`` is that question's bytes."""

    ident: int
    name: str
    kind: int
    raw: bytes
    recursion: bool


def parse_question(message: bytes) -> Question:
    """Read a query. Raises NotDns."""
    if len(message) < _HEADER.size:
        raise NotDns("too short")
    ident, flags, questions, _, _, _ = _HEADER.unpack_from(message)
    if flags & 0xF800 or questions != 1:
        raise NotDns("not a plain query with one question")
    labels, end = [], _HEADER.size
    while True:
        if end >= len(message):
            raise NotDns("the name has no end")
        size = message[end]
        end += 1
        if size == 0:
            break
        if size > 63:
            raise NotDns("a compressed or over-long label")
        labels.append(message[end : end + size])
        end += size
    if end - _HEADER.size > 255 or len(message) < end + 4:
        raise NotDns("the question is cut short or too long")
    kind, klass = struct.unpack_from(">HH", message, end)
    if klass != CLASS_IN:
        raise NotDns("not of class IN")
    name = b".".join(labels).decode("ascii", "replace").lower()
    return Question(ident, name, kind, message[_HEADER.size : end + 4], bool(flags & 0x0100))


def answer(question: Question, code: int) -> bytes:
    """An answer without records."""
    return _HEADER.pack(question.ident, 0x8080 | (question.recursion << 8) | code, 1, 0, 0, 0) + question.raw


def parse_addresses(message: bytes) -> Iterator[tuple[str, int]]:
    """The IPv4 addresses an answer has, with their lifetimes. Raises NotDns."""
    if len(message) < _HEADER.size:
        raise NotDns("too short")
    _, _, questions, answers, _, _ = _HEADER.unpack_from(message)
    at = _HEADER.size
    for _ in range(questions):
        at = _skip_name(message, at) + 4
    for _ in range(answers):
        at = _skip_name(message, at)
        if at + 10 > len(message):
            raise NotDns("a record is cut short")
        kind, klass, ttl, size = struct.unpack_from(">HHIH", message, at)
        at += 10
        if at + size > len(message):
            raise NotDns("a record is cut short")
        if (kind, klass, size) == (TYPE_A, CLASS_IN, 4):
            yield str(ipaddress.IPv4Address(message[at : at + 4])), ttl
        at += size


def _skip_name(message: bytes, at: int) -> int:
    while at < len(message):
        size = message[at]
        if size == 0:
            return at + 1
        if size >= 0xC0:
            return at + 2
        at += 1 + size
    raise NotDns("a name has no end")


def allowed(name: str, domains: Iterable[str]) -> bool:
    """Whether an allow-list has this name."""
    return any(name.endswith(domain[1:]) if domain.startswith("*.") else name == domain for domain in domains)


class Resolver:
    """One guest's resolver; ``serve`` runs until ``close``."""

    def __init__(self, namespace: str, mode: str, domains: tuple[str, ...], upstream: str) -> None:
        self._namespace = namespace
        self._open = mode == "nat"
        self._domains = domains
        self._upstream = upstream
        self._scope = trio.CancelScope()
        self._waiting = 0

    def close(self) -> None:
        """Stop serving; the socket, which would keep the namespace alive, is closed when this returns."""
        self._scope.cancel()
        self._socket.close()

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until closed. Raises NetworkError or OSError before it has started, nothing after."""
        plain = await trio.to_thread.run_sync(netns.within, self._namespace, _bind)
        self._socket = trio.socket.from_stdlib_socket(plain)
        task_status.started()
        with self._scope, self._socket:
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        message, peer = await self._socket.recvfrom(MAX_MESSAGE)
                    except OSError as error:
                        log.warning("resolver of %s: %s", self._namespace, error)
                        return
                    if self._waiting < MAX_WAITING:
                        self._waiting += 1
                        nursery.start_soon(self._handle, message, peer)

    async def _handle(self, message: bytes, peer: tuple[object, ...]) -> None:
        try:
            reply = await self._reply(message)
            if reply is not None:
                await self._socket.sendto(reply, peer)
        except OSError as error:
            log.info("resolver of %s: %s", self._namespace, error)
        finally:
            self._waiting -= 1

    async def _reply(self, message: bytes) -> bytes | None:
        try:
            question = parse_question(message)
        except NotDns:
            return None
        if not self._open and not allowed(question.name, self._domains):
            return answer(question, NAME_ERROR)
        if question.kind != TYPE_A:
            # Guests have IPv4 only, and other records would be a way out past the allow-list.
            return answer(question, NO_ERROR)
        found = await ask(self._upstream, question)
        if found is None:
            return answer(question, SERVER_FAILURE)
        if not self._open:
            try:
                await self._permit(list(parse_addresses(found)))
            except (NotDns, NetworkError) as error:
                log.warning("resolver of %s: %s: %s", self._namespace, question.name, error)
                return answer(question, SERVER_FAILURE)
        return found

    async def _permit(self, addresses: list[tuple[str, int]]) -> None:
        """Let the guest reach what it was just told, for as long as it may remember."""
        if addresses:
            elements = ", ".join(f"{one} timeout {_lifetime(ttl)}s" for one, ttl in dict(addresses).items())
            # Deleted first where it is there: nft does not renew the lifetime of an element by adding it again.
            single = ", ".join(dict(addresses))
            rules = (
                f"add element inet forkd names {{ {single} }}\n"
                f"delete element inet forkd names {{ {single} }}\n"
                f"add element inet forkd names {{ {elements} }}\n"
            )
            await trio.to_thread.run_sync(netns.within, self._namespace, lambda: netns.nft(rules))


async def ask(upstream: str, question: Question, port: int = 53) -> bytes | None:
    """Ask a nameserver, from a port and with an id of our own choosing; None if it does not answer properly."""
    ident = secrets.randbelow(1 << 16)
    query = _HEADER.pack(ident, 0x0100, 1, 0, 0, 0) + question.raw
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with trio.move_on_after(UPSTREAM_TIMEOUT):
            try:
                await sock.connect((upstream, port))
                await sock.send(query)
                while True:
                    found = await sock.recv(MAX_MESSAGE)
                    if found[:2] == query[:2] and found[_HEADER.size : len(query)].lower() == question.raw.lower():
                        return question.ident.to_bytes(2, "big") + found[2:]
            except OSError:
                return None
    return None


def _lifetime(ttl: int) -> int:
    return min(max(ttl, MIN_TTL), MAX_TTL)


def _bind() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind((GATEWAY, 53))
    except OSError:
        sock.close()
        raise
    return sock
