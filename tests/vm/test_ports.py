"""Servers inside a guest without a network, reached through the daemon: HTTP, WebSockets, plain TCP."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Daemon

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
# A server for all of it in one file of standard library: pages, redirects, uploads, and a WebSocket that echoes.
SERVER = r"""
import base64, hashlib, http.server, socketserver, threading
SEEN = threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.echo()
        if self.path == "/moved":
            self.send_response(302); self.send_header("Location", "/page"); self.send_header("Content-Length", "0")
            return self.end_headers()
        if self.path == "/after":  # the page is whole when it has shown what came over its WebSocket
            SEEN.wait(60); self.send_response(204); self.send_header("Content-Length", "0")
            return self.end_headers()
        page = ("<title>guest</title><h1 id=h>waiting</h1><script>const w = new WebSocket("
            "location.href.replace('http', 'ws').replace('page', 'ws')); w.onopen = () => w.send('from the browser');"
            "w.onmessage = (m) => { if (w.shown) return; w.shown = true; w.send('seen');"
            "document.getElementById('h').textContent = m.data; };</script><img src=after>").encode()
        body = page if self.path == "/page" else repr((self.path, sorted(self.headers.keys()))).encode()
        self.send_response(200); self.send_header("Content-Type", "text/html")
        self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    def do_POST(self):
        size, digest = int(self.headers["Content-Length"]), hashlib.sha256()
        while size:
            data = self.rfile.read(min(size, 65536)); digest.update(data); size -= len(data)
        body = digest.hexdigest().encode()
        self.send_response(201); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def echo(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101); self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2: return
            size = head[1] & 127
            if size == 126: size = int.from_bytes(self.rfile.read(2), "big")
            mask, data = self.rfile.read(4), None
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(size)))
            if head[0] & 15 == 8: self.close_connection = True; return
            if data == b"seen": SEEN.set()
            data = b"echo " + data
            size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
            self.wfile.write(head[:1] + size + data)
    def log_message(self, *args): pass
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(("127.0.0.1", 8080), Handler).serve_forever()
"""


class Served:
    """A sandbox of a daemon with the server above at port 8080."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = httpx.Client(base_url=daemon.url, timeout=60)
        self.id = self.client.post("/v1/sandboxes", json={"snapshot_tag": PARENT}).json()[0]["id"]
        base = f"/v1/sandboxes/{self.id}"
        assert self.client.put(f"{base}/files?path=/srv/server.py", content=SERVER.encode()).status_code == 201
        self.client.post(f"{base}/processes", json={"args": ["python3", "/srv/server.py"]}).raise_for_status()
        self.base = f"{base}/ports/8080"
        while self.client.get(f"{self.base}/").status_code == 502:
            pass


@pytest.fixture
def served(daemon: Daemon) -> Iterator[Served]:
    made = Served(daemon)
    yield made
    made.client.close()


def test_a_guest_without_a_network_serves_the_world(served: Served, tmp_path: Path) -> None:
    url = f"{served.daemon.url}{served.base}"
    curl = subprocess.run(["curl", "-sf", f"{url}/a%2Fb?q=%20x"], capture_output=True, text=True, check=True).stdout
    assert "'/a%2Fb?q=%20x'" in curl
    assert "x-forwarded-prefix" in curl
    answer = served.client.get(f"{served.base}/moved", headers={"authorization": "Bearer secret"})
    assert answer.headers["location"] == f"{served.base}/page"
    seen = served.client.get(f"{served.base}/", headers={"authorization": "Bearer secret"}).text
    assert "uthorization" not in seen
    big = bytes(range(256)) * 20000
    import hashlib

    assert served.client.post(f"{served.base}/up", content=big).text == hashlib.sha256(big).hexdigest()
    assert served.client.get(served.base).status_code == 307
    nothing = served.client.get(f"/v1/sandboxes/{served.id}/ports/1/")
    assert (nothing.status_code, nothing.json()["code"]) == (502, "port_closed")
    wrong = served.client.get(f"/v1/sandboxes/{served.id}/ports/99999/")
    assert (wrong.status_code, wrong.json()["code"]) == (400, "bad_input")
    _websockets(served)
    _port_forward(served)


def _websockets(served: Served) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    url = f"{served.daemon.url}{served.base}/ws".replace("http", "ws")
    with connect(url) as socket:
        for message in ("hello", b"\x00\xff", "x" * 10000):
            socket.send(message)
            back: Any = socket.recv()
            assert back == ("echo " + message if isinstance(message, str) else b"echo " + message)
    terminal = f"{served.daemon.url}/v1/sandboxes/{served.id}/terminal".replace("http", "ws")
    with connect(terminal) as socket:
        assert json.loads(socket.recv())["event"] == "started"
        socket.send(b"echo $((6 * 7)); exit 3\n")
        said, last = b"", ""
        for message in socket:
            if isinstance(message, bytes):
                said += message[1:]
            else:
                last = message
        assert b"\r42\r\n" in said.replace(b"\n42", b"\r42")
        assert json.loads(last)["process"]["exit_code"] == 3
    with pytest.raises(InvalidStatus):  # a page of somewhere else must not get a shell
        connect(terminal, origin="http://evil.example")  # type: ignore[arg-type]


def _port_forward(served: Served) -> None:
    command = [sys.executable, "-m", "forkd", "port-forward", served.id, "0:8080", "--daemon-url", served.daemon.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as forward:
        assert forward.stderr is not None
        try:
            address = forward.stderr.readline().split()[0]
            assert "'/there'" in httpx.get(f"http://{address}/there", timeout=60).text
        finally:
            forward.terminate()


# Nothing that calls home, and nothing that is left: what the browser is told besides the page.
BROWSER = [
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: apt-get install chromium")
def test_a_real_browser_shows_the_page_and_its_websocket_answers(served: Served, tmp_path: Path) -> None:
    shown = subprocess.run(
        [
            *BROWSER,
            *(f"--user-data-dir={tmp_path}/profile", "--timeout=120000"),
            *("--dump-dom", f"{served.daemon.url}{served.base}/page"),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "<title>guest</title>" in shown.stdout, shown.stdout + shown.stderr[-3000:]
    assert "echo from the browser" in shown.stdout, shown.stdout + shown.stderr[-3000:]
