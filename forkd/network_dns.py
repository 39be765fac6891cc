"""A guest's resolver: answers on the tap's address, asks upstream for what the guest may know, and opens the way there.

A guest sends whatever it likes, so messages are short, parsed without recursion, and dropped if they are no questions.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from forkd.linux import netns
from forkd.linux.netns import NetworkError
from forkd.network_rules import GATEWAY

MAX_MESSAGE = 4096
MAX_ANSWER = 512
"""What every guest takes in one piece, and so all it is sent: there is no way to ask us for more."""
MAX_WAITING = 32
UPSTREAM_TIMEOUT = 5.0
MIN_TTL, MAX_TTL = 60, 3600
TYPE_A, CLASS_IN = 1, 1
NO_ERROR, SERVER_FAILURE, NAME_ERROR, NOT_IMPLEMENTED = 0, 2, 3, 4
_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHHIH4s")
_TRUNCATED, _CODE = 0x0200, 0x000F
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
        if b"." in (label := message[end : end + size]):
            raise NotDns("a dot in a label, which would look like another name")
        labels.append(label)
        end += size
    if end - _HEADER.size > 255 or len(message) < end + 4:
        raise NotDns("the question is cut short or too long")
    kind, klass = struct.unpack_from(">HH", message, end)
    if klass != CLASS_IN:
        raise NotDns("not of class IN")
    name = b".".join(labels).decode("ascii", "replace").lower()
    return Question(ident, name, kind, message[_HEADER.size : end + 4], bool(flags & 0x0100))


def answer(question: Question, code: int, addresses: Sequence[tuple[str, int]] = ()) -> bytes:
    """An answer with addresses and their lifetimes, as many as fit, and with nothing else."""
    told = addresses[: (MAX_ANSWER - _HEADER.size - len(question.raw)) // _RECORD.size]
    records = (_RECORD.pack(0xC00C, TYPE_A, CLASS_IN, ttl, 4, ipaddress.IPv4Address(one).packed) for one, ttl in told)
    flags = 0x8080 | (question.recursion << 8) | code
    return _HEADER.pack(question.ident, flags, 1, len(told), 0, 0) + question.raw + b"".join(records)


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
        self._open_until: dict[str, float] = {}
        # One guest takes one thread, of its own: those of the daemon are for everybody.
        self._permitting = trio.Lock()
        self._thread = trio.CapacityLimiter(1)

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
        try:
            addresses = [(one, min(ttl, MAX_TTL)) for one, ttl in dict(parse_addresses(found)).items()]
            if not self._open:
                await self._permit(addresses)
        except (NotDns, NetworkError) as error:
            log.warning("resolver of %s: %s: %s", self._namespace, question.name, error)
            return answer(question, SERVER_FAILURE)
        return answer(question, _flags(found) & _CODE, addresses)

    async def _permit(self, addresses: list[tuple[str, int]]) -> None:
        """Let the guest reach what it is about to be told, for as long as it may remember.

        Opened for twice as long, so that asking again and again costs no more than asking once.
        """
        async with self._permitting:
            now = trio.current_time()
            lives = {one: max(ttl, MIN_TTL) for one, ttl in addresses}
            if all(self._open_until.get(one, now) >= now + life for one, life in lives.items()):
                return
            elements = ", ".join(f"{one} timeout {2 * life}s" for one, life in lives.items())
            # Deleted first where it is there: nft does not renew the lifetime of an element by adding it again.
            single = ", ".join(lives)
            rules = (
                f"add element inet forkd names {{ {single} }}\n"
                f"delete element inet forkd names {{ {single} }}\n"
                f"add element inet forkd names {{ {elements} }}\n"
            )
            work = partial(netns.within, self._namespace, partial(netns.nft, rules))
            await trio.to_thread.run_sync(work, limiter=self._thread)
            self._open_until = {one: until for one, until in self._open_until.items() if until > now}
            self._open_until |= {one: now + 2 * life for one, life in lives.items()}


async def ask(upstream: str, question: Question, port: int = 53) -> bytes | None:
    """Ask a nameserver, from a port and with an id of our own choosing; None if it does not answer properly.

    What it cannot say in one packet it is asked for again by TCP.
    """
    ident = secrets.randbelow(1 << 16)
    query = _HEADER.pack(ident, 0x0100, 1, 0, 0, 0) + question.raw
    with trio.move_on_after(UPSTREAM_TIMEOUT):
        try:
            found = await _ask_by_udp(upstream, port, query)
            return await _ask_by_tcp(upstream, port, query) if _flags(found) & _TRUNCATED else found
        except OSError:
            return None
    return None


async def _ask_by_udp(upstream: str, port: int, query: bytes) -> bytes:
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.connect((upstream, port))
        await sock.send(query)
        while True:
            if _answers(query, found := await sock.recv(MAX_MESSAGE)):
                return found


async def _ask_by_tcp(upstream: str, port: int, query: bytes) -> bytes | None:
    with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        await sock.connect((upstream, port))
        await trio.SocketStream(sock).send_all(len(query).to_bytes(2, "big") + query)
        found = b""
        while len(found) < 2 or len(found) < 2 + int.from_bytes(found[:2], "big"):
            if not (chunk := await sock.recv(MAX_MESSAGE)):
                return None
            found += chunk
        return found[2:] if _answers(query, found[2:]) else None


def _answers(query: bytes, found: bytes) -> bool:
    return found[:2] == query[:2] and found[_HEADER.size : len(query)].lower() == query[_HEADER.size :].lower()


def _flags(message: bytes) -> int:
    return int.from_bytes(message[2:4], "big")


def _bind() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind((GATEWAY, 53))
    except OSError:
        sock.close()
        raise
    return sock
