"""Signature version 4: who sends a request, proven without sending the secret."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Identity:
    """A key, its secret and the region it is used in."""

    key: str
    secret: str = field(repr=False)
    region: str = "us-east-1"
    session: str | None = field(default=None, repr=False)


def signed_headers(
    identity: Identity, method: str, host: str, path: str, payload: str, now: datetime, extra: Mapping[str, str]
) -> dict[str, str]:
    """The headers to send, ``authorization`` among them. ``path`` is plain text; ``payload`` a SHA-256 or UNSIGNED."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{identity.region}/s3/aws4_request"
    headers = {name.lower(): value for name, value in extra.items()}
    headers |= {"host": host, "x-amz-date": stamp, "x-amz-content-sha256": payload}
    if identity.session:
        headers["x-amz-security-token"] = identity.session
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in sorted(headers))
    canonical = f"{method}\n{encoded(path)}\n\n{lines}\n{names}\n{payload}"
    to_sign = f"{ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = b"AWS4" + identity.secret.encode()
    for part in (stamp[:8], identity.region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    credential = f"{ALGORITHM} Credential={identity.key}/{scope},SignedHeaders={names},Signature={signature}"
    return {**headers, "authorization": credential}


def encoded(path: str) -> str:
    """A path as it is signed and sent: everything but unreserved characters and slashes escaped."""
    return quote(path, safe="/-_.~")
