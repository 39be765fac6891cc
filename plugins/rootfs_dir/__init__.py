"""Rootfs builder plugin: a directory, or a tar file, as it is."""

from __future__ import annotations

from collections.abc import Callable

from forkd.specs.hookspecs import hookimpl
from forkd.specs.rootfs import RootfsBuilder


@hookimpl
def forkd_register_rootfs_builders(register: Callable[[RootfsBuilder], None]) -> None:
    """Hand over the builder."""
    from forkd.plugins.rootfs_dir.builder import DirBuilder

    register(DirBuilder())
