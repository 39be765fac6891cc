"""AutoGen's executor works up to a decision; both answers to it are then followed, each in a fork of that moment."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from forkd.extras.autogen import code_executor, run_blocks
from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

PREPARE = "import json\njson.dump({'n': 12, 'steps': ['prepared']}, open('/srv/state.json', 'w'))\nprint('prepared')"
BRANCHES = {
    "iterative": "def f(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a\n",
    "recursive": "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n",
}
FINISH = """import json
state = json.load(open('/srv/state.json'))
state['steps'].append(NAME)
json.dump(state, open('/srv/state.json', 'w'))
print(NAME, 'gives', f(state['n']), 'after', state['steps'])
"""


def dry_run(box: Toolbox, name: str) -> str:
    """The scripted code of a branch, through the same runner the executor has."""
    return run_blocks(box, [("python", f"NAME = {name!r}\n{BRANCHES[name]}{FINISH}")]).output.strip()


def run(box: Toolbox, name: str) -> str:
    """A model writes the code; the executor runs it."""
    from autogen_agentchat.agents import CodeExecutorAgent  # pip install autogen-agentchat 'autogen-ext[openai]'
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def talk() -> Any:
        model = OpenAIChatCompletionClient(model=os.environ.get("MODEL", "gpt-4o-mini"))
        agent = CodeExecutorAgent("coder", code_executor=code_executor(box), model_client=model)
        task = f"Read n from /srv/state.json and print the n-th Fibonacci number, computed in an {name} way."
        return (await agent.run(task=task)).messages[-1]

    return f"{name}: {asyncio.run(talk()).content}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="scripted code in place of a model's")
    options = parser.parse_args()
    with Sandbox.create(options.parent) as sandbox:
        print(run_blocks(Toolbox(sandbox), [("python", PREPARE)]).output.strip())
        children = dict(zip(BRANCHES, sandbox.fork(len(BRANCHES)), strict=True))
        try:
            for name, child in children.items():
                print((dry_run if options.dry_run else run)(Toolbox(child), name))
        finally:
            for child in children.values():
                child.kill()
        print("before the decision:", sandbox.files.read("/srv/state.json"))


if __name__ == "__main__":
    main()
