"""Runs every tool of the published MCP server, in its own environment, with the mcp client, against FORKD_URL."""

import asyncio
import json
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

TAG = "python-numpy"
TOOLS = {
    "spawn_sandboxes",
    "exec_command",
    "eval_code",
    "branch_sandbox",
    "list_snapshots",
    "list_sandboxes",
    "get_sandbox",
    "kill_sandbox",
    "create_snapshot",
    "wait_for_text",
    "ping_sandbox",
}


async def main() -> None:
    server = StdioServerParameters(command=sys.argv[1], env={**os.environ})
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        assert {tool.name for tool in (await session.list_tools()).tools} == TOOLS

        async def call(name: str, **arguments: object) -> object:
            answer = await session.call_tool(name, arguments)
            assert not answer.isError, (name, answer.content)
            content = answer.structuredContent
            if content is not None:
                return content["result"] if content.keys() == {"result"} else content
            values = [json.loads(part.text) for part in answer.content]
            return values[0] if len(values) == 1 else values

        def one(value: object) -> dict:
            return value[0] if isinstance(value, list) else value

        assert TAG in str(await call("list_snapshots"))
        child = one(await call("spawn_sandboxes", snapshot_tag=TAG, memory_limit_mib=1024))["id"]
        assert child in str(await call("list_sandboxes"))
        assert one(await call("get_sandbox", sandbox_id=child))["id"] == child
        assert one(await call("ping_sandbox", sandbox_id=child))["pong"] is True
        ran = one(await call("exec_command", sandbox_id=child, args=["sh", "-c", "echo started > /tmp/log; echo out"]))
        assert (ran["stdout"], ran["exit_code"]) == ("out\n", 0)
        assert one(await call("eval_code", sandbox_id=child, code="x = 20; x + 1"))["result"] == "21"
        found = one(await call("wait_for_text", sandbox_id=child, path="/tmp/log", marker="started", timeout_secs=20))
        assert found["found"] is True
        tag = f"mcp-{os.getpid()}"
        assert one(await call("branch_sandbox", sandbox_id=child, tag=tag, mode="diff"))["tag"] == tag
        assert one(await call("kill_sandbox", sandbox_id=child))["killed"] is True
        refused = await session.call_tool(
            "create_snapshot", {"tag": "t", "kernel": "/nonexistent", "rootfs": "/nonexistent"}
        )
        assert refused.isError
    print("published mcp server ok", tag)


asyncio.run(main())
