"""Agents that hand over to each other, each going on in a fork of the sandbox it was handed."""

from __future__ import annotations

import argparse

from forkd.extras.e2b import Sandbox
from forkd.extras.openai_agents import fork_into
from forkd.extras.toolbox import Toolbox

TASK = "Write /srv/greet.py, which greets its first argument, and have it reviewed."
SCRIPTED = [
    ("coder", "write_file", {"path": "/srv/greet.py", "content": "import sys\nprint('hello', sys.argv[1])\n"}),
    ("coder", "run_command", {"command": "python3 /srv/greet.py forkd"}),
    ("reviewer", "run_command", {"command": "python3 /srv/greet.py 2>&1 | tail -1"}),
    ("reviewer", "run_command", {"command": "sed -i 's/sys.argv.1./(sys.argv + [\"you\"])[1]/' /srv/greet.py"}),
    ("reviewer", "run_command", {"command": "python3 /srv/greet.py"}),
]


def dry_run(boxes: dict[str, Toolbox]) -> None:
    """Scripted decisions; a handoff whenever the speaker changes."""
    speaker = "coder"
    for name, tool, arguments in SCRIPTED:
        if name != speaker:
            fork_into(boxes[name], boxes[speaker])
            print(f"{speaker} hands over to {name}")
            speaker = name
        said = getattr(boxes[name], tool)(**arguments).strip()
        print(f"{name}: {tool} -> {said or 'done'}")


def run(boxes: dict[str, Toolbox]) -> None:
    from agents import Agent, Runner  # pip install openai-agents

    from forkd.extras.openai_agents import forking_handoff, sandbox_tools

    reviewer = Agent(
        name="reviewer",
        instructions="Try to break the program you are handed, and mend it.",
        tools=sandbox_tools(boxes["reviewer"]),
    )
    coder = Agent(
        name="coder",
        instructions="Write the program and run it, then hand over to the reviewer.",
        tools=sandbox_tools(boxes["coder"]),
        handoffs=[forking_handoff(reviewer, boxes["reviewer"], boxes["coder"])],
    )
    print(Runner.run_sync(coder, TASK).final_output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="scripted decisions in place of a model's")
    options = parser.parse_args()
    with Sandbox.create(options.parent) as sandbox:
        boxes = {name: Toolbox(sandbox) for name in ("coder", "reviewer")}
        try:
            (dry_run if options.dry_run else run)(boxes)
            for name, box in boxes.items():
                print(f"{name}'s version: {box.run_command('tail -1 /srv/greet.py').strip()}")
        finally:
            boxes["reviewer"].sandbox.kill()


if __name__ == "__main__":
    main()
