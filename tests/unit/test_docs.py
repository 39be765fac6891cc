"""Documents that are generated are current, and those that are written by hand are true."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

from forkd.specs import hookspecs
from tests.conftest import ROOT


@pytest.mark.parametrize("name", ["docs/CLI.md", "docs/API.md", "docs/PLUGINS.md", "packaging/forkd.1"])
def test_generated_documents_are_current(name: str) -> None:
    code = f"import runpy; print(end=runpy.run_path('build/docs.py')['GENERATED'][{name!r}]())"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / name).read_text(), f"{name} is old: make docs"


def test_the_plugin_guide_has_every_hook() -> None:
    text = (ROOT / "docs/PLUGINS.md").read_text()
    for hook in vars(hookspecs):
        if hook.startswith("forkd_"):
            assert f"def {hook}(" in text, f"docs/PLUGINS.md has no example of {hook}"


def test_the_plugin_guides_examples_are_the_skeletons_that_the_tests_run() -> None:
    text = (ROOT / "docs/PLUGINS.md").read_text()
    named = set(re.findall(r"<!-- example (\w+) -->", text))
    there = {path.stem for path in (ROOT / "forkd/testing/skeletons").glob("*.py")} - {"__init__"}
    assert named == there
    assert runpy.run_path(str(ROOT / "forkd/testing/skeleton.py"))["KINDS"]


def test_every_document_named_in_the_readme_exists() -> None:
    for target in re.findall(r"\]\(([\w./-]+\.md)\)|`(docs/[\w./-]+)`", (ROOT / "README.md").read_text()):
        path = target[0] or target[1]
        assert (ROOT / path).exists(), path
