"""A test suite is set up once and its files run in parallel, each in a fork: no test sees another's leavings."""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

HERE = Path(__file__).parent


def run_file(sandbox: Sandbox, name: str) -> tuple[int, str]:
    """One test file, with pytest where the parent has it, else with unittest."""
    box = Toolbox(sandbox, timeout=600)
    pytest, _ = box.run("python3 -c 'import pytest'")
    runner = f"pytest -q {name}" if pytest == 0 else f"unittest -q {name.removesuffix('.py')}"
    return box.run(f"cd /srv/project && python3 -B -m {runner} 2>&1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="python-numpy", help="snapshot to begin with; `coding-agent` has pytest")
    parser.add_argument("--project", type=Path, default=HERE / "project", help="directory with test_*.py files")
    parser.add_argument("--dry-run", action="store_true", help="accepted as in other recipes: no model is needed here")
    options = parser.parse_args()
    tests = sorted(path.name for path in options.project.glob("test_*.py"))
    if not tests:
        raise SystemExit(f"no test_*.py in {options.project}")
    with Sandbox.create(options.parent) as sandbox:
        for path in sorted(options.project.glob("*.py")):
            sandbox.files.write(f"/srv/project/{path.name}", path.read_bytes())
        sandbox.commands.run("mkdir -p /srv/state && echo prepared > /srv/state/log")  # once, for all of them
        children = sandbox.fork(len(tests))
        try:
            with ThreadPoolExecutor() as pool:
                results = list(pool.map(run_file, children, tests))
        finally:
            for child in children:
                child.kill()
    failed = 0
    for name, (status, said) in zip(tests, results, strict=True):
        failed += status != 0
        print(f"{name}: {'passed' if status == 0 else 'FAILED'}")
        if status != 0:
            print(*re.findall(r"^(?:E\s+)?(\w*Error: .*)", said, re.MULTILINE), sep="\n")
    print(f"{len(tests) - failed} files passed, {failed} failed, in {len(tests)} forks of one sandbox")


if __name__ == "__main__":
    main()
