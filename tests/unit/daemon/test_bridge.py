"""The agent's port: whatever a client sends, it gets an answer and the daemon lives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing

from forkd.daemon.bridge import Bridge
from forkd.ops import execute


async def answer(line: bytes) -> dict[str, Any]:
    client, server = trio.testing.memory_stream_pair()
    bridge = Bridge(cast(Any, SimpleNamespace()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge._talk, "sb-1", cast(Any, server))
        await client.send_all(line)
        return cast(dict[str, Any], msgspec.json.decode(await client.receive_some(65536)))


@pytest.mark.parametrize("line", [b"[\n", b"5\n", b"\xff\n", b'{"action":"ping","x":' + b"[" * 100_000 + b"\n"])
async def test_what_is_no_request_is_said_so(line: bytes) -> None:
    assert "not a request" in (await answer(line))["error"]


async def test_an_error_nobody_foresaw_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ping(*_: Any) -> dict[str, Any]:
        raise KeyError("unforeseen")

    monkeypatch.setattr(execute, "ping", ping)
    assert await answer(b'{"action": "ping"}\n') == {
        "error": "internal error: KeyError",
        "code": "internal",
        "hint": "see the daemon's log",
        "exit_code": 1,
    }
