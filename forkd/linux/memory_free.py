"""How much memory the host has left."""

from __future__ import annotations


def available_share() -> float:
    """The part of the host's memory that is to be had, from 0 to 1."""
    with open("/proc/meminfo", encoding="ascii") as source:
        found = dict(line.split(":") for line in source)
    return int(found["MemAvailable"].split()[0]) / int(found["MemTotal"].split()[0])
