"""A sandbox as tools of CrewAI."""

from __future__ import annotations

from typing import Any

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox, framework


def sandbox_tools(sandbox: Sandbox | Toolbox) -> list[Any]:
    """Tools for an ``Agent(tools=…)``; give each agent of a crew a fork of its own and none disturbs another."""
    tool = framework("crewai.tools", "crewai").tool
    box = sandbox if isinstance(sandbox, Toolbox) else Toolbox(sandbox)
    return [tool(function.__name__)(function) for function in box.functions()]
