"""Parameters of statements in JSON, as the service and its client have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter

from dormouse.errors import InvalidQuery
from dormouse.model.exact import exact_double
from dormouse.model.values import base64_text, bytes_of_base64, check_nesting

_INTERVAL = TypeAdapter(timedelta)
_KINDS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any], str]] = {
    "bytes": (bytes, base64_text, bytes_of_base64, "base64"),
    "timestamp": (
        datetime,
        datetime.isoformat,
        datetime.fromisoformat,
        "a time in ISO 8601, like 2026-01-31T12:00:00Z",
    ),
    "date": (date, date.isoformat, date.fromisoformat, "a date, like 2026-01-31"),
    "time": (time, time.isoformat, time.fromisoformat, "a time of day, like 12:00:00"),
    "interval": (
        timedelta,
        partial(_INTERVAL.dump_python, mode="json"),
        _INTERVAL.validate_python,
        "an interval in ISO 8601, like P1DT12H",
    ),
    "uuid": (UUID, str, UUID, "a UUID, like 0198c0de-0000-7000-8000-000000000000"),
    "decimal": (Decimal, str, Decimal, "a decimal number, like 0.10"),
    "double": (float, str, exact_double, "a number that a double keeps, NaN, Infinity or -Infinity"),
}
"""What JSON has no word for is an object with the name of its kind; the first that fits counts."""


def parameters_json(parameters: Any) -> Any:
    """Parameters, as `parse_parameters` takes them."""
    if isinstance(parameters, Mapping):
        return {name: _json(f"${name}", value) for name, value in parameters.items()}
    return [_json(f"${number}", value) for number, value in enumerate(parameters, 1)]


def parse_parameters(parameters: list[Any] | dict[str, Any] | None) -> list[Any] | dict[str, Any] | None:
    """Raises `InvalidQuery` for what is not as `parameters_json` gives it."""
    if isinstance(parameters, dict):
        return {name: _parsed(name, value) for name, value in parameters.items()}
    return parameters and [_parsed(str(number), value) for number, value in enumerate(parameters, 1)]


def _json(name: str, value: Any, depth: int = 1) -> Any:
    if isinstance(value, list | tuple):
        check_nesting(name, depth)
        return [_json(name, item, depth + 1) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return value
    found = ({word: text(value)} for word, (kind, text, *_) in _KINDS.items() if isinstance(value, kind))
    return next(found, value)


def _parsed(name: str, value: Any, depth: int = 1) -> Any:
    if isinstance(value, list):
        check_nesting(f"${name}", depth)
        return [_parsed(name, item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    must = ""
    try:
        [(kind, text)] = value.items()
        _, _, parse, what = _KINDS[kind]
        must = f": it must be {what}"
        if not isinstance(text, str):
            raise TypeError
        return parse(text)
    except (KeyError, TypeError, ValueError, InvalidOperation):
        kinds = ", ".join(f'{{"{kind}": "…"}}' for kind in _KINDS)
        raise InvalidQuery(
            f"parameter ${name} is {value!r:.100}{must}; for what JSON has no word there is {kinds}"
        ) from None
