"""`exec`, `run` and `eval`: what belongs to forkd and what to the command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from forkd.cli import eval as eval_verb
from forkd.cli import exec as exec_verb
from forkd.cli import run as run_verb

VERBS = [
    (exec_verb.command, ["--tag", "x"], "args"),
    (run_verb.command, ["--image", "x"], "args"),
    (eval_verb.command, ["--tag", "x"], "code"),
]


@pytest.mark.parametrize(("verb", "options", "words"), VERBS)
def test_the_first_word_begins_the_command_and_all_after_it_is_the_commands(
    verb: click.Command, options: list[str], words: str
) -> None:
    said = ["ls", "-d", "--json", "--", "/"]
    for given in (said, ["--", *said]):
        context = verb.make_context("verb", [*options, *given])
        assert (context.params[words], context.params["as_json"]) == (tuple(said), False)


@pytest.mark.parametrize(("verb", "options", "words"), VERBS)
def test_an_unknown_option_before_the_command_is_a_usage_error(
    verb: click.Command, options: list[str], words: str
) -> None:
    done = CliRunner().invoke(verb, [*options, "--timeout", "5", "--", "ls"])
    assert (done.exit_code, "No such option" in done.output) == (2, True)
