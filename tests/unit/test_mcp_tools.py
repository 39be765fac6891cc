"""What the MCP tools and the printed snippets say when something is not as it should be."""

from __future__ import annotations

import json
import socket
import sys
import tomllib
from typing import Any

import pytest
import trio
from mcp.server.mcpserver.exceptions import ToolError

from forkd.mcp.clients import CLIENTS, snippet
from forkd.mcp.files import FileTools
from forkd.mcp.server import serve_http
from forkd.mcp.tools import SandboxTools
from forkd.sdk.errors import ControllerError
from forkd.specs.errors import HostNotReady


class Context:
    """A client that hears of progress."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []
        self.times: list[tuple[float, float | None]] = []

    async def report_progress(self, done: float, total: float | None, message: str | None) -> None:
        self.heard.append(message)
        self.times.append((done, total))


class Answers:
    """A controller that begins, and then refuses; its commands end as they are told."""

    def __init__(self, **done: Any) -> None:
        self.done = {"exit_code": 0, "stdout": "", "stderr": "", "timed_out": False, "truncated": False, **done}

    async def create_snapshot(self, tag: str, on_progress: Any, **fields: Any) -> Any:
        on_progress("booting", None)
        raise ControllerError(409, {"error": f"{tag} exists already", "code": "tag_taken", "hint": "another"}, "")

    async def exec_command(self, *args: Any) -> Any:
        return self.done

    async def spawn_sandboxes(self, *args: Any) -> Any:
        await trio.sleep(5)
        raise ControllerError(507, {"error": "there is no room", "code": "no_space", "hint": None}, "")

    async def eval_code(self, *args: Any) -> Any:
        await trio.sleep(5)
        return {"result": "1"}


async def test_long_work_that_is_refused_says_so_in_a_sentence() -> None:
    controller: Any = Answers()
    context: Any = Context()
    with pytest.raises(ToolError, match=r"^x exists already \[tag_taken\] Hint: another$"):
        await SandboxTools(controller).create_snapshot("x", context)
    assert context.heard == ["booting"]


async def test_long_work_tells_how_long_it_takes_whether_it_comes_to_something_or_not(autojump_clock: object) -> None:
    controller: Any = Answers()
    context: Any = Context()
    tools = SandboxTools(controller)
    assert await tools.eval_code("sb", "1", context, 60) == {"result": "1"}
    assert context.times == [(2, 60), (4, 60)]
    with pytest.raises(ToolError, match="there is no room"):
        await tools.spawn_sandboxes("x", context, 3)
    assert (context.heard[-1], context.times[2:]) == ("forking 3 from x", [(2, None), (4, None)])


@pytest.mark.parametrize("done", [{"timed_out": True, "exit_code": 124}, {"truncated": True}])
async def test_a_list_of_files_that_is_not_whole_is_not_compared(done: dict[str, Any]) -> None:
    controller: Any = Answers(stdout="ab  ./x\n", **done)
    with pytest.raises(ToolError, match="too much to compare"):
        await FileTools(controller).diff_sandboxes("one", "two")


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostNotReady, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve_http("local", None, "127.0.0.1", port, lambda line: None)
    with pytest.raises(HostNotReady):
        await serve_http("local", None, "127.0.0.1", 70000, lambda line: None)


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_snippet_names_what_a_client_can_start(name: str) -> None:
    def server(command: str) -> dict[str, Any]:
        _, text = snippet(name, command)
        ((servers),) = (tomllib if name == "codex" else json).loads(text).values()
        found: dict[str, Any] = servers["forkd"]
        return found

    assert (server('/opt/a "b"/forkd')["command"], server("forkd")["args"]) == ('/opt/a "b"/forkd', ["mcp"])
    module = server("/usr/lib/python3/site-packages/forkd/__main__.py")
    assert (module["command"], module["args"]) == (sys.executable, ["-m", "forkd", "mcp"])
