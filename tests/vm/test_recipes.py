"""Every recipe's dry run on real machines says what its folder promises, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forkd import Controller
from tests.conftest import run_forkd

pytestmark = pytest.mark.vm
RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.parent.name for path in RECIPES.glob("*/run.py"))
PARENTS = {"postgres-fixture": "postgres-fixture"}
"""Recipes whose parent has to be built first."""


def test_every_recipe_has_its_parts() -> None:
    assert len(NAMES) == 9
    for name in NAMES:
        assert (RECIPES / name / "expected.txt").read_text().endswith("\n")
        assert "--dry-run" in (RECIPES / name / "README.md").read_text()
        assert f"`{name}`" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in PARENTS else name for name in NAMES]
)
def test_a_dry_run_says_what_it_promises(name: str, daemon: Any, data_dir: Path) -> None:
    if name in PARENTS:
        built = run_forkd(data_dir, "build", str(RECIPES / "parents" / f"{PARENTS[name]}.toml"), timeout=1800)
        assert built.returncode == 0, built.stderr
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


ON_DEMAND = sorted(
    {path.stem for path in (RECIPES / "parents").glob("*.toml")} - {"nodejs", "postgres-fixture", "python-numpy"}
)
"""Parents no default test builds."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DEMAND)
def test_a_parent_is_built_and_its_check_holds(name: str, data_dir: Path) -> None:
    built = run_forkd(data_dir, "build", str(RECIPES / "parents" / f"{name}.toml"), timeout=3600)
    assert built.returncode == 0, built.stderr
    listed = run_forkd(data_dir, "images", "--json")
    assert name in listed.stdout
