"""Scores: what is understood, and that nothing else is."""

from __future__ import annotations

import pytest

from forkd.ops.score import parse_score
from forkd.specs.errors import BadInput

VALUES = {"exit_code": 0.0, "seconds": 2.5, "value": 8.0}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("-exit_code", 0),
        ("value / seconds + 1", 4.2),
        ("value if exit_code == 0 else -1", 8),
        ("value if exit_code else -1", -1),
        ("not exit_code", 1),
        ("value / exit_code", None),
        ("1e308 * 10 * value", None),
        ("9" * 150 + "*" + "0.0", 0),
    ],
)
def test_arithmetic_gives_a_number_or_none(text: str, result: float | None) -> None:
    assert parse_score(text)(VALUES) == result


@pytest.mark.parametrize(
    "text",
    [
        "",
        "open('x')",
        "value.real",
        "2 ** 9",
        "'a' * 9",
        "x",
        "[1]",
        "lambda: 1",
        "1 if 1 else x",
        "1j",
        "(" * 190,
        "1 +",
        "9" * 201,
        "1 < 2 < 3",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_score(text)
