"""Every plausible next step is run in a fork before the model has decided; the one it decides on is already done."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

DATA = "name,score\nada,91\nbob,47\ncyd,78\n"
STEPS = [
    {
        "sort by score": "sort -t, -k2 -rn data.csv -o data.csv",
        "drop the header": "sed -i 1d data.csv",
        "double the scores": "awk -F, -v OFS=, '{$2 *= 2; print}' data.csv > new && mv new data.csv",
    },
    {
        "keep the first two": "sed -i 3,\\$d data.csv",
        "keep scores over 50": "awk -F, '$2 > 50' data.csv > new && mv new data.csv",
    },
    {
        "take the mean": "awk -F, '{sum += $2} END {print \"mean\", sum / NR}' data.csv > new && mv new data.csv",
        "count the lines": "wc -l < data.csv > new && mv new data.csv",
    },
]
SCRIPTED = ["drop the header", "keep scores over 50", "take the mean"]


def choose(options: list[str], text: str, scripted: str | None) -> str:
    """The model's decision."""
    if scripted is not None:
        return scripted
    from openai import OpenAI  # pip install openai

    words = f"Goal: the mean of all scores over 50.\nFile now:\n{text}\nAnswer with exactly one of: {options}"
    answer = OpenAI().chat.completions.create(
        model=os.environ.get("MODEL", "gpt-4o-mini"), messages=[{"role": "user", "content": words}]
    )
    said = (answer.choices[0].message.content or "").strip()
    return said if said in options else options[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="scripted decisions in place of a model's")
    options = parser.parse_args()
    current = Sandbox.create(options.parent)
    alive = [current]
    try:
        current.files.write("/srv/data.csv", DATA)
        for number, steps in enumerate(STEPS):
            children = dict(zip(steps, current.fork(len(steps)), strict=True))
            alive += children.values()
            with ThreadPoolExecutor() as pool:  # the forks work while the model thinks
                work = {
                    name: pool.submit(Toolbox(child).run, f"cd /srv && {steps[name]}")
                    for name, child in children.items()
                }
                text = current.files.read("/srv/data.csv")
                chosen = choose(list(steps), text, SCRIPTED[number] if options.dry_run else None)
                status, said = work[chosen].result()
            if status != 0:
                raise SystemExit(f"{chosen!r} failed: {said}")
            for sandbox in [current, *(child for name, child in children.items() if name != chosen)]:
                sandbox.kill()
                alive.remove(sandbox)
            current = children[chosen]
            print(f"{len(steps)} steps tried, chosen: {chosen}")
        print(current.files.read("/srv/data.csv").strip())
    finally:
        for sandbox in alive:
            sandbox.kill()


if __name__ == "__main__":
    main()
