"""Blobs: streams compressed into one zstd frame, and read back with every limit kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import IO, cast

import zstandard

from forkd.specs.errors import PackError
from forkd.specs.packs import MAX_RATIO, MAX_WINDOW, RATIO_SLACK, Blob

LEVEL = 3
CHUNK = 1 << 18


class BlobWriter:
    """Compresses a stream into ``out``. The bytes do not depend on how many ``threads`` do it."""

    def __init__(self, out: IO[bytes], threads: int, level: int = LEVEL) -> None:
        self._out = out
        self._sha = hashlib.sha256()
        # With no thread of its own zstd cuts its input otherwise, so there is always at least one.
        self._frame = zstandard.ZstdCompressor(level=level, threads=max(1, threads)).compressobj()
        self.stored = 0
        self.stream = 0

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Take in the next bytes of the stream."""
        self.stream += len(content)
        self._put(self._frame.compress(content))

    def write_all(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Take in all of ``parts``."""
        for part in parts:
            self.write(part)

    def finish(self) -> str:
        """End the frame; returns the blob's SHA-256. ``stored`` and ``stream`` are final then."""
        self._put(self._frame.flush())
        return self._sha.hexdigest()

    def _put(self, data: bytes) -> None:
        if data:
            self._sha.update(data)
            self.stored += len(data)
            self._out.write(data)


class BlobReader:
    """The stream of a blob read from ``source``, which holds it from its present position on.

    ``advance`` is told of the blob's bytes as they are read. Never more than the declared number of bytes is read or
    handed out, and never more than a window is held.
    """

    def __init__(self, source: IO[bytes], blob: Blob, advance: Callable[[int], None] = lambda count: None) -> None:
        if blob.stream > blob.stored * MAX_RATIO + RATIO_SLACK:
            raise PackError(f"blob {blob.sha256[:12]}… would grow from {blob.stored} to {blob.stream} bytes; refused")
        self._blob = blob
        self._counted = _Counted(source, blob.stored, advance)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._stream = decompressor.stream_reader(
            cast(IO[bytes], self._counted), read_size=CHUNK, read_across_frames=True
        )
        self._left = blob.stream

    def read(self, count: int) -> bytes:
        """At most ``count`` bytes of the stream; empty at its end. Raises PackError if the blob is malformed."""
        try:
            data = self._stream.read(min(count, self._left)) if self._left else b""
        except zstandard.ZstdError as error:
            raise PackError(f"blob {self._blob.sha256[:12]}… cannot be decompressed: {error}") from error
        self._left -= len(data)
        return data

    def finish(self) -> None:
        """Check that stream and blob ended where they must and that the blob is the one named. Raises PackError."""
        name = f"blob {self._blob.sha256[:12]}…"
        if self._left:
            raise PackError(f"{name} ends early")
        try:
            more = self._stream.read(1)
        except zstandard.ZstdError as error:
            raise PackError(f"{name} has bytes after its end") from error
        if more:
            raise PackError(f"{name} holds more than its manifest says")
        self._counted.drain()
        if self._counted.sha.hexdigest() != self._blob.sha256:
            raise PackError(f"{name} was altered: its SHA-256 is {self._counted.sha.hexdigest()[:12]}…")


class _Counted:
    """A file limited to the next ``left`` bytes, hashed as they are read."""

    def __init__(self, source: IO[bytes], left: int, advance: Callable[[int], None]) -> None:
        self._source = source
        self._advance = advance
        self._left = left
        self.sha = hashlib.sha256()

    def read(self, count: int) -> bytes:
        data = self._source.read(min(count, self._left))
        if not data and self._left:
            raise PackError("a blob is cut short")
        self._left -= len(data)
        self._advance(len(data))
        self.sha.update(data)
        return data

    def drain(self) -> None:
        while self._left:
            self.read(CHUNK)
