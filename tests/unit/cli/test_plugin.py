"""`forkd plugin` as people meet it: lists, warnings, verbs that plugins bring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_forkd

HELLO = '''"""Says hello."""
import click
from forkd.specs.hookspecs import hookimpl


@click.command("hello")
@click.argument("name")
def hello(name):
    """Say hello to NAME."""
    click.echo(f"hello {name}")


@hookimpl
def forkd_register_commands(commands):
    commands("hello", "greeter:hello", "Say hello.")
'''
TAKER = '''"""Wants a verb of forkd's own."""
from forkd.specs.hookspecs import hookimpl


@hookimpl
def forkd_register_commands(commands):
    commands("hi", "taker:nothing", "Left out too.")
    commands("where", "taker:nothing", "Never reached.")
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir(mode=0o755)
    for name, text in (("greeter", HELLO), ("broken", "def f(:\n")):
        (tmp_path / "plugins" / f"{name}.py").write_text(text)
        (tmp_path / "plugins" / f"{name}.py").chmod(0o644)
    return tmp_path


def test_the_list_has_every_plugin_and_the_broken_one_is_named(home: Path) -> None:
    done = run_forkd(home, "plugin", "ls", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["branch_live"]["status"] == rows["greeter"]["status"] == "loaded"
    assert "SyntaxError" in rows["broken"]["error"]
    assert done.stderr.count("plugin broken") == 1
    assert "Traceback" not in done.stderr
    quiet = run_forkd(home, "plugin", "ls", env={"FORKD_DISABLE_PLUGINS": "broken"})
    assert quiet.stderr == ""
    assert "disabled" in quiet.stdout


def test_info_shows_one_plugin(home: Path) -> None:
    done = run_forkd(home, "plugin", "info", "greeter")
    assert "Says hello." in done.stdout and "command hello" in done.stdout
    missing = run_forkd(home, "plugin", "info", "nobody")
    assert (missing.returncode, "no plugin 'nobody'" in missing.stderr) == (1, True)


def test_a_plugins_verb_is_listed_and_runs_but_never_replaces_one_of_ours(home: Path) -> None:
    assert "Say hello." in run_forkd(home, "--help").stdout
    assert run_forkd(home, "hello", "you").stdout == "hello you\n"
    (home / "plugins" / "taker.py").write_text(TAKER)
    (home / "plugins" / "taker.py").chmod(0o644)
    listed = run_forkd(home, "--help")
    assert "the command 'where' is forkd's own" in listed.stderr and "Left out too." not in listed.stdout
    assert run_forkd(home, "where").stdout == f"{home}\n"
