"""Routes of events: what happens, as it happens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon.api import route
from forkd.daemon.routes import runtime_of
from forkd.daemon.wire import Emit, EventStream, query_number, stream_media
from forkd.ops.happenings import follow_events
from forkd.specs.errors import BadInput


async def follow(request: Request) -> Response:
    """What happens, as events, from now on or from those kept behind ``since``; of one ``sandbox`` if it is named.

    Each has ``seq``, ``time`` and ``event``; one that falls behind loses the oldest and gets ``lost`` with their count.
    """
    since = query_number(request, "since") if "since" in request.query_params else None
    sandbox_id = request.query_params.get("sandbox")
    runtime = runtime_of(request)

    async def work(emit: Emit) -> Any:
        async with follow_events(runtime, since, sandbox_id) as events:
            await emit({"event": "following"})
            async for event in events:
                await emit({**event, **({"at": event["seq"]} if "seq" in event else {})})
        return None

    return EventStream(work, stream_media(request))


routes = [
    route(
        "GET",
        "/v1/events",
        follow,
        {200: dict[str, Any]},
        query={"since": int, "sandbox": str},
        events="only",
        errors=(BadInput,),
    ),
]
