"""A ReAct agent of LangGraph whose tools work in a sandbox."""

from __future__ import annotations

import argparse
import os

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

TASK = "Write the squares of 1 to 5 to /srv/squares.txt, one a line, then add them up with awk."
SCRIPTED = [
    ("write_file", {"path": "/srv/make.py", "content": "for n in range(1, 6): print(n * n)\n"}),
    ("run_command", {"command": "python3 /srv/make.py > /srv/squares.txt && cat /srv/squarez.txt"}),
    ("run_command", {"command": "awk '{sum += $1} END {print sum}' /srv/squares.txt"}),
]
"""What a model might do, a mistake included."""


def dry_run(box: Toolbox) -> str:
    """The loop of the agent with scripted decisions: call a tool, look at what it says, go on."""
    said = ""
    for name, arguments in SCRIPTED:
        said = getattr(box, name)(**arguments)
        print(f"{name} -> {said.strip()}")
    return f"The sum is {said.strip()}."


def run(box: Toolbox) -> str:
    from langgraph.prebuilt import create_react_agent  # pip install langgraph langchain-openai

    from forkd.extras.langchain import sandbox_tools

    agent = create_react_agent(os.environ.get("MODEL", "openai:gpt-4o-mini"), sandbox_tools(box))
    return str(agent.invoke({"messages": [("user", TASK)]})["messages"][-1].content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="scripted decisions in place of a model's")
    options = parser.parse_args()
    with Sandbox.create(options.parent) as sandbox:
        box = Toolbox(sandbox)
        print(dry_run(box) if options.dry_run else run(box))


if __name__ == "__main__":
    main()
