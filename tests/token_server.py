"""A token service after the distribution token specification; registries that know its key verify for themselves."""

from __future__ import annotations

import base64
import datetime
import json
import socketserver
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

ISSUER = "forkd tests"
SERVICE = "registry.test"
ALL = frozenset({"pull", "push", "*"})


@dataclass(slots=True)
class TokenServer:
    """Gives tokens for what its users may do; ``asked`` has each request's user and scopes, for tests to look at."""

    url: str
    certificates: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    passwords: dict[str, str] = field(default_factory=lambda: {"me": "secret"})
    may: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """Actions allowed, by user ("" is nobody) and repository; else users may do everything and nobody nothing."""
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    seconds: int = 60

    def auth_config(self) -> dict[str, Any]:
        """What a registry is told."""
        return {
            "token": {
                "realm": f"{self.url}/token?zone=test",
                "service": SERVICE,
                "issuer": ISSUER,
                "rootcertbundle": str(self.certificates),
            }
        }

    def token(self, user: str, scopes: tuple[str, ...]) -> str:
        """A signed token for as much of the scopes as the user may have."""
        now = int(time.time())
        der = self.certificate.public_bytes(serialization.Encoding.DER)
        head = {"typ": "JWT", "alg": "ES256", "x5c": [base64.b64encode(der).decode()]}
        claims = {
            "iss": ISSUER,
            "sub": user,
            "aud": SERVICE,
            "nbf": now - 10,
            "iat": now,
            "exp": now + self.seconds,
            "jti": uuid.uuid4().hex,
            "access": [self._access(user, scope) for scope in scopes],
        }
        signed = f"{_packed(json.dumps(head).encode())}.{_packed(json.dumps(claims).encode())}"
        r, s = utils.decode_dss_signature(self.key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_packed(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"

    def _access(self, user: str, scope: str) -> dict[str, Any]:
        kind, _, rest = scope.partition(":")
        name, _, actions = rest.rpartition(":")
        allowed = self.may.get((user, name), ALL if user else frozenset())
        return {"type": kind, "name": name, "actions": sorted(allowed & set(actions.split(",")))}


class _Handler(BaseHTTPRequestHandler):
    state: TokenServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        user, right = self._user()
        if parts.path != "/token" or query.get("zone") != ["test"] or query.get("service") != [SERVICE]:
            self._answer(400, {"details": "not a request for a token of this service"})
            return
        if not right:
            self._answer(401, {"details": "wrong user name or password"})
            return
        scopes = tuple(query.get("scope", []))
        self.state.asked.append((user, scopes))
        if any(" " in scope for scope in scopes):
            self._answer(400, {"details": "one scope a parameter"})
            return
        self._answer(200, {"token": self.state.token(user, scopes), "expires_in": self.state.seconds})

    def _user(self) -> tuple[str, bool]:
        kind, _, pair = self.headers.get("Authorization", "").partition(" ")
        if not kind:
            return "", True
        name, _, password = base64.b64decode(pair).decode().partition(":") if kind == "Basic" else ("", "", "")
        return name, bool(name) and self.state.passwords.get(name) == password

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True


@contextmanager
def running_token_server(work: Path) -> Iterator[TokenServer]:
    """One on a free port of 127.0.0.1, with a key of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(key)
    path = work / "tokens.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    handler = type("Handler", (_Handler,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        state = TokenServer(f"http://127.0.0.1:{server.server_address[1]}", path, key, certificate)
        handler.state = state  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, ISSUER)])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
