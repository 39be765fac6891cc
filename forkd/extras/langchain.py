"""A sandbox as tools of LangChain and LangGraph."""

from __future__ import annotations

from typing import Any

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox, framework


def sandbox_tools(sandbox: Sandbox | Toolbox) -> list[Any]:
    """``StructuredTool`` objects, for ``create_react_agent``, ``ToolNode`` or ``bind_tools``."""
    tool = framework("langchain_core.tools", "langchain-core").StructuredTool
    box = sandbox if isinstance(sandbox, Toolbox) else Toolbox(sandbox)
    return [tool.from_function(function) for function in box.functions()]
