"""Every recipe's dry run on real machines says what its folder promises, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forkd import Controller

pytestmark = pytest.mark.vm
RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.parent.name for path in RECIPES.glob("*/run.py"))
OF_ITS_OWN = "postgres-fixture"
"""The recipe that needs a parent of its own; it runs where that is built."""


def test_every_recipe_has_its_parts() -> None:
    assert len(NAMES) == 9
    for name in NAMES:
        assert (RECIPES / name / "expected.txt").read_text().endswith("\n")
        assert "--dry-run" in (RECIPES / name / "README.md").read_text()
        assert f"`{name}`" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name != OF_ITS_OWN])
def test_a_dry_run_says_what_it_promises(name: str, daemon: Any) -> None:
    dry_run(name, daemon)


def dry_run(name: str, daemon: Any) -> None:
    """Run a recipe without a model."""
    environ = {key: value for key, value in os.environ.items() if not key.endswith("_API_KEY")}
    done = subprocess.run(
        [sys.executable, "run.py", "--dry-run"],
        cwd=RECIPES / name,
        env={**environ, "FORKD_URL": daemon.url},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (RECIPES / name / "expected.txt").read_text()
    with Controller(daemon.url) as controller:
        assert controller.list_sandboxes() == []
