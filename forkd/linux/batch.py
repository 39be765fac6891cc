"""Lists of system calls for a process to run by itself, and the piece of its memory they are written into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forkd.linux.arch import NR, X86_64


@dataclass(frozen=True, slots=True)
class Call:
    """One system call. An argument given as bytes is placed in memory and passed by address."""

    name: str
    arguments: tuple[int | bytes, ...]
    expected: int | None = None  # the one right result; None: any that is no error
    may_fail: bool = False


class Area:
    """Memory of another process being laid out: what is placed has its final address at once."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self._size = size
        self._image = bytearray()

    def place(self, data: bytes, align: int = 16) -> int:
        address = self.reserve(len(data), align)
        self.write(address, data)
        return address

    def reserve(self, size: int, align: int = 16) -> int:
        """Room whose contents are written later, or never."""
        address = (self.address + len(self._image) + align - 1) & -align
        if address + size > self.address + self._size:
            raise ValueError("the area is too small")
        self._image.extend(bytes(address + size - self.address - len(self._image)))
        return address

    def write(self, address: int, data: bytes) -> None:
        begin = address - self.address
        self._image[begin : begin + len(data)] = data

    def image(self) -> bytes:
        return bytes(self._image)


def encode(calls: Iterable[Call], area: Area, arch: X86_64) -> bytes:
    """The calls as table entries, with their bytes placed in the area."""

    def passed(argument: int | bytes) -> int:
        return area.place(argument) if isinstance(argument, bytes) else argument

    return b"".join(arch.entry(NR[call.name], [passed(a) for a in call.arguments], call.may_fail) for call in calls)


def first_failure(calls: Sequence[Call], table: bytes, arch: X86_64) -> tuple[Call, int] | None:
    """The first call of a table that was run whose result is wrong, with that result."""
    for index, call in enumerate(calls):
        result = arch.entry_result(table[index * arch.entry_size : (index + 1) * arch.entry_size])
        wrong = result != call.expected if call.expected is not None else -4096 < result < 0 and not call.may_fail
        if wrong:
            return call, result
    return None


class FreeNumbers:
    """Descriptor numbers as the kernel hands them out: always the lowest free one."""

    def __init__(self, used: Iterable[int]) -> None:
        self._used = set(used)

    def take(self) -> int:
        number = 0
        while number in self._used:
            number += 1
        self._used.add(number)
        return number

    def give_back(self, number: int) -> None:
        self._used.remove(number)
