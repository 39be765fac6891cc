"""``registry.json``: read without believing it, and changed one version at a time."""

from __future__ import annotations

import msgspec

from forkd.hub.refs import check_package
from forkd.specs.errors import BadInput, PackError
from forkd.specs.packs import MAX_REGISTRY, REGISTRY_VERSION, Package, Registry, Version

EMPTY = Registry()


def decode(data: bytes) -> Registry:
    """Parse an index. Packages with names nobody could ask for are left out. Raises PackError."""
    if len(data) > MAX_REGISTRY:
        raise PackError(f"the registry's index is larger than {MAX_REGISTRY} bytes")
    try:
        found = msgspec.json.decode(data, type=Registry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PackError(f"the registry's index does not fit: {str(error)[:200]}") from error
    if found.schema_version != REGISTRY_VERSION:
        raise PackError(
            f"the registry has format {found.schema_version}; this forkd reads {REGISTRY_VERSION}",
            hint="use a newer forkd",
        )
    return Registry(packages={name: _clean(package) for name, package in found.packages.items() if _usable(name)})


def encode(registry: Registry) -> bytes:
    """The index as it is published: sorted, so that it changes only where something changed."""
    return msgspec.json.format(msgspec.json.encode(registry, order="sorted"), indent=1) + b"\n"


def with_version(registry: Registry, package: str, version: str, description: str, entry: Version) -> Registry:
    """The index with one version added or replaced."""
    old = registry.packages.get(package, Package())
    new = Package(description=description or old.description, versions={**old.versions, version: entry})
    return Registry(packages={**registry.packages, check_package(package): new})


def _usable(name: str) -> bool:
    try:
        check_package(name)
    except BadInput:
        return False
    return True


def _clean(package: Package) -> Package:
    """Descriptions reach terminals."""
    text = "".join(char if char.isprintable() else "�" for char in package.description[:4096])
    return msgspec.structs.replace(package, description=text)
