"""How large one value of a statement can get: DataFusion makes it outside of the memory that it may use.

An estimate from a plan that is not optimized. A chain of CTEs that doubles a text thirty times is short to
write, and ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from datafusion import Expr
from datafusion.plan import LogicalPlan

from dormouse.errors import InvalidQuery

VALUE_BYTES_MAX = 1 << 30
COLUMN_BYTES = 100
"""What a value of a table is taken to have."""
VALUE_BYTES = 8
"""Of a number, and of what has no length that is known."""

_MAKING = ("projections", "group_by_exprs", "aggregate_exprs", "get_window_expr")

_LITERAL = re.compile(r'\w+\("(.*)"\)', re.DOTALL)
_REPLACING = {"replace", "regexp_replace"} | {
    f"{kind}_replace{which}" for kind in ("array", "list") for which in ("", "_n", "_all")
}
_JOINING = {f"{kind}_{name}" for kind in ("array", "list") for name in ("to_string", "join")}


def check_value_sizes(plan: LogicalPlan) -> None:
    """`InvalidQuery` when a value can get too large, its tables' values being of usual sizes."""
    try:
        _plan_bytes(plan)
    except RecursionError:
        raise InvalidQuery("the statement nests its expressions too deeply") from None


def _plan_bytes(plan: LogicalPlan) -> int:
    """Of the largest value."""
    # loops, as each frame counts: a plan is some hundred levels deep
    below = 0
    for part in plan.inputs():
        below = max(below, _plan_bytes(part))
    below = below or COLUMN_BYTES
    node: Any = None
    with suppress(Exception):  # the bindings do not know each kind
        node = plan.to_variant()
    if type(node).__name__ == "Filter":
        _bytes(node.predicate(), below)
        return below
    found = 0
    for name in _MAKING:
        for expression in getattr(node, name, tuple)():
            found = max(found, _bytes(expression, below))
    return found or below


def _bytes(expression: Expr, column_bytes: int) -> int:
    kind = expression.variant_name()
    if kind == "Column":
        return column_bytes
    if kind == "Literal":
        text = _LITERAL.fullmatch(expression.canonical_name())
        return len(text[1].encode()) if text else VALUE_BYTES
    if kind == "InList":
        return VALUE_BYTES
    operator, operands = "", []
    with suppress(Exception):  # the bindings do not know each kind
        operands = expression.rex_call_operands()
        operator = expression.rex_call_operator()
    parts = []
    for operand in operands:
        parts.append(_bytes(operand, column_bytes))
    if not parts or (kind == "BinaryExpr" and operator != "||"):
        return VALUE_BYTES
    found = _call_bytes(operator, parts, literal=len(parts) > 1 and operands[1].variant_name() == "Literal")
    if found > VALUE_BYTES_MAX:
        raise InvalidQuery(
            f"a value of the statement could get larger than {VALUE_BYTES_MAX:,} bytes: nest fewer "
            "expressions that make texts or lists longer"
        )
    return found


def _call_bytes(function: str, parts: Sequence[int], *, literal: bool) -> int:
    """Of a function's answer; `literal`: its second argument is one."""
    if function in _REPLACING and len(parts) > 2:
        # of a regular expression the length says nothing
        replaced = parts[1] if literal and function == "replace" else 1
        return parts[0] * max(1, -(-parts[2] // max(1, replaced)))
    if function in _JOINING and len(parts) > 1:
        return parts[0] * (1 + parts[1])
    return sum(parts)
