"""Values of packs and registries (formats/pack.md, formats/registry.md), and the limits every reader keeps to."""

from __future__ import annotations

import msgspec

from forkd.specs.models import Snapshot

PACK_VERSION = 3
"""Of ``manifest.toml``. Versions 1 and 2 are another project's; their manifests can name paths, so they are refused."""
REGISTRY_VERSION = 1
PACK_SUFFIX = ".forkd-snapshot.tar.zst"

MAX_MANIFEST = 1 << 20
MAX_REGISTRY = 16 << 20
MAX_LAYERS = 33
MAX_SIGNATURES = 8
MAX_BLOB = 1 << 40
MAX_VMSTATE = 256 << 20
MAX_DISK = 256 << 30
MAX_RATIO = 1 << 15
"""A stream may be this many times as long as its blob: zstd says 128 KiB of the same byte in four. A bomb is refused by
what it is for, as no stream may be longer than twice its file. And …"""
RATIO_SLACK = 16 << 20
"""… this much longer, because small things compress without measure."""
MAX_WINDOW = 1 << 23
"""What a decompressor may be made to keep in memory."""


class Blob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One file of a snapshot as it travels: a zstd frame, named by its own SHA-256.

    ``digest`` and ``size`` are the file's, as in ``snapshot.json``; ``kind`` is ``vmstate``, ``memory`` or ``rootfs``;
    ``stream`` is the length of what the frame holds, ``sparse`` whether that is a sparse stream or the file as it is.
    ``inside`` says whether the blob is in the pack itself or must come from elsewhere (registries: always true).
    """

    kind: str
    digest: str
    size: int
    sha256: str
    stored: int
    stream: int
    sparse: bool = False
    inside: bool = True


class PackManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``manifest.toml``: the layers of a chain, root first, and the blobs their files travel in. It names no path."""

    forkd_pack_version: int
    tag: str
    created_at: str
    forkd_version: str
    description: str = ""
    base_image: str = ""
    layers: list[Snapshot]
    blobs: list[Blob]


class Version(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of a package in ``registry.json``.

    With ``url`` it is a pack file to fetch whole (``sha256`` is that file's); otherwise its manifest is at
    ``manifests/OWNER/NAME/VERSION.toml`` and ``sha256``, if given, is that of the manifest without signatures.
    """

    url: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    memory_mib: int | None = None
    base_image: str | None = None
    created_at: str | None = None


class Package(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A package of a registry: what it is and its versions."""

    description: str = ""
    versions: dict[str, Version] = {}


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """``registry.json``: packages by ``owner/name``."""

    schema_version: int = REGISTRY_VERSION
    packages: dict[str, Package] = {}
