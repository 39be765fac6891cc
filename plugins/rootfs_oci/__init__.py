"""Rootfs builder plugin: images straight from any OCI registry, with neither docker nor root."""

from __future__ import annotations

from collections.abc import Callable

from forkd.specs.hookspecs import hookimpl
from forkd.specs.rootfs import RootfsBuilder


@hookimpl(trylast=True)
def forkd_register_rootfs_builders(register: Callable[[RootfsBuilder], None]) -> None:
    """Hand over the builder, behind all others: nearly everything looks like an image's name."""
    from forkd.plugins.rootfs_oci.builder import OciBuilder

    register(OciBuilder())
