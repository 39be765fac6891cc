"""Small snapshots without machines, a real web server, and one that misbehaves on purpose."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import socketserver
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec

from forkd.config import Settings
from forkd.runtime import Runtime, open_runtime
from forkd.specs.models import FileRef, Hardware, MemoryRef, ParentRef, Platform, Snapshot
from forkd.store import deltas, digests
from forkd.store.snapshots import Stored, content_id

PAGE = 4096
MEM_MIB = 8
PLATFORM = Platform(engine="qemu", engine_version="7.2.0", accelerator="tcg", machine="m", cpu="c", arch="x86_64")


@asynccontextmanager
async def runtime_at(path: Path, **settings: object) -> AsyncIterator[Runtime]:
    """A runtime over a data directory."""
    async with open_runtime(Settings(data_dir=path, **settings)) as runtime:  # type: ignore[arg-type]
        yield runtime


def quiet(step: str, fraction: float | None, total_bytes: int | None = None) -> None:
    """Progress nobody looks at."""


def pages(seed: int, count: int) -> bytes:
    """Pages that compress about as well as memory does."""
    source = random.Random(seed)
    return b"".join(source.randbytes(1024) * 4 for _ in range(count))


def add_disk(runtime: Runtime, seed: int = 1) -> FileRef:
    """A sparse disk of 4 MiB with some data."""
    runtime.disks.root.mkdir(parents=True, exist_ok=True)
    path = runtime.disks.root / f"new-{seed}"
    with open(path, "wb") as out:
        out.truncate(4 << 20)
        out.seek(PAGE * 3)
        out.write(pages(seed, 40))
        out.seek((4 << 20) - PAGE)
        out.write(pages(seed + 1, 1))
    ref = FileRef(digest=digests.sparse256_file(path), size=4 << 20)
    path.rename(runtime.disks.path(ref))
    return ref


def add_snapshot(runtime: Runtime, tag: str, parent: Stored | None = None, seed: int = 7, **fields: object) -> Stored:
    """A snapshot with an image, or with a delta against ``parent``."""
    stage = runtime.snapshots.stage(tag)
    (stage.directory / "vmstate").write_bytes(b"QEVM" + random.Random(seed).randbytes(3000))
    if parent is None:
        path = stage.directory / "memory.bin"
        with open(path, "wb") as out:
            out.truncate(MEM_MIB << 20)
            for offset, count in ((0, 20), (1 << 20, 300), ((MEM_MIB << 20) - PAGE, 1)):
                out.seek(offset)
                out.write(pages(seed + offset, count))
        memory = MemoryRef(kind="image", digest=digests.sparse256_file(path), size=MEM_MIB << 20)
    else:
        path = stage.directory / "memory.delta"
        with open(path, "wb") as out:
            writer = deltas.DeltaWriter(out.fileno(), (MEM_MIB << 20) // PAGE)
            writer.add_data(3, pages(seed, 5))
            writer.add_zero(300, 4)
            info = writer.finish()
        memory = MemoryRef(kind="delta", digest=info.digest, size=info.size, changed_pages=9)
    vmstate = stage.directory / "vmstate"
    made = Snapshot(
        tag=tag,
        content="",
        created_at_unix=1_700_000_000,
        forkd_version="0",
        platform=PLATFORM,
        hardware=Hardware(vcpus=1, mem_mib=MEM_MIB),
        vmstate=FileRef(digest=digests.sha256_file(vmstate), size=vmstate.stat().st_size),
        memory=memory,
        rootfs=parent.manifest.rootfs if parent else add_disk(runtime),
        kernel=None,
        agent_sync="00" * 16,
        image="debian:bookworm",
        parent=ParentRef(tag=parent.manifest.tag, content=parent.manifest.content) if parent else None,
    )
    made = msgspec.structs.replace(made, **fields)
    return stage.commit(msgspec.structs.replace(made, content=content_id(made)))


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a directory; locks and empty directories do not count."""
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory) / name
            if name not in (".lock", "lock"):
                found[str(path.relative_to(root))] = path.read_bytes() if path.is_file() else None
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_nginx(work: Path) -> Iterator[tuple[str, Path]]:
    """nginx serving ``work/www`` at a URL, with PUT allowed."""
    www = work / "www"
    for directory in (www, work / "tmp"):
        directory.mkdir(parents=True, exist_ok=True)
    for path in (work, www, work / "tmp"):
        path.chmod(0o777)
    port = free_port()
    temps = "\n".join(
        f"{name}_temp_path {work}/tmp/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (work / "nginx.conf").write_text(f"""
        daemon off; master_process off; pid {work}/pid; error_log {work}/error.log;
        events {{}}
        http {{
            access_log off; {temps}
            server {{
                listen 127.0.0.1:{port};
                location / {{
                    root {www}; dav_methods PUT; create_full_put_path on; client_max_body_size 0;
                }}
            }}
        }}
    """)
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with subprocess.Popen(["nginx", "-c", str(work / "nginx.conf"), "-p", str(work)], env=env) as process:
        try:
            wait_for_port(port, process)
            yield f"http://127.0.0.1:{port}", www
        finally:
            process.terminate()
            process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert process.poll() is None, f"the server ended with {process.returncode}"


Misbehave = Callable[["Faulty", str, int], bool]
"""Called for the n-th request of a path; answers it wrongly and returns True, or leaves it alone."""


@dataclass
class FaultyServer:
    """A directory over HTTP/1.1 with Range; ``misbehave`` may answer instead. ``asked`` counts requests by path."""

    url: str
    root: Path
    misbehave: Misbehave | None = None
    asked: dict[str, int] = field(default_factory=dict)
    sent: int = 0


class Faulty(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    state: FaultyServer

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        number = self.state.asked[name] = self.state.asked.get(name, 0) + 1
        if self.state.misbehave is not None and self.state.misbehave(self, name, number):
            return
        path = self.state.root / name
        if not path.is_file():
            self.answer(404, b"")
            return
        data = path.read_bytes()
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        extra = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        self.answer(206 if begin else 200, data[begin:], **extra)

    do_HEAD = do_GET

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        """A whole answer; ``cut`` bytes fewer than announced if asked."""
        announced = headers.pop("length", str(len(data)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", announced)
        self.end_headers()
        if self.command != "HEAD":
            self.state.sent += len(data)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(data)

    def hang_up(self) -> None:
        """Close the connection, now."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients hang up; that is what is tested


@contextmanager
def faulty_server(root: Path, misbehave: Misbehave | None = None) -> Iterator[FaultyServer]:
    """A server of ``root`` that misbehaves."""
    handler = type("Handler", (Faulty,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        state = FaultyServer(f"http://127.0.0.1:{server.server_address[1]}", root, misbehave)
        handler.state = state  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
