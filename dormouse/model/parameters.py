"""Parameters of statements, as users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from dormouse.errors import InvalidQuery
from dormouse.model.text import is_text

Parameters = Sequence[Any] | Mapping[str, Any]
PARAMETERS_MAX = 10_000
NESTING_MAX = 100
"""The most lists in each other."""

_TYPES = (bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal, UUID, type(None))


def given(parameters: object) -> Parameters:
    """The parameters, as a list or a dict; `InvalidQuery` for too many, or what DuckDB has no type for."""
    if parameters is None:
        return []
    if isinstance(parameters, Mapping):
        _check_count(parameters)
        return {_name(name): _checked(f"${name}", value) for name, value in parameters.items()}
    if isinstance(parameters, Sequence) and not isinstance(parameters, str | bytes | bytearray):
        _check_count(parameters)
        return [_checked(f"${number}", value) for number, value in enumerate(parameters, 1)]
    raise InvalidQuery(
        f"parameters must be a list for $1, $2, … or a dict for $name, not {type(parameters).__name__}"
    )


def _check_count(parameters: Sequence[Any] | Mapping[Any, Any]) -> None:
    count = len(parameters)
    if count > PARAMETERS_MAX:
        raise InvalidQuery(
            f"a statement can have {PARAMETERS_MAX:,} parameters, not {count:,}: ask in parts; SQL over "
            "tables takes a list as one of them, for x = ANY($1)"
        )


def _name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidQuery(f"{name!r} cannot be a parameter's name: use letters, digits and '_'")
    return name


def check_nesting(name: str, depth: int) -> None:
    """Raises `InvalidQuery` for a parameter whose lists are more than `NESTING_MAX` in each other."""
    if depth > NESTING_MAX:
        raise InvalidQuery(f"parameter {name} has more than {NESTING_MAX} lists nested in each other")


def _checked(name: str, value: Any, depth: int = 1) -> Any:
    if type(value).__module__ == "numpy":
        # as data frames hand them over
        value = value.tolist()
    if isinstance(value, list | tuple):
        check_nesting(name, depth)
        return [_checked(name, item, depth + 1) for item in value]
    if isinstance(value, str) and not is_text(value):
        raise InvalidQuery(f"parameter {name} can have neither NUL nor half a surrogate pair")
    if not isinstance(value, _TYPES):
        raise InvalidQuery(
            f"parameter {name} is {value!r:.100}, of which SQL has no type; give a number, text, bytes, a "
            "time, None, or a list of these"
        )
    return value
