"""HTTP with patience: retries, continued downloads, careful redirects. For plugins that speak to servers."""

from __future__ import annotations

import base64
import email.utils
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin, urlsplit

import httpx
import trio

from forkd.specs.errors import NotFound, TransferError, Unauthorized
from forkd.specs.transport import Body, Login

MAX_REDIRECTS = 5
MAX_RESUMES = 1000
BUSY = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long: attempts without any progress, seconds between them, seconds of silence to bear."""

    attempts: int = 6
    first_delay: float = 0.5
    longest_delay: float = 30.0
    connect: float = 15.0
    silence: float = 60.0


class Auth(Protocol):
    """Who we are to a server."""

    async def headers(self) -> dict[str, str]:
        """Headers to send to the host that was asked for, and to no other."""

    async def refused(self, challenge: str) -> bool:
        """The server said 401 with this challenge; whether trying once more makes sense."""


class LoginAuth:
    """A bearer token or basic authentication, as given."""

    def __init__(self, login: Login | None) -> None:
        self._headers = login_header(login)

    async def headers(self) -> dict[str, str]:
        """The one header."""
        return self._headers

    async def refused(self, challenge: str) -> bool:
        """There is no other."""
        return False


def login_header(login: Login | None) -> dict[str, str]:
    """The Authorization header of a login."""
    if login is None:
        return {}
    if login.token is not None:
        return {"authorization": f"Bearer {login.token}"}
    pair = base64.b64encode(f"{login.username}:{login.password or ''}".encode()).decode()
    return {"authorization": f"Basic {pair}"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole, small answer."""

    status: int
    headers: httpx.Headers
    body: bytes
    url: str


class _Transient(Exception):
    """Something that may be better in a moment; ``after`` is when the server wants to be asked again."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class HttpClient:
    """Requests that end in an answer, or in one of our errors. Makes a connection for each."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()

    async def request(
        self,
        method: str,
        url: str,
        auth: Auth,
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        accept: tuple[int, ...] = (200,),
        limit: int = 1 << 20,
    ) -> Answer:
        """Ask and read the answer, of at most ``limit`` bytes; statuses not in ``accept`` raise."""
        attempt = 0
        while True:
            try:
                async with self._open(method, url, auth, headers or {}, body, accept) as response:
                    found = bytearray()
                    async with body_of(response) as chunks:
                        async for chunk in chunks:
                            found += chunk
                            if len(found) > limit:
                                raise TransferError(f"{_shown(url)} answered with more than {limit} bytes")
                    return Answer(response.status_code, response.headers, bytes(found), str(response.url))
            except (_Transient, httpx.TransportError) as error:
                attempt += 1
                await self._wait(url, attempt, error)

    async def read(self, url: str, auth: Auth, offset: int = 0, size: int | None = None) -> AsyncGenerator[bytes, None]:
        """The bytes of ``url`` from ``offset`` (to ``size``, if known), continued where a connection broke."""
        position, attempt, resumes = offset, 0, 0
        while size is None or position < size:
            try:
                wanted = {"range": f"bytes={position}-"} if position else {}
                async with self._open("GET", url, auth, wanted, None, (200, 206, 416)) as response:
                    skip = _check_range(response, position, size)
                    if response.status_code == 416:
                        return  # there is nothing more
                    async with body_of(response) as chunks:
                        async for chunk in chunks:
                            fresh, skip = chunk[skip:], max(0, skip - len(chunk))
                            if size is not None and position + len(fresh) > size:
                                raise TransferError(f"{_shown(url)} sends more than the {size} bytes it should have")
                            if fresh:
                                position, attempt = position + len(fresh), 0
                                yield fresh
                if size is None:
                    return
                if position < size:
                    raise _Transient(f"it ended after {position} of {size} bytes")
            except (_Transient, httpx.TransportError) as error:
                attempt, resumes = attempt + 1, resumes + 1
                if resumes > MAX_RESUMES:
                    raise TransferError(f"{_shown(url)} broke off {resumes} times") from error
                await self._wait(url, attempt, error)

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        url: str,
        auth: Auth,
        headers: Mapping[str, str],
        body: Body | None,
        accept: tuple[int, ...],
    ) -> AsyncIterator[httpx.Response]:
        patience = self._patience
        timeout = httpx.Timeout(patience.silence, connect=patience.connect)
        async with httpx.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=True) as client:
            origin, asked_again = _origin(url), False
            redirects = 0
            while True:
                ours = _origin(url) == origin
                own = await auth.headers() if ours else {}
                sent = {"accept-encoding": "identity", **headers, **own}
                content = body(0) if body is not None else None
                async with client.stream(method, url, headers=sent, content=content) as response:
                    if response.status_code in (301, 302, 303, 307, 308):
                        redirects += 1
                        url = _redirected(method, url, response, redirects)
                        continue
                    if response.status_code == 401 and 401 not in accept and ours and not asked_again:
                        asked_again = True
                        if await auth.refused(response.headers.get("www-authenticate", "")):
                            continue
                    if response.status_code not in accept:
                        await _raise(url, response)
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise TransferError(f"{_shown(url)} answered in an encoding nobody asked for")
                    yield response
                    return

    async def _wait(self, url: str, attempt: int, error: Exception) -> None:
        """Sleep before the next attempt, or give up."""
        patience = self._patience
        reason = str(error) or type(error).__name__
        after = getattr(error, "after", None)
        if after is not None and after > 10 * patience.longest_delay:
            raise TransferError(f"{_shown(url)} wants to be left alone for {after:.0f} s: {reason}") from error
        if attempt >= patience.attempts:
            raise TransferError(
                f"{_shown(url)} could not be reached in {attempt} attempts: {reason}",
                hint="what has arrived is kept; run the same command again to continue",
            ) from error
        delay = min(patience.first_delay * 2 ** (attempt - 1), patience.longest_delay)
        await trio.sleep(delay if after is None else after)


@asynccontextmanager
async def body_of(response: httpx.Response, piece: int | None = None) -> AsyncIterator[AsyncIterator[bytes]]:
    """The bytes of an answer, in pieces of a size or as they come.

    They may be left unread: httpx's nested generators are brought to their end.
    """
    chunks = response.aiter_raw(piece)
    try:
        yield chunks
    finally:
        with trio.CancelScope(shield=True):
            await response.aclose()
        with suppress(httpx.HTTPError, httpx.StreamError):  # the connection is closed: they end at once
            async for _ in chunks:
                pass


def _check_range(response: httpx.Response, position: int, size: int | None) -> int:
    """How many bytes to skip because the server did not begin where we asked it to. Raises TransferError."""
    url = _shown(str(response.url))
    declared = response.headers.get("content-length", "")
    if response.status_code == 416:
        if size is None:
            return 0  # it ends here or before; whether that is right is the caller's to say
        raise TransferError(f"{url} is shorter than the part of it that is here already")
    begin = 0
    if response.status_code == 206:
        given = response.headers.get("content-range", "").partition("-")[0]
        if given != f"bytes {position}":
            raise TransferError(f"{url} sent another part than was asked for ({given[:40]!r}, not {position})")
        begin = position
    if size is not None and declared.isdigit() and int(declared) != size - begin:
        raise TransferError(f"{url} says it has {int(declared) + begin} bytes; {size} are right")
    return position - begin


def _redirected(method: str, url: str, response: httpx.Response, count: int) -> str:
    location = response.headers.get("location", "")
    try:
        target: str = urljoin(url, location)
        old, new = urlsplit(url), urlsplit(target)
        httpx.URL(target)
    except (ValueError, httpx.InvalidURL) as error:
        raise TransferError(f"{_shown(url)} redirects to {location[:80]!r}, which is no URL") from error
    if count > MAX_REDIRECTS:
        raise TransferError(f"{_shown(url)} redirects again and again")
    if method not in ("GET", "HEAD") and response.status_code not in (307, 308):
        raise TransferError(f"{_shown(url)} redirects a {method} to {_shown(target)}; refused")
    if new.scheme != old.scheme and (old.scheme, new.scheme) != ("http", "https"):
        raise TransferError(
            f"{_shown(url)} redirects to {_shown(target)}, another scheme; refused",
            hint="if you trust that address, use it directly",
        )
    return target


async def _raise(url: str, response: httpx.Response) -> None:
    status = response.status_code
    if status in BUSY:
        raise _Transient(f"HTTP {status}", _retry_after(response.headers.get("retry-after")))
    if status in (401, 403):
        raise Unauthorized(f"{_shown(url)} does not let us in (HTTP {status})", hint="forkd hub login URL")
    if status in (404, 410):
        raise NotFound(f"{_shown(url)} is not there")
    said = bytearray()
    async with body_of(response) as chunks:
        async for chunk in chunks:
            said += chunk
            if len(said) > 400:
                break
    text = "".join(char if char.isprintable() else " " for char in said.decode(errors="replace"))[:200].strip()
    raise TransferError(f"{_shown(url)} answered HTTP {status}{': ' + text if text else ''}")


def _retry_after(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Seconds to wait from a Retry-After header: a number, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now())
    except (ValueError, OverflowError):
        return None


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _shown(url: str) -> str:
    """A URL without its query and credentials: presigned URLs and passwords are secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
