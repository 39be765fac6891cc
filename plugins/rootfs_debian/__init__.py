"""Rootfs builder plugin: Debian from packages, any suite, through mmdebstrap and the host's own apt sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forkd.specs.hookspecs import Check, hookimpl
from forkd.specs.host import Host
from forkd.specs.rootfs import RootfsBuilder


@hookimpl
def forkd_register_rootfs_builders(register: Callable[[RootfsBuilder], None]) -> None:
    """Hand over the builder."""
    from forkd.plugins.rootfs_debian.builder import DebianBuilder

    register(DebianBuilder())


@hookimpl
def forkd_doctor_checks(host: Host) -> Iterable[Check]:
    """Is mmdebstrap there?"""
    if path := host.which("mmdebstrap"):
        return [Check("mmdebstrap", "PASS", path)]
    return [Check("mmdebstrap", "WARN", "not on PATH", "for debian: images: apt-get install mmdebstrap")]
