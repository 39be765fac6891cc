"""An agent that knows forkd only as an MCP server: it spawns, works, forks and compares through tools."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

TASK = "Set x to 20 in a sandbox of the snapshot {parent}, fork it twice, double x in one fork, show all; clean up."
COMMAND = [sys.executable, "-m", "forkd", "mcp"]


async def dry_run(parent: str) -> None:
    """Scripted calls over a real connection to `forkd mcp`."""
    from mcp.client.client import Client  # pip install 'forkd[mcp]'
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server = StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], env=dict(os.environ))
    async with Client(stdio_client(server)) as client:

        async def call(name: str, **arguments: Any) -> Any:
            answer = await client.call_tool(name, arguments)
            if answer.is_error:
                raise SystemExit(f"{name}: {answer.content}")
            content = answer.structured_content or {}
            return content["result"] if content.keys() == {"result"} else content

        tools = [tool.name for tool in (await client.list_tools()).tools]
        print("tools for forking:", *sorted(name for name in tools if name in ("branch_sandbox", "fork_sandbox")))
        alive = [row["id"] for row in await call("spawn_sandboxes", snapshot_tag=parent, n=1)]
        try:
            await call("eval_code", sandbox_id=alive[0], code="x = 20")
            alive += [row["id"] for row in await call("fork_sandbox", sandbox_id=alive[0], n=2)]
            await call("eval_code", sandbox_id=alive[1], code="x *= 2")
            for name, sandbox in zip(("source", "first fork", "second fork"), alive, strict=True):
                print(f"{name}: x = {(await call('eval_code', sandbox_id=sandbox, code='x'))['result']}")
        finally:
            killed = [(await call("kill_sandbox", sandbox_id=sandbox))["killed"] for sandbox in alive]
        print("ended:", killed.count(True))


async def run(parent: str) -> None:
    from agents import Agent, Runner  # pip install openai-agents
    from agents.mcp import MCPServerStdio

    parameters: Any = {"command": COMMAND[0], "args": COMMAND[1:], "env": dict(os.environ)}
    async with MCPServerStdio(params=parameters, client_session_timeout_seconds=120) as server:
        agent = Agent(name="operator", instructions="Use the tools.", mcp_servers=[server])
        print((await Runner.run(agent, TASK.format(parent=parent))).final_output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="scripted calls in place of a model's")
    options = parser.parse_args()
    asyncio.run((dry_run if options.dry_run else run)(options.parent))


if __name__ == "__main__":
    main()
