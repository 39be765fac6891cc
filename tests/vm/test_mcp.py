"""Agents' clients: the mcp package's client runs every tool of ours, and of the published server, on real machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from forkd.mcp.clients import CLIENTS

pytestmark = pytest.mark.vm
ROOT = Path(__file__).parents[2]
PARENT = "python-numpy"
DOCUMENTED = {
    "spawn_sandboxes": {"snapshot_tag", "n", "per_child_netns", "memory_limit_mib", "prewarm", "live_fork"},
    "exec_command": {"sandbox_id", "args", "timeout_secs"},
    "eval_code": {"sandbox_id", "code"},
    "branch_sandbox": {"sandbox_id", "tag", "diff", "measure_diff", "mode", "wait"},
    "list_snapshots": set(),
    "list_sandboxes": set(),
    "get_sandbox": {"sandbox_id"},
    "kill_sandbox": {"sandbox_id"},
    "create_snapshot": {"tag", "kernel", "rootfs", "rw", "tap", "boot_wait_secs"},
    "wait_for_text": {"sandbox_id", "path", "marker", "timeout_secs", "poll_interval_ms"},
    "ping_sandbox": {"sandbox_id"},
}
"""Tools and parameters the reference documents."""


@asynccontextmanager
async def stdio(**environ: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "forkd", "mcp"], env={**os.environ, **environ}
    )
    async with Client(stdio_client(parameters)) as client:
        yield client


async def call(client: Client, name: str, **arguments: Any) -> Any:
    """A tool's structured answer."""
    answer = await client.call_tool(name, arguments)
    assert not answer.is_error, (name, answer.content)
    assert answer.structured_content is not None, name
    content = answer.structured_content
    return content["result"] if content.keys() == {"result"} else content


async def test_every_tool_works_end_to_end_on_stdio(daemon: Any) -> None:
    async with stdio(FORKD_URL=daemon.url) as client:
        (first, second) = await call(client, "spawn_sandboxes", snapshot_tag=PARENT, n=2)
        one, two = first["id"], second["id"]
        assert {row["id"] for row in await call(client, "list_sandboxes")} >= {one, two}
        assert (await call(client, "get_sandbox", sandbox_id=one))["snapshot_tag"] == PARENT
        assert (await call(client, "ping_sandbox", sandbox_id=one))["pong"] is True
        assert PARENT in {row["tag"] for row in await call(client, "list_snapshots")}
        ran = await call(client, "exec_command", sandbox_id=one, args=["sh", "-c", "cat; exit 3"], stdin="in")
        assert (ran["stdout"], ran["exit_code"]) == ("in", 3)
        assert (await call(client, "eval_code", sandbox_id=one, code="y = 6; y * 7"))["result"] == "42"

        await call(client, "write_file", sandbox_id=one, path="/root/a/note", text="hello")
        assert (await call(client, "read_file", sandbox_id=one, path="/root/a/note"))["text"] == "hello"
        await call(client, "write_file", sandbox_id=one, path="/root/bytes", content_base64="/wA=", mode="0600")
        assert (await call(client, "read_file", sandbox_id=one, path="/root/bytes"))["base64"] == "/wA="
        names = {row["name"] for row in await call(client, "list_files", sandbox_id=one, path="/root")}
        assert names >= {"a", "bytes"}
        changed = await call(client, "diff_sandboxes", first=one, second=two, path="/root")
        assert changed["only_first"] == ["a/note", "bytes"]
        log = ["sh", "-c", "(sleep 1; echo server is up) > /tmp/log 2>&1 &"]
        await call(client, "exec_command", sandbox_id=one, args=log)
        waited = await call(client, "wait_for_text", sandbox_id=one, path="/tmp/log", marker="is up", timeout_secs=60)
        assert waited["found"] and "server is up" in waited["last_excerpt"]
        missed = await call(client, "wait_for_text", sandbox_id=one, path="/no", marker="x", timeout_secs=0.3)
        assert missed["found"] is False

        branched = await call(client, "branch_sandbox", sandbox_id=one, mode="diff")
        forked = await call(client, "fork_sandbox", sandbox_id=one, n=2)
        grandchild = forked[0]["id"]
        assert (await call(client, "eval_code", sandbox_id=grandchild, code="y"))["result"] == "6"
        listed = await client.read_resource("forkd://snapshots")
        assert branched["tag"] in listed.contents[0].text  # type: ignore[union-attr]
        shown = await client.read_resource(f"forkd://snapshots/{branched['tag']}")
        assert PARENT in shown.contents[0].text  # type: ignore[union-attr]
        for sandbox in (one, two, *(row["id"] for row in forked)):
            assert (await call(client, "kill_sandbox", sandbox_id=sandbox))["killed"] is True
        assert (await call(client, "delete_snapshot", tag=branched["tag"]))["deleted"] is True


async def test_long_work_tells_how_far_it_is(daemon: Any, fresh_tag: Callable[[str], str]) -> None:
    heard: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async with stdio(FORKD_URL=daemon.url) as client:
        tag = fresh_tag("mcp")
        made = {"tag": tag, "image": "debian:bookworm", "extras": ["python3-numpy"], "mem_size_mib": 256}
        answer = await client.call_tool("create_snapshot", made, progress_callback=progress)
        assert not answer.is_error, answer.content
    assert any("booting" in step for step in heard), heard
    assert "capturing" in heard


async def test_schemas_are_sound_and_carry_the_documented_parameters() -> None:
    async with stdio(FORKD_URL="local") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        templates = (await client.list_resource_templates()).resource_templates
    assert DOCUMENTED.keys() <= tools.keys()
    for name, parameters in DOCUMENTED.items():
        assert parameters <= tools[name].input_schema.get("properties", {}).keys(), name
    for name, tool in tools.items():
        assert re.fullmatch(r"[a-z_]{1,64}", name)
        assert tool.description and tool.annotations is not None
        assert tool.input_schema["type"] == "object"
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        assert tool.output_schema is not None, name
        jsonschema.Draft202012Validator.check_schema(tool.output_schema)
    assert [row.uri_template for row in templates] == ["forkd://snapshots/{tag}"]


async def test_refusals_reach_the_model_as_sentences(daemon: Any) -> None:
    async with stdio(FORKD_URL=daemon.url) as client:
        for name, arguments, said in (
            ("spawn_sandboxes", {"snapshot_tag": "no-such"}, "[snapshot_not_found]"),
            ("eval_code", {"sandbox_id": "sb-none", "code": "1"}, "[sandbox_not_found]"),
            ("spawn_sandboxes", {"snapshot_tag": PARENT, "n": 0}, "greater than or equal to 1"),
            ("write_file", {"sandbox_id": "x", "path": "/x"}, "either text or content_base64"),
        ):
            answer = await client.call_tool(name, arguments)
            assert answer.is_error
            assert said in answer.content[0].text, answer.content  # type: ignore[union-attr]


async def test_streamable_http_serves_several_clients(daemon: Any) -> None:
    environ = {**os.environ, "FORKD_URL": daemon.url}
    command = [sys.executable, "-m", "forkd", "mcp", "--http", "127.0.0.1:0"]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(_started, command, environ)
        try:
            said = b""
            while b"/mcp" not in said:
                said += await process.stderr.receive_some()
            url = said.decode().split()[-1]
            async with Client(url) as one, Client(url) as two:
                (child,) = await call(one, "spawn_sandboxes", snapshot_tag=PARENT)
                await call(one, "eval_code", sandbox_id=child["id"], code="z = 1")
                assert (await call(two, "eval_code", sandbox_id=child["id"], code="z + 1"))["result"] == "2"
                await call(two, "kill_sandbox", sandbox_id=child["id"])
        finally:
            process.terminate()


async def _started(
    command: list[str], environ: dict[str, str], task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED
) -> None:
    process = await trio.lowlevel.open_process(command, env=environ, stderr=subprocess.PIPE)
    task_status.started(process)
    await process.wait()


@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_snippet_for_every_client_starts_this_program(name: str, forkd: Any) -> None:
    done = forkd("mcp", "--print-config", name)
    assert done.returncode == 0, done.stderr
    if name == "codex":
        import tomllib

        server = tomllib.loads(done.stdout)["mcp_servers"]["forkd"]
    else:
        import json

        ((servers),) = json.loads(done.stdout).values()
        server = servers["forkd"]
    asked = subprocess.run([server["command"], *server["args"], "--help"], capture_output=True, text=True, timeout=60)
    assert "Model Context Protocol" in asked.stdout, asked.stderr


def test_it_is_served_to_this_machine_only(forkd: Any) -> None:
    done = forkd("mcp", "--http", "0.0.0.0:9999")
    assert done.returncode == 2
    assert "hint" in done.stderr


@pytest.fixture(scope="session")
def published() -> Path:
    """An environment that has the published MCP server and nothing of ours."""
    venv = ROOT / ".work" / "published-mcp-0.2.1"
    if not (venv / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", "forkd-mcp==0.2.1"]
        subprocess.run(pip, check=True)
        (venv / "done").touch()
    return venv / "bin"


def test_the_published_server_drives_our_daemon(published: Path, daemon: Any, forkd: Any) -> None:
    script = ROOT / "tests" / "third_party" / "mcp_client.py"
    environ = {"FORKD_URL": daemon.url, "PATH": f"{published}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/root")}
    command = [str(published / "python"), str(script), str(published / "forkd-mcp")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout + daemon.said()
    assert "published mcp server ok" in done.stdout
    forkd("rmi", done.stdout.split()[-1])
