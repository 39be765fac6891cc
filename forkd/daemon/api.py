"""Routes that say what they take and give: the same declaration serves requests and writes /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forkd.specs.errors import (
    BadInput,
    BadJson,
    BodyTooLarge,
    ForkdError,
    GuestError,
    GuestTimeout,
    MachineGone,
    NoSpace,
    SandboxNotFound,
    SandboxPaused,
    SnapshotNotFound,
    TooBusy,
)

MAX_BODY = 2 << 20
Handler = Callable[[Request], Awaitable[Response]]
Errors = tuple[type[ForkdError], ...]

IN_SANDBOX: Errors = (SandboxNotFound, SandboxPaused, TooBusy, MachineGone, GuestError, GuestTimeout)
"""What anything asked of a sandbox may meet."""
OF_SNAPSHOT: Errors = (SnapshotNotFound, BadInput, NoSpace)
"""What anything done to a snapshot may meet."""


class ApiRoute(Route):
    """A route with its description: bodies, answers and errors as types; the handler's docstring as its summary.

    ``answers`` maps a status to the type of its JSON body, or None for no body. ``events`` says that, asked with
    ``Accept: application/x-ndjson``, the answer comes as events (with "only": always). ``upload`` lifts the size limit:
    the handler reads the body itself, piece by piece. ``public`` needs no token.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        answers: Mapping[int, Any],
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        errors: Errors = (),
        events: bool | str = False,
        upload: bool = False,
        public: bool = False,
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.method = method
        self.answers = dict(answers)
        self.body = body
        self.query = dict(query or {})
        always: Errors = (BadJson, BodyTooLarge, Unprocessable, WrongMediaType) if body is not None else ()
        self.errors: Errors = (*errors, *always)
        self.events = events
        self.upload = upload
        self.public = public

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a body that is too large before anything is done; one of unknown size is refused while it is read."""
        length = Headers(scope=scope).get("content-length", "0")
        if not self.upload and length.isdigit() and int(length) > MAX_BODY:
            raise BodyTooLarge(f"a body of {length[:20]} bytes is larger than {MAX_BODY}")
        await super().handle(scope, receive, send)


route = ApiRoute


class Unprocessable(BadJson):
    """A body is JSON but not of the documented shape."""

    code = "unprocessable"
    http_status = 422


class WrongMediaType(BadJson):
    """A body is not declared to be JSON, as a form sent by a browser is not."""

    code = "wrong_media_type"
    http_status = 415


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every error: one sentence, a stable code, what to do about it if anything, and extras for programs."""

    error: str
    code: str
    hint: str | None = None
    details: dict[str, Any] = {}
