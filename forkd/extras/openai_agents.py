"""A sandbox as tools of the OpenAI Agents SDK, and handoffs in which the next agent gets a fork of it."""

from __future__ import annotations

from typing import Any

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox, framework


def sandbox_tools(sandbox: Sandbox | Toolbox) -> list[Any]:
    """Function tools for an ``Agent(tools=…)``."""
    agents = framework("agents", "openai-agents")
    box = sandbox if isinstance(sandbox, Toolbox) else Toolbox(sandbox)
    return [agents.function_tool(function) for function in box.functions()]


def forking_handoff(agent: Any, box: Toolbox, source: Toolbox, **options: Any) -> Any:
    """A handoff to ``agent``, whose tools are those of ``box``: when it happens, ``box`` gets a fork of ``source``.

    The agent goes on from the very state it was handed, and cannot disturb the one that handed over. Whoever runs the
    agents ends the forks (``box.sandbox.kill()``). ``options`` are those of ``agents.handoff``.
    """
    agents = framework("agents", "openai-agents")

    def on_handoff(context: Any) -> None:
        fork_into(box, source)

    return agents.handoff(agent, on_handoff=on_handoff, **options)


def fork_into(box: Toolbox, source: Toolbox) -> None:
    """Let the tools of ``box`` work on a fork of the sandbox of ``source``."""
    box.sandbox = source.sandbox.fork(1)[0]
