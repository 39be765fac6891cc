"""A canary: one page and one file of a guest that every clone of it must still have."""

from __future__ import annotations

import os
from dataclasses import dataclass

from forkd.guestlink import GuestLink, GuestStream
from forkd.specs.engine import Machine
from forkd.specs.errors import CloneBroken, GuestFileNotFound

FILES = ("/etc/os-release", "/etc/passwd", "/proc/version")
FILE_BYTES = 64 << 10
LOW_MEMORY = 1 << 20
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Canary:
    """What was seen in the machine that is cloned; clones have their RAM at the same addresses."""

    address: int
    page: bytes
    path: str
    content: bytes

    @classmethod
    async def take(cls, machine: Machine, link: GuestLink) -> Canary:
        """Look at a running machine. Linux leaves the first megabyte of RAM alone, so its pages stay as they are."""
        first = machine.ram()[0]
        low = _read(machine.pid, first.address, min(LOW_MEMORY, first.length))
        offset = next((at for at in range(0, len(low), PAGE) if any(low[at : at + PAGE])), 0)
        for path in FILES:
            try:
                async with link.read_file(path, length=FILE_BYTES) as stream:
                    content = await _collect(stream)
            except GuestFileNotFound:
                continue
            return cls(first.address + offset, low[offset : offset + PAGE], path, content)
        raise CloneBroken("the guest has none of the files a clone could be recognised by")

    def ask(self, link: GuestLink) -> GuestStream:
        """The request for the file: entered at once, it reaches the guest together with the resume handshake."""
        return link.read_file(self.path, length=FILE_BYTES)

    async def check(self, machine: Machine, asked: GuestStream) -> None:
        """Raise CloneBroken if a clone is not what it should be."""
        if await _collect(asked) != self.content:
            raise CloneBroken(f"the clone reads other bytes from {self.path} than its template")
        if _read(machine.pid, self.address, PAGE) != self.page:
            raise CloneBroken("the clone's memory is not its template's")


async def _collect(stream: GuestStream) -> bytes:
    return b"".join([data async for _, data in stream])


def _read(pid: int, address: int, size: int) -> bytes:
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CloneBroken(f"the memory of VMM {pid} cannot be read: {error.strerror}") from error
    try:
        return os.pread(memory, size, address)
    except OSError as error:
        raise CloneBroken(f"the memory of VMM {pid} cannot be read: {error.strerror}") from error
    finally:
        os.close(memory)
