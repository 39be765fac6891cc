"""Three fixes for one bug are tried in three forks of the same sandbox; the best is promoted to be the sandbox."""

from __future__ import annotations

import argparse
import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

CODE = """def median(numbers):
    numbers.sort()
    return numbers[len(numbers) // 2]
"""
TESTS = """import unittest
from stats import median

class Median(unittest.TestCase):
    def test_odd(self): self.assertEqual(median([3, 1, 2]), 2)
    def test_even(self): self.assertEqual(median([4, 1, 3, 2]), 2.5)
    def test_leaves_its_argument_alone(self):
        given = [2, 1, 3]
        median(given)
        self.assertEqual(given, [2, 1, 3])
    def test_empty(self):
        with self.assertRaises(ValueError): median([])

unittest.main(verbosity=0)
"""
SCRIPTED = [
    "def median(numbers):\n    numbers = sorted(numbers)\n    return numbers[len(numbers) // 2]\n",
    "def median(numbers):\n    if not numbers:\n        raise ValueError('empty')\n    half = len(numbers) // 2\n"
    "    ordered = sorted(numbers)\n    return (ordered[half] + ordered[-half - 1]) / 2\n",
    "def median(numbers):\n    numbers.sort()\n    half = len(numbers) // 2\n"
    "    return (numbers[half] + numbers[-half - 1]) / 2\n",
]


def ask_model(code: str, tests: str) -> list[str]:
    """Three versions of the file, from any service that speaks OpenAI's protocol."""
    base = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    words = f"Fix stats.py so that the tests pass. Answer with the whole file, no fences.\n\n{code}\n\ntests:\n{tests}"
    body = {"model": os.environ.get("MODEL", "gpt-4o-mini"), "n": 3, "messages": [{"role": "user", "content": words}]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [choice["message"]["content"] for choice in json.load(answer)["choices"]]


def failures(sandbox: Sandbox, fix: str = "") -> int:
    """How many tests fail with a fix."""
    if fix:
        sandbox.files.write("/srv/app/stats.py", fix)
    _, said = Toolbox(sandbox).run("cd /srv/app && python3 -B tests.py 2>&1")
    if "\nRan 4 tests" not in said:  # a fix that cannot even be imported is no good one
        return 4
    return len(re.findall(r"^(?:FAIL|ERROR):", said, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with")
    parser.add_argument("--dry-run", action="store_true", help="three scripted fixes in place of a model's")
    options = parser.parse_args()
    with Sandbox.create(options.parent) as sandbox:
        sandbox.files.write("/srv/app/stats.py", CODE)
        sandbox.files.write("/srv/app/tests.py", TESTS)
        print(f"before: {failures(sandbox)} of 4 tests fail")
        fixes = SCRIPTED if options.dry_run else ask_model(CODE, TESTS)
        children = sandbox.fork(len(fixes))
        try:
            with ThreadPoolExecutor() as pool:
                counts = list(pool.map(failures, children, fixes))
            for number, count in enumerate(counts, 1):
                print(f"fix {number}: {count} of 4 tests fail")
            best = counts.index(min(counts))
            sandbox.controller.promote(children[best].sandbox_id)
            print(f"fix {best + 1} is promoted")
        finally:
            for child in children:
                child.kill()
        print(f"after: {failures(sandbox)} of 4 tests fail")


if __name__ == "__main__":
    main()
