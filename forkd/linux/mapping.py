"""The memory mappings of a process, and where among them a VMM keeps guest RAM."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

_LINE = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<access>[-rwxsp]{4}) (?P<offset>[0-9a-f]+)"
    r" (?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+) (?P<inode>\d+)(?: +(?P<name>.*))?"
)
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of ``/proc/PID/maps``. ``name`` is a path, ``/memfd:NAME``, ``[heap]`` … or empty."""

    start: int
    end: int
    access: str
    offset: int
    device: int
    inode: int
    name: str
    deleted: bool = False

    @property
    def length(self) -> int:
        """Its size in bytes."""
        return self.end - self.start

    @property
    def private(self) -> bool:
        """Whether writes stay with the process."""
        return self.access[3] == "p"

    @property
    def anonymous(self) -> bool:
        """Whether no file and no special area is below it."""
        return self.inode == 0 and (not self.name or self.name.startswith("[anon"))


@dataclass(frozen=True, slots=True)
class MappingUse:
    """A mapping with its numbers from ``/proc/PID/smaps``: fields in bytes, and the kernel's two-letter flags."""

    mapping: Mapping
    bytes: dict[str, int]
    flags: frozenset[str]


class Region(NamedTuple):
    """A contiguous part of guest RAM: address and length in the process, offset in RAM (and in the file below it)."""

    address: int
    length: int
    offset: int


def read_maps(pid: int) -> list[Mapping]:
    """Every mapping of the process, ascending. Raises FileNotFoundError or ProcessLookupError if it is gone."""
    mappings = [parse_line(line) for line in _lines(pid, "maps")]
    if not mappings:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has no memory any more")
    return mappings


def read_smaps(pid: int) -> list[MappingUse]:
    """As ``read_maps``, with sizes and flags. The kernel walks all page tables for it: not for hot paths."""
    uses: list[MappingUse] = []
    for line in _lines(pid, "smaps"):
        key, _, value = line.partition(":")
        if " " in key:  # only lines that begin a mapping have a space before their first colon
            uses.append(MappingUse(parse_line(line), {}, frozenset()))
        elif key == "VmFlags":
            uses[-1] = MappingUse(uses[-1].mapping, uses[-1].bytes, frozenset(value.split()))
        elif value.endswith(" kB"):
            uses[-1].bytes[key] = int(value[:-3]) * 1024
    return uses


def read_totals(pid: int) -> dict[str, int]:
    """Bytes over all mappings from ``/proc/PID/smaps_rollup``: ``Rss``, ``Pss``, ``Private_Dirty`` …"""
    pairs = (line.partition(":") for line in _lines(pid, "smaps_rollup"))
    return {key: int(value[:-3]) * 1024 for key, _, value in pairs if value.endswith(" kB")}


def parse_line(line: str) -> Mapping:
    """One line of ``/proc/PID/maps``. Raises ValueError if it is none."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"not a line of /proc/PID/maps: {line!r}")
    name = (match["name"] or "").replace("\\012", "\n")
    return Mapping(
        start=int(match["start"], 16),
        end=int(match["end"], 16),
        access=match["access"],
        offset=int(match["offset"], 16),
        device=os.makedev(int(match["major"], 16), int(match["minor"], 16)),
        inode=int(match["inode"]),
        name=name.removesuffix(_DELETED),
        deleted=name.endswith(_DELETED),
    )


def find_ram(pid: int, file: str | os.PathLike[str] | None, size: int | None = None) -> list[Region]:
    """Where the process maps guest RAM privately, ascending by offset; pieces of one mapping are joined.

    ``file`` is what RAM maps: a path (of a file, or ``/proc/PID/fd/N`` of a memfd), which may have been deleted or
    replaced since, or the bare name of a memfd. Without it, or if it leads nowhere any more, as the path of a memfd
    whose owner has closed it, RAM is the one private mapping of exactly ``size`` bytes. With ``size`` the regions cover
    that much, no more and no less. Raises OSError: FileNotFoundError or ProcessLookupError if the process is gone or
    has no such mapping, ENOTUNIQ if it has several.
    """
    mappings = [mapping for mapping in read_maps(pid) if mapping.private]
    if file is not None:
        wanted = _maps_file(os.fspath(file))
        found = _join(sorted((mapping for mapping in mappings if wanted(mapping)), key=lambda mapping: mapping.offset))
        if found or size is None:
            _check_cover(found, pid, os.fspath(file), size)
            return found
    if size is None:
        raise ValueError("guest RAM can be found by its file, its size or both; neither is given")
    candidates = [region for region in _join_neighbours(mappings) if region.length == size]
    if not candidates:
        raise FileNotFoundError(errno.ENOENT, f"process {pid} has no private mapping of {size} bytes")
    if len(candidates) > 1:
        raise OSError(errno.ENOTUNIQ, f"process {pid} has {len(candidates)} private mappings of {size} bytes")
    return [candidates[0]._replace(offset=0)]


def address_of(area: mmap.mmap) -> int:
    """Where an area we mapped ourselves is in our memory; it must be writable or a private mapping."""
    # SAFETY: only the address is taken; the export that would keep the area from being closed ends with this call.
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def _lines(pid: int, which: str) -> Iterator[str]:
    with open(f"/proc/{pid}/{which}", encoding="utf-8", errors="surrogateescape", newline="\n") as source:
        for line in source:
            yield line.removesuffix("\n")


def _maps_file(file: str) -> Callable[[Mapping], bool]:
    """Whether a mapping is of ``file``: by name, which outlives deletion, or by inode, which outlives renaming."""
    names = {file, os.path.realpath(file), f"/memfd:{file}"}
    try:
        status = os.stat(file)
    except OSError:
        return lambda mapping: mapping.name in names
    return lambda mapping: mapping.name in names or (mapping.inode == status.st_ino and mapping.device == status.st_dev)


def _join(mappings: list[Mapping]) -> list[Region]:
    """Join pieces that follow each other in memory and in the file."""
    regions: list[Region] = []
    for mapping in mappings:
        last = regions[-1] if regions else None
        if last and (last.address + last.length, last.offset + last.length) == (mapping.start, mapping.offset):
            regions[-1] = last._replace(length=last.length + mapping.length)
        else:
            regions.append(Region(mapping.start, mapping.length, mapping.offset))
    return regions


def _join_neighbours(mappings: list[Mapping]) -> list[Region]:
    """Writable mappings, each group of adjacent pieces of one file, or of anonymous memory, as one."""
    groups: list[list[Mapping]] = []
    for mapping in mappings:
        if "rw" not in mapping.access or not (mapping.anonymous or mapping.inode):
            continue
        last = groups[-1][-1] if groups else None
        joined = (
            last is not None
            and last.end == mapping.start
            and (last.device, last.inode) == (mapping.device, mapping.inode)
            and (mapping.anonymous or last.offset + last.length == mapping.offset)
        )
        if joined:
            groups[-1].append(mapping)
        else:
            groups.append([mapping])
    return [Region(group[0].start, group[-1].end - group[0].start, group[0].offset) for group in groups]


def _check_cover(regions: list[Region], pid: int, file: str, size: int | None) -> None:
    if not regions:
        raise FileNotFoundError(errno.ENOENT, f"process {pid} does not map {file} privately")
    position = 0
    for region in regions:
        if region.offset < position:
            raise OSError(errno.ENOTUNIQ, f"process {pid} maps {file} more than once")
        if region.offset > position:
            raise FileNotFoundError(errno.ENOENT, f"process {pid} does not map {file} from byte {position}")
        position += region.length
    if size is not None and position != size:
        raise FileNotFoundError(errno.ENOENT, f"process {pid} maps {position} bytes of {file}, not {size}")
