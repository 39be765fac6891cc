"""An S3 as its contract says: sigv4 checked, digests checked, objects whole or absent, ranges, conditional writes."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY, SECRET = "test-key", "test-secret"


class Store(ThreadingHTTPServer):
    """Objects in memory; ``fail_next`` answers that many requests with 503 first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.fail_next = 0
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Store

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.server.seen.append(f"{self.command} {self.path} {status}")
        self.send_response(status)
        length = (headers or {}).pop("content-length", str(len(body)))
        for name, value in {**(headers or {}), "content-length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def allowed(self) -> bool:
        """The signature, computed anew from what arrived."""
        given = self.headers.get("authorization", "")
        fields = dict(part.split("=", 1) for part in given.partition(" ")[2].replace(" ", "").split(",") if "=" in part)
        if not fields.get("Credential", "").startswith(f"{KEY}/"):
            return False
        date, region, service, end = fields["Credential"].split("/")[1:]
        names = fields["SignedHeaders"].split(";")
        if not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(names):
            return False
        lines = "".join(f"{name}:{self.headers[name].strip()}\n" for name in names)
        payload = self.headers["x-amz-content-sha256"]
        canonical = "\n".join([self.command, self.path, "", lines, ";".join(names), payload])
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        scope = "/".join([date, region, service, end])
        text = "\n".join(["AWS4-HMAC-SHA256", self.headers["x-amz-date"], scope, digest])
        key = ("AWS4" + SECRET).encode()
        for part in (date, region, service, end):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), fields["Signature"])

    def stopped(self) -> bool:
        if not self.allowed():
            self.close_connection = True
            self.answer(403)
            return True
        with self.server.lock:
            if self.server.fail_next:
                self.server.fail_next -= 1
                self.close_connection = True
                self.answer(503)
                return True
        return False

    def do_GET(self) -> None:
        """An object, or a range of it."""
        if self.stopped():
            return None
        data = self.server.objects.get(self.path)
        if data is None:
            return self.answer(404)
        headers = {"etag": f'"{hashlib.md5(data).hexdigest()}"'}
        asked = self.headers.get("range")
        if asked is None:
            return self.answer(200, data, headers)
        start = int(asked.removeprefix("bytes=").partition("-")[0])
        if start >= len(data):
            return self.answer(416)
        headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self.answer(206, data[start:], headers)

    def do_HEAD(self) -> None:
        """Its size."""
        if self.stopped():
            return
        data = self.server.objects.get(self.path)
        self.answer(404) if data is None else self.answer(200, b"", {"content-length": str(len(data))})

    def do_PUT(self) -> None:
        """Store it, if it is whole, what its digest says, and the condition holds."""
        if self.stopped():
            return None
        wanted = int(self.headers["content-length"])
        data = self.rfile.read(wanted)
        if len(data) != wanted:
            return None  # the sender went away: nothing happens
        payload = self.headers["x-amz-content-sha256"]
        if payload != "UNSIGNED-PAYLOAD" and hashlib.sha256(data).hexdigest() != payload:
            return self.answer(400, b"<Code>XAmzContentSHA256Mismatch</Code>")
        with self.server.lock:
            old = self.server.objects.get(self.path)
            etag = None if old is None else f'"{hashlib.md5(old).hexdigest()}"'
            if self.headers.get("if-none-match") == "*" and old is not None:
                return self.answer(412)
            if (match := self.headers.get("if-match")) is not None and match != etag:
                return self.answer(412)
            self.server.objects[self.path] = data
        return self.answer(200)


@contextmanager
def running_store() -> Iterator[Store]:
    """A store for as long as it is needed."""
    store = Store()
    thread = threading.Thread(target=store.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
