"""The served app without any machine: every refusal is JSON, tokens guard everything, every request is written down."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import httpx
import pytest

from forkd.sdk.async_channel import upgrade_headers

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"ci {TOKEN}\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def client(start_daemon: Callable[..., Any], tmp_path: Path) -> Iterator[httpx.Client]:
    """A daemon without tokens on an empty data directory."""
    with httpx.Client(base_url=start_daemon(tmp_path / "data").url, timeout=60) as made:
        yield made


def refusal(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()
    assert {"error", "code", "hint"} <= set(body), body
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, body["code"]


def test_every_refusal_is_json(client: httpx.Client) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    big = b'{"snapshot_tag": "' + b"x" * (3 << 20) + b'"}'
    js = {"content-type": "application/json"}
    post = client.post
    assert refusal(client.get("/nowhere")) == (404, "no_such_route")
    assert refusal(client.get("/v1/sandboxes/")) == (404, "no_such_route")
    assert refusal(client.put("/v1/sandboxes")) == (405, "method_not_allowed")
    assert refusal(post("/v1/sandboxes", content=b"{", headers=js)) == (400, "bad_json")
    assert refusal(post("/v1/sandboxes", content=b"\xff", headers=js)) == (400, "bad_json")
    assert refusal(post("/v1/sandboxes", content=b'{"x":' + b"[" * 100_000, headers=js)) == (400, "bad_json")
    assert refusal(post("/v1/sandboxes", json={"snapshot_tag": 5})) == (422, "unprocessable")
    assert refusal(post("/v1/sandboxes", json=[])) == (422, "unprocessable")
    assert refusal(post("/v1/sandboxes", content=b"a=b", headers=form)) == (415, "wrong_media_type")
    assert refusal(post("/v1/sandboxes", content=big, headers=js)) == (413, "body_too_large")
    assert refusal(post("/v1/sandboxes", content=iter([big]), headers=js)) == (413, "body_too_large")
    assert refusal(post("/v1/sandboxes", json={"snapshot_tag": "none", "n": 0})) == (400, "bad_input")
    assert refusal(post("/v1/sandboxes", json={"snapshot_tag": "none", "n": 1001})) == (400, "bad_input")
    assert refusal(post("/v1/sandboxes", json={"snapshot_tag": "../up"})) == (400, "bad_tag")
    assert refusal(post("/v1/sandboxes", json={"snapshot_tag": "none"})) == (404, "snapshot_not_found")
    assert refusal(client.delete("/v1/snapshots/none?cascade=maybe")) == (400, "bad_input")
    assert refusal(client.get("/v1/sandboxes/sb-none")) == (404, "sandbox_not_found")


def test_pages_of_other_sites_are_refused(client: httpx.Client) -> None:
    assert refusal(client.get("/v1/sandboxes", headers={"host": "["})) == (403, "foreign_origin")
    assert refusal(client.get("/v1/sandboxes", headers={"origin": "http://["})) == (403, "foreign_origin")
    assert refusal(client.get("/v1/sandboxes", headers={"origin": "https://evil.example"})) == (403, "foreign_origin")
    assert refusal(client.get("/v1/sandboxes", headers={"host": "evil.example"})) == (403, "foreign_origin")
    assert client.get("/v1/sandboxes", headers={"origin": str(client.base_url)}).status_code == 200


def test_tokens_guard_everything_but_healthz(
    start_daemon: Callable[..., Any], tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon(tmp_path / "data", "--token-file", tokens)
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        assert client.get("/healthz").json() == {"ok": True}
        paths = client.get("/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).json()["paths"]
        guarded = [*(path for path in paths if path != "/healthz"), "/nowhere", "/healthz/"]
        for path in guarded:
            assert refusal(client.get(path)) == (401, "unauthorized"), path
            assert refusal(client.get(path, headers={"authorization": "Bearer wrong"})) == (401, "unauthorized")
        assert refusal(client.post("/v1/sandboxes", content=b"x" * (3 << 20))) == (401, "unauthorized")
        assert client.get("/version", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    # its owner comes in through the socket, without a token
    environ = {"FORKD_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, "-m", "forkd", "images", "--json"], env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "data" / "audit.log").read_text().splitlines()]
    by = {(line["path"], line["status"]): line for line in lines}
    assert by["/version", 200]["token"] == "ci"
    assert by["/version", 200]["remote"] == "127.0.0.1"
    assert by["/version", 401]["code"] == "unauthorized"
    assert by["/v1/snapshots", 200]["token"] == "owner"
    assert {"ts", "method", "latency_us", "ua", "ids"} <= set(by["/version", 200])
    assert TOKEN not in (tmp_path / "data" / "audit.log").read_text()


def test_a_websocket_without_a_token_gets_401_as_everything_does(
    start_daemon: Callable[..., Any], tmp_path: Path, tokens: str
) -> None:
    daemon = start_daemon(tmp_path / "data", "--token-file", tokens)
    with httpx.Client(base_url=daemon.url, timeout=60, headers=upgrade_headers()) as client:
        assert refusal(client.get("/v1/sandboxes/sb-none/tcp/1")) == (401, "unauthorized")
        allowed = {"authorization": f"Bearer {TOKEN}"}
        assert refusal(client.get("/v1/sandboxes/sb-none/tcp/1", headers=allowed)) == (404, "sandbox_not_found")
    daemon.stop()  # a line is written when its answer has been sent
    lines = (tmp_path / "data" / "audit.log").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == [401, 404]


def h2_request(*headers: tuple[bytes, bytes]) -> bytes:
    """What a client of HTTP/2 that checks nothing sends."""
    config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    connection.send_headers(1, headers, end_stream=True)
    return connection.data_to_send()


GET, CONNECT = (b":method", b"GET"), (b":method", b"CONNECT")
PLAIN, HERE = (b":scheme", b"http"), (b":authority", b"127.0.0.1")
UPGRADE = b"GET /v1/sandboxes/x/tcp/1 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: upgrade\r\n"
WEBSOCKET = (
    UPGRADE + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize(
    "data",
    [
        h2_request(GET, PLAIN, HERE, (b":path", b"/\xff")),
        h2_request((b":method", b"G\xff"), PLAIN, HERE, (b":path", b"/")),
        h2_request(CONNECT, HERE),
        UPGRADE + b"Upgrade: h2c\r\nHTTP2-Settings: A\r\n\r\n",
        WEBSOCKET + b"Sec-WebSocket-Protocol: \xff\r\n\r\n",
        WEBSOCKET + b"Content-Length: 5\r\n\r\nhello",
    ],
    ids=["path", "method", "connect", "settings", "protocol", "body"],
)
def test_bytes_no_server_expects_end_only_their_connection(
    start_daemon: Callable[..., Any], tmp_path: Path, tokens: str, data: bytes
) -> None:
    daemon = start_daemon(tmp_path / "data", "--token-file", tokens)
    with httpx.Client(base_url=daemon.url, timeout=60) as client:
        assert client.get("/healthz").status_code == 200
        with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=60) as stranger:
            stranger.sendall(data)
            try:
                while stranger.recv(65536):
                    pass
            except ConnectionResetError:
                pass  # hung up on, as it may be
        assert client.get("/healthz").status_code == 200, daemon.said()
    assert daemon.process.poll() is None


def refused_start(tmp_path: Path, *flags: str) -> str:
    environ = {"FORKD_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "forkd", "daemon", "--bind", "127.0.0.1:0", *flags]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    assert "is not a socket" in refused_start(tmp_path, "--socket", str(notes))
    assert notes.read_text() == "precious"


def test_a_certificate_that_cannot_be_used_is_refused_in_words(tmp_path: Path) -> None:
    assert "TLS with /nowhere" in refused_start(tmp_path, "--tls-cert", "/nowhere", "--tls-key", "/nowhere")
    empty = tmp_path / "empty.pem"
    empty.touch()
    assert f"TLS with {empty}" in refused_start(tmp_path, "--tls-cert", str(empty), "--tls-key", str(empty))


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "example.invalid:0"])
def test_a_port_for_everybody_needs_tokens(tmp_path: Path, bind: str) -> None:
    environ = {"FORKD_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "forkd", "daemon", "--bind", bind]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--token-file" in done.stderr


def test_tls_guards_tcp(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(cert), *names], check=True, capture_output=True)
    daemon = start_daemon(tmp_path / "data", "--tls-cert", str(cert), "--tls-key", str(key))
    import ssl

    trusting = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=daemon.url, verify=trusting, timeout=60) as client:
        assert daemon.url.startswith("https://")
        assert client.get("/healthz").json() == {"ok": True}


def test_the_api_describes_itself(client: httpx.Client) -> None:
    spec = client.get("/openapi.json").json()
    assert spec["openapi"] == "3.1.0"
    spawn = spec["paths"]["/v1/sandboxes"]["post"]
    assert {"201", "207", "400", "401", "404", "409", "413", "415", "422"} <= set(spawn["responses"])
    page = client.get("/docs").text
    assert "POST /v1/sandboxes" in page
    assert "http" not in page.replace("http-equiv", ""), "the page must fetch nothing from elsewhere"


def test_figures_are_counted(client: httpx.Client) -> None:
    client.get("/v1/sandboxes/sb-none")
    text = client.get("/metrics").text
    assert 'forkd_errors_total{code="sandbox_not_found"} 1.0' in text
    for name in ("forkd_snapshots_total 0.0", "forkd_sandboxes_active 0.0", "forkd_branch_concurrency_cap 4.0"):
        assert name in text
    assert "forkd_spawn_seconds_bucket" in text
    assert "forkd_branch_pause_seconds_bucket" in text
