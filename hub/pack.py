"""Packs as files: written from blobs, and read by comparing every other byte with what must be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from forkd.hub import glue, manifest, signatures
from forkd.hub.signatures import Signature
from forkd.specs.errors import PackError
from forkd.specs.packs import MAX_MANIFEST, MAX_SIGNATURES, Blob, PackManifest

MANIFEST = "manifest.toml"
_COPY = 1 << 20
_SIGNATURE_BYTES = 256
_LIMIT = MAX_MANIFEST + MAX_SIGNATURES * _SIGNATURE_BYTES + 2 * glue.BLOCK


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack's manifest, its bytes without and (``document``) with signatures, and where each of its blobs begins."""

    manifest: PackManifest
    body: bytes
    signatures: list[Signature]
    offsets: dict[str, int]
    document: bytes


def write(out: IO[bytes], document: bytes, blobs: list[Blob], copy: Callable[[Blob, IO[bytes]], None]) -> None:
    """Write a pack: ``document`` is the manifest with its signatures; ``copy`` writes one blob, all of it."""
    out.write(glue.frame(glue.header(MANIFEST, len(document)) + document + glue.padding(len(document))))
    for blob in blobs:
        if blob.inside:
            out.write(glue.frame(glue.header(_name(blob), blob.stream)))
            copy(blob, out)
            if padding := glue.padding(blob.stream):
                out.write(glue.frame(padding))
    out.write(glue.trailer())


@dataclass(frozen=True, slots=True)
class Head:
    """What the beginning of a pack says: its manifest, as in ``Pack``, and how many bytes the whole pack has."""

    manifest: PackManifest
    body: bytes
    signatures: list[Signature]
    document: bytes
    size: int


def head_size(begin: bytes) -> int:
    """How many bytes of a pack are enough for ``read_head``, or for asking again. Raises PackError if it is none."""
    return glue.HEAD if len(begin) < glue.HEAD else glue.frame_size(begin[: glue.HEAD], _LIMIT)


def read_head(source: IO[bytes]) -> Head:
    """Read a pack's manifest; nothing behind it need be there yet. Raises PackError."""
    document = _read_manifest(source)
    body, signed = signatures.split(document)
    found = manifest.decode(body)
    size = source.tell() + len(glue.trailer())
    for blob in found.blobs:
        if blob.inside:
            padding = glue.padding(blob.stream)
            size += len(glue.frame(glue.header(_name(blob), blob.stream))) + blob.stored
            size += len(glue.frame(padding)) if padding else 0
    return Head(found, body, signed, document, size)


def read(source: IO[bytes]) -> Pack:
    """Read a pack's manifest and find its blobs, whose contents are not looked at yet. Raises PackError."""
    head = read_head(source)
    found = head.manifest
    offsets: dict[str, int] = {}
    for blob in found.blobs:
        if blob.inside:
            _expect(source, glue.frame(glue.header(_name(blob), blob.stream)), f"before {_name(blob)}")
            offsets[blob.sha256] = source.tell()
            source.seek(blob.stored, 1)
            if padding := glue.padding(blob.stream):
                _expect(source, glue.frame(padding), f"after {_name(blob)}")
    _expect(source, glue.trailer(), "at its end")
    if source.read(1):
        raise PackError("the pack has bytes after its end")
    return Pack(found, head.body, head.signatures, offsets, head.document)


def resign(source: IO[bytes], out: IO[bytes], document: bytes) -> None:
    """Copy a pack with its manifest file replaced by ``document``: the same manifest with other signatures."""
    source.seek(0)
    if signatures.split(_read_manifest(source))[0] != signatures.split(document)[0]:
        raise ValueError("only signatures may change")
    out.write(glue.frame(glue.header(MANIFEST, len(document)) + document + glue.padding(len(document))))
    while piece := source.read(_COPY):
        out.write(piece)


def sidecar(blob: Blob) -> str:
    """The name of a disk that lies beside the packs that need it."""
    return f"{blob.sha256[:16]}.rootfs.zst"


def _read_manifest(source: IO[bytes]) -> bytes:
    content = glue.read_frame(source.read, _LIMIT)
    size = len(content) - glue.BLOCK
    # The document's length is not said elsewhere: it is what makes the tar header right, so find it from the padding.
    for length in range(size, max(size - glue.BLOCK, 0), -1):
        document = content[glue.BLOCK : glue.BLOCK + length]
        if content == glue.header(MANIFEST, length) + document + glue.padding(length):
            return document
    raise PackError("the pack's first member is not a manifest")


def _expect(source: IO[bytes], wanted: bytes, where: str) -> None:
    if source.read(len(wanted)) != wanted:
        raise PackError(f"the pack is cut short or malformed {where}")


def _name(blob: Blob) -> str:
    return f"{blob.kind}-{blob.sha256[:16]}"
