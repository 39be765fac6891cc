"""The open descriptors of a process: which a clone may share, which it needs afresh, and how those are made.

A fork shares every open file with its origin. A clone that runs on its own must not: an eventfd would wake the wrong
process, a file position would move under it. What is not known to be safe is refused.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
import termios
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from forkd.linux.batch import Call, FreeNumbers
from forkd.linux.ptrace import Ended, TraceError, read_proc, system_call

_KCMP, _KCMP_FILE, _KCMP_EPOLL_TFD, _PIDFD_GETFD = 312, 0, 7, 438
_O_ASYNC, _O_PATH = 0o20000, 0o10000000
_AT_FDCWD = -100
_EPOLL_CTL_ADD = 1
_PLAIN_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}  # null, zero, full, random, urandom: they keep no position
_CREATION_FLAGS = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC


class Refused(TraceError):
    """The process cannot be cloned safely; `reason` says why, in words for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unsettled(Refused):
    """The process is in the middle of something: a moment later it may well be cloned."""


@dataclass(frozen=True, slots=True)
class Watch:
    """One entry of an epoll set."""

    number: int
    events: int
    data: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One line of `/proc/PID/fd` with what the kernel says about it in `fdinfo`."""

    number: int
    target: str
    flags: int
    position: int = 0
    count: int = 0  # of an eventfd
    semaphore: bool = False  # of an eventfd
    signals: int = 0  # of a signalfd
    watches: tuple[Watch, ...] = ()  # of an epoll set

    @property
    def close_on_exec(self) -> int:
        return self.flags & os.O_CLOEXEC

    @property
    def nonblocking(self) -> int:
        return self.flags & os.O_NONBLOCK

    @property
    def access(self) -> int:
        return self.flags & os.O_ACCMODE


def parse(number: int, target: str, info: str) -> Descriptor:
    """One descriptor from its link and its fdinfo text."""
    fields = dict(re.findall(r"^([\w-]+):[ \t]*([0-9a-fA-F]+)$", info, re.MULTILINE))
    watches = re.findall(r"^tfd: *(\d+) events: *([0-9a-f]+) data: *([0-9a-f]+)", info, re.MULTILINE)
    return Descriptor(
        number,
        target,
        flags=int(fields.get("flags", "0"), 8),
        position=int(fields.get("pos", "0")),
        count=int(fields.get("eventfd-count", "0"), 16),
        semaphore=fields.get("eventfd-semaphore", "0") == "1",
        signals=int(fields.get("sigmask", "0"), 16),
        watches=tuple(Watch(int(tfd), int(events, 16), int(data, 16)) for tfd, events, data in watches),
    )


def read_descriptors(pid: int) -> list[Descriptor]:
    """Every open descriptor of the process, by number. It should stand still meanwhile."""
    try:
        numbers = sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        found = []
        for number in numbers:
            info = read_proc(f"{pid}/fdinfo/{number}").decode("ascii")
            found.append(parse(number, os.readlink(f"/proc/{pid}/fd/{number}"), info))
    except OSError as error:
        raise Ended(f"the descriptors of process {pid} cannot be read", error.errno) from error
    return found


def plan(pid: int, replaced: Collection[int], shared: Collection[int], used: Collection[int] = ()) -> Plan:
    """How a clone of process `pid` comes to its own descriptors.

    `replaced` are numbers for which the caller hands each clone a descriptor; `shared` those it vouches for. `used` are
    numbers that will be taken besides the present ones. Raises Refused.
    """
    found = read_descriptors(pid)
    known = {descriptor.number for descriptor in found}
    if missing := (set(replaced) | set(shared)) - known:
        raise Refused(f"process {pid} has no descriptor {min(missing)} to replace or share")
    chosen = [descriptor for descriptor in found if descriptor.number in replaced]
    for descriptor in chosen:
        _check_drained(pid, descriptor)
    for descriptor in found:
        _check_watches(pid, descriptor, {each.number: each for each in found})
    rest = [d for d in found if d.number not in replaced and d.number not in shared]
    return Plan(chosen, tuple(_groups(pid, rest)), known | set(used))


@dataclass(frozen=True, slots=True)
class Plan:
    """Descriptors of a clone: those handed to it, and groups (the first and its duplicates) to be made afresh."""

    replaced: list[Descriptor]
    afresh: tuple[tuple[Descriptor, ...], ...]
    used: set[int]

    def calls(self, received: list[int], free: FreeNumbers) -> Iterator[Call]:
        """System calls that put everything in place, the received descriptors (in the order of `replaced`) first."""
        for descriptor, number in zip(self.replaced, received, strict=True):
            yield from _install(number, [descriptor], free)
        # An epoll set watches descriptors, so these must be the clone's own by then.
        for group in sorted(self.afresh, key=lambda group: bool(group[0].watches)):
            yield from _make(group, free)


def _make(group: tuple[Descriptor, ...], free: FreeNumbers) -> Iterator[Call]:
    first = group[0]
    if first.target.startswith("pipe:"):
        yield from _make_pipe(group, free)
        return
    number = free.take()
    match first.target:
        case "anon_inode:[eventfd]":
            yield Call("eventfd2", (first.count, first.nonblocking | first.semaphore), number)
        case "anon_inode:[signalfd]":
            yield Call("signalfd4", (-1, struct.pack("<Q", first.signals), 8, first.nonblocking), number)
        case "anon_inode:[eventpoll]":
            yield Call("epoll_create1", (0,), number)
            for watch in first.watches:
                event = struct.pack("<IQ", watch.events, watch.data)
                yield Call("epoll_ctl", (number, _EPOLL_CTL_ADD, watch.number, event))
        case _:
            path = f"/proc/self/fd/{first.number}\0".encode()
            yield Call("openat", (_AT_FDCWD, path, first.flags & ~_CREATION_FLAGS), number)
            yield Call("lseek", (number, first.position, os.SEEK_SET), first.position)
    yield from _install(number, group, free)


def _make_pipe(group: tuple[Descriptor, ...], free: FreeNumbers) -> Iterator[Call]:
    readers = [d for d in group if d.access == os.O_RDONLY]
    writers = [d for d in group if d.access == os.O_WRONLY]
    reading, writing = free.take(), free.take()
    yield Call("pipe2", (bytes(8), readers[0].nonblocking))
    yield from _install(reading, readers, free)
    yield from _install(writing, writers, free)


def _install(number: int, group: Iterable[Descriptor], free: FreeNumbers) -> Iterator[Call]:
    for descriptor in group:
        yield Call("dup3", (number, descriptor.number, descriptor.close_on_exec), descriptor.number)
    yield Call("close", (number,))
    free.give_back(number)


def _groups(pid: int, descriptors: list[Descriptor]) -> Iterator[tuple[Descriptor, ...]]:
    """Descriptors to be made afresh, duplicates of one open file together; refuses what is not known."""
    pending = [descriptor for descriptor in descriptors if _needs_own(pid, descriptor)]
    while pending:
        first = pending.pop(0)
        if first.target.startswith("pipe:"):
            group = [first, *(other for other in pending if other.target == first.target)]
            _check_pipe(pid, group)
        else:
            group = [first, *(other for other in pending if _same_file(pid, first, other))]
        pending = [other for other in pending if other not in group]
        yield tuple(group)


def _needs_own(pid: int, descriptor: Descriptor) -> bool:
    """Whether a clone needs its own; False where sharing is harmless. Raises Refused for anything else."""
    target, number = descriptor.target, descriptor.number
    if descriptor.flags & _O_ASYNC:
        raise Refused(f"descriptor {number} ({target}) raises signals on input or output")
    if descriptor.flags & _O_PATH:
        return False
    if target in ("anon_inode:[eventfd]", "anon_inode:[signalfd]", "anon_inode:[eventpoll]"):
        return True
    if target.startswith("pipe:"):
        return True
    if target.startswith("socket:"):
        raise Refused(f"descriptor {number} is a socket that nobody replaces ({target})")
    if not target.startswith("/"):
        raise Refused(f"descriptor {number} is of a kind that cannot be cloned ({target})")
    status = os.stat(f"/proc/{pid}/fd/{number}")
    if stat.S_ISCHR(status.st_mode):
        if (os.major(status.st_rdev), os.minor(status.st_rdev)) in _PLAIN_DEVICES:
            return False
        raise Refused(f"descriptor {number} is a device that cannot be cloned ({target})")
    if stat.S_ISREG(status.st_mode) and descriptor.access != os.O_RDONLY:
        raise Refused(f"descriptor {number} can write to a file that clones would share ({target})")
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return True
    raise Refused(f"descriptor {number} is of a kind that cannot be cloned ({target})")


def _check_pipe(pid: int, group: list[Descriptor]) -> None:
    first = group[0]
    if {descriptor.access for descriptor in group} != {os.O_RDONLY, os.O_WRONLY}:
        raise Refused(f"descriptor {first.number} is one end of a pipe to somebody else ({first.target})")
    if len({descriptor.nonblocking for descriptor in group}) > 1:
        raise Refused(f"the ends of a pipe differ in their flags (descriptor {first.number})")
    if waiting_bytes(pid, first):
        raise Unsettled(f"there are unread bytes in a pipe (descriptor {first.number})")


def _check_drained(pid: int, descriptor: Descriptor) -> None:
    """Input that waits in a replaced socket or pipe would be lost in the clone."""
    if descriptor.target.startswith(("pipe:", "socket:")) and waiting_bytes(pid, descriptor):
        raise Unsettled(f"there are unread bytes on descriptor {descriptor.number} ({descriptor.target})")


def _check_watches(pid: int, epoll: Descriptor, found: dict[int, Descriptor]) -> None:
    for index, watch in enumerate(epoll.watches):
        if watch.number not in found:
            raise Refused(f"epoll set {epoll.number} watches descriptor {watch.number}, which is closed")
        if found[watch.number].target == epoll.target:
            raise Refused(f"epoll set {epoll.number} watches another epoll set")
        same_number = sum(other.number == watch.number for other in epoll.watches[:index])
        # SAFETY: numbers, and a struct kcmp_epoll_slot that lives during the call.
        slot = ctypes.create_string_buffer(struct.pack("<III", epoll.number, watch.number, same_number), 12)
        if _kcmp(pid, _KCMP_EPOLL_TFD, watch.number, ctypes.addressof(slot)):
            raise Refused(f"epoll set {epoll.number} watches a file that is not descriptor {watch.number} any more")


def waiting_bytes(pid: int, descriptor: Descriptor) -> int:
    """Bytes that wait in a pipe or a connected socket."""
    own = take(pid, descriptor.number)
    try:
        # SAFETY: the kernel writes one int into the four bytes passed.
        return int(struct.unpack("i", fcntl.ioctl(own, termios.FIONREAD, bytes(4)))[0])
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0  # a listening socket
        raise
    finally:
        os.close(own)


def take(pid: int, number: int) -> int:
    """A duplicate of another process's descriptor, for the caller to close."""
    pidfd = os.pidfd_open(pid)
    try:
        # SAFETY: numbers only; the new descriptor is ours and closed on exec.
        return system_call(_PIDFD_GETFD, pidfd, number, 0)
    except OSError as error:
        raise TraceError(f"descriptor {number} of process {pid} cannot be taken", error.errno) from error
    finally:
        os.close(pidfd)


def _same_file(pid: int, one: Descriptor, other: Descriptor) -> bool:
    """Whether two descriptors are duplicates: one open file, one position."""
    if (one.target, one.position) != (other.target, other.position):
        return False
    return not _kcmp(pid, _KCMP_FILE, one.number, other.number)


def _kcmp(pid: int, kind: int, one: int, other: int) -> int:
    """Zero if two things of a process are one and the same in the kernel."""
    try:
        # SAFETY: numbers, and an address the caller answers for.
        return system_call(_KCMP, pid, pid, kind, ctypes.c_ulong(one), ctypes.c_ulong(other))
    except OSError as error:
        raise TraceError(f"descriptors of process {pid} cannot be compared", error.errno) from error
