"""How OCI registries let us in: as they ask for it, basic authentication or a token from where they say."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

import httpx

from forkd.httpclient import HttpClient, LoginAuth, login_header
from forkd.specs.errors import TransferError, Unauthorized
from forkd.specs.transport import Login

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FIELD = re.compile(r'(\w+)="([^"]*)"')


class OciAuth:
    """Says nothing until it is asked; then answers the registry's challenge, once."""

    def __init__(self, http: HttpClient, login: Login | None) -> None:
        self._http = http
        self._login = login
        self._headers: dict[str, str] = {}

    async def headers(self) -> dict[str, str]:
        """What the last challenge led to."""
        return self._headers

    async def refused(self, challenge: str) -> bool:
        """Answer the challenge; False if there is no new answer to give."""
        kind = challenge.partition(" ")[0].lower()
        before = self._headers
        if kind == "bearer":
            fields = dict(_FIELD.findall(challenge))
            self._headers = {"authorization": f"Bearer {await self._token(fields)}"}
        elif self._login is not None:
            self._headers = login_header(self._login)
        return self._headers != before

    async def _token(self, fields: dict[str, str]) -> str:
        realm = fields.get("realm", "")
        try:
            where = httpx.URL(realm)
        except httpx.InvalidURL as error:
            raise TransferError(f"the registry sends us to a malformed URL for a token: {realm[:80]!r}") from error
        if where.scheme != "https" and not (where.scheme == "http" and where.host in LOOPBACK):
            raise TransferError(f"the registry wants us to get a token at {realm[:80]!r}; only https is safe for that")
        if self._login is not None and self._login.token is not None:
            return self._login.token
        answer = await self._http.request("GET", _token_url(where, fields), LoginAuth(self._login))
        try:
            found = json.loads(answer.body)
            token = found.get("token") or found.get("access_token")
        except (ValueError, AttributeError) as error:
            raise TransferError("the token service's answer is not JSON") from error
        if not isinstance(token, str):
            raise Unauthorized("the token service gave no token", hint="forkd hub login URL")
        return token


def _token_url(realm: httpx.URL, fields: dict[str, str]) -> str:
    """Where to ask: the realm, which may have a query of its own, with one ``scope`` for each the challenge lists."""
    asked = [("service", fields["service"])] if "service" in fields else []
    asked += [("scope", scope) for scope in fields.get("scope", "").split()]
    return str(realm.copy_with(query=b"&".join(filter(None, (realm.query, urlencode(asked).encode())))))
