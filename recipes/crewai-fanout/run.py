"""A crew whose members each work in a fork of one prepared sandbox, at the same time and out of each other's way."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

DATA = "import random\nrandom.seed(7)\nprint(*[random.randint(1, 100) for _ in range(1000)], sep='\\n')\n"
MEMBERS = {
    "statistician": "Find the mean of the numbers in /srv/numbers.txt, to one digit.",
    "counter": "Find how many different numbers are in /srv/numbers.txt.",
    "extremist": "Find the smallest and the largest number in /srv/numbers.txt.",
}
SCRIPTED = {
    "statistician": "awk '{sum += $1} END {printf \"%.1f\\n\", sum / NR}' numbers.txt",
    "counter": "sort -nu numbers.txt > numbers.new && mv numbers.new numbers.txt && wc -l < numbers.txt",
    "extremist": "sort -n numbers.txt -o numbers.txt && echo $(sed -n '1p;$p' numbers.txt)",
}
"""What a model might do; two of them spoil the file, which the others do not notice."""


def dry_run(role: str, box: Toolbox) -> str:
    return box.run_command(f"cd /srv && {SCRIPTED[role]}").strip()


def run(role: str, box: Toolbox) -> str:
    from crewai import Agent, Crew, Task  # pip install crewai

    from forkd.extras.crewai import sandbox_tools

    agent = Agent(role=role, goal=MEMBERS[role], backstory="You work in a Linux sandbox.", tools=sandbox_tools(box))
    task = Task(description=MEMBERS[role], expected_output="The answer alone.", agent=agent)
    return str(Crew(agents=[agent], tasks=[task]).kickoff())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="scripted decisions in place of a model's")
    options = parser.parse_args()
    work = dry_run if options.dry_run else run
    with Sandbox.create(options.parent) as sandbox:
        sandbox.files.write("/srv/make.py", DATA)
        sandbox.commands.run("python3 /srv/make.py > /srv/numbers.txt")
        children = sandbox.fork(len(MEMBERS))
        try:
            with ThreadPoolExecutor() as pool:
                answers = pool.map(work, MEMBERS, [Toolbox(child) for child in children])
                for role, answer in zip(MEMBERS, answers, strict=True):
                    print(f"{role}: {answer}")
        finally:
            for child in children:
                child.kill()
        print("lines in the prepared sandbox:", sandbox.commands.run("wc -l < /srv/numbers.txt").stdout.strip())


if __name__ == "__main__":
    main()
