"""Scores: a small arithmetic over how a command ended, read by this module and never run as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from forkd.specs.errors import BadInput

MAX_LENGTH = 200
NAMES = ("exit_code", "seconds", "value")
_TWO: dict[type[ast.AST], Callable[[float, float], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ONE: dict[type[ast.AST], Callable[[float], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_HINT = f"numbers, {', '.join(NAMES)}, + - * /, comparisons, not, and A if B else C"


def parse_score(text: str) -> Callable[[Mapping[str, float]], float | None]:
    """A function from the values of ``NAMES`` to the score; None where it is no number. Raises BadInput."""
    if len(text) > MAX_LENGTH:
        raise BadInput(f"an expression has at most {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _evaluate(tree, dict.fromkeys(NAMES, 1.0))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"the expression {text!r} is not understood", hint=_HINT) from error

    def score(values: Mapping[str, float]) -> float | None:
        result = _evaluate(tree, values)
        return result if math.isfinite(result) else None

    return score


def _evaluate(node: ast.expr, values: Mapping[str, float]) -> float:
    """All in floating point, so nothing grows; a division by zero is no number. Every branch is looked at."""
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return float(value) if abs(value) < 1e300 else math.inf
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=op, operand=operand):
            return float(_ONE.get(type(op), _unknown)(_evaluate(operand, values)))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            try:
                return float(_TWO.get(type(op), _unknown)(_evaluate(left, values), _evaluate(right, values)))
            except ZeroDivisionError:
                return math.nan
        case ast.IfExp(test=test, body=body, orelse=orelse):
            chosen, other = _evaluate(body, values), _evaluate(orelse, values)
            return chosen if _evaluate(test, values) else other
    return _unknown()


def _unknown(*_: float) -> float:
    raise ValueError("not understood")
