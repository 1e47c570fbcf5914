"""Conversions between values and JSON: any value, a column's values, and parameters of statements.

docs/reference/values.md lists the forms of values. `dormouse.sources.export` writes Arrow columns by the
same rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any
from uuid import UUID

from dormouse.errors import InvalidQuery
from dormouse.model.types import (
    Field,
    base64_text,
    bytes_of_base64,
    check_nesting,
    exact_double,
    interval_text,
    is_interval,
    time_of_text,
    time_text,
)

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NOT_FINITE |= {"infinity": math.inf, "-infinity": -math.inf}


@cache
def _intervals() -> Any:
    from pydantic import TypeAdapter  # not every program that uses values needs pydantic

    return TypeAdapter(timedelta)


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
        lambda value: str(_intervals().dump_python(value, mode="json")),
        lambda text: _intervals().validate_python(text),
        "an interval in ISO 8601, like P1DT12H",
    ),
    "uuid": (UUID, str, UUID, "a UUID, like 0198c0de-0000-7000-8000-000000000000"),
    "decimal": (Decimal, str, Decimal, "a decimal number, like 0.10"),
    "double": (float, str, exact_double, "a number that a double keeps, NaN, Infinity or -Infinity"),
}
"""The types that JSON lacks, by kind. The first kind that fits a value is used.

In JSON, such a value is an object with the kind as key, for example `{"uuid": "…"}`.
"""


def json_value(value: Any) -> Any:
    """Returns a value, and all that it contains, as values that JSON has.

    Dataclasses become objects, and values of types that JSON lacks become text.
    """
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple) and not is_interval(value):
        return [json_value(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    return _json_scalar(value)


def _json_scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return base64_text(value)
    if is_interval(value):
        return interval_text(value)
    return time_text(value) if isinstance(value, datetime) else str(value)


def shown_value(value: Any) -> str:
    """Returns a value as text for people, which `value_of_text` can read. Null is the empty text."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if is_interval(value):
        return interval_text(value)
    if isinstance(value, bool | list | tuple | dict):
        return json.dumps(json_value(value), ensure_ascii=False)
    return time_text(value) if isinstance(value, datetime) else str(value)


def value_of_json(field: Field, value: Any) -> Any:
    """Returns a JSON value as a value of the field's type.

    It converts only types that JSON lacks, such as times, and returns other values unchecked. Raises
    `InvalidQuery` for a value that cannot be converted.
    """
    parser = _OF_JSON.get(field.type.name)
    if value is None or parser is None:
        return value
    parse, what = parser
    try:
        return parse(value)
    except (ValueError, TypeError, KeyError, OverflowError, InvalidOperation):
        text = repr(value)
        shown = text if len(text) <= 100 else f"{text[:100]}…"
        raise InvalidQuery(f"{field.name!r} is {field.type}: {shown} is not {what}") from None


def _bytes_of_json(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return bytes_of_base64(value)


def _double_of_json(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        return _NOT_FINITE[value.lower()]
    if not math.isfinite(found := float(value)):
        raise ValueError  # JSON's 1e400
    return found


def _decimal_of_json(value: Any) -> Decimal:
    """Returns text or a whole number as a decimal. Raises `TypeError` for fractions, which may be inexact."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError
    return Decimal(value)


# for each type the parser, and the expected form, for messages
_OF_JSON: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bytes": (_bytes_of_json, "base64"),
    "timestamp": (time_of_text, "a time in ISO 8601, like 2026-01-31T12:00:00Z"),
    "date": (date.fromisoformat, "a date, like 2026-01-31"),
    "decimal": (_decimal_of_json, 'a decimal number in quotes, like "0.10"'),
    "double": (_double_of_json, 'a number, "NaN", "Infinity" or "-Infinity"'),
    "float": (_double_of_json, 'a number, "NaN", "Infinity" or "-Infinity"'),
}


def parameters_json(parameters: Any) -> Any:
    """Returns parameters as JSON, in the form that `parse_parameters` reads."""
    if isinstance(parameters, Mapping):
        return {name: _json(f"${name}", value) for name, value in parameters.items()}
    return [_json(f"${number}", value) for number, value in enumerate(parameters, 1)]


def parse_parameters(parameters: list[Any] | dict[str, Any] | None) -> list[Any] | dict[str, Any] | None:
    """Converts the result of `parameters_json` back. Raises `InvalidQuery` for any other form."""
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
            f"parameter ${name} is {value!r:.100}{must}; for types that JSON lacks, use {kinds}"
        ) from None


_written = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_text(value: Any) -> str:
    """Returns values that JSON has as compact JSON text.

    Raises the errors of `json.dumps` for other values, for example NaN.
    """
    return _written(value)


def with_times(fields_of_json: Mapping[str, Any], endings: str | tuple[str, ...] = "_at") -> dict[str, Any]:
    """Returns a JSON object in which values whose names end with one of `endings` are parsed as times."""
    return {
        name: datetime.fromisoformat(value) if value and name.endswith(endings) else value
        for name, value in fields_of_json.items()
    }


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Returns the value of a JSON text.

    Raises `ValueError` for a repeated name, or a number that a double cannot represent.

    `parse_constant` is called for NaN and infinities, as by `json.loads`.
    """
    return json.loads(
        text, parse_float=_json_double, parse_constant=parse_constant, object_pairs_hook=_object
    )


def _json_double(text: str) -> float:
    try:
        return exact_double(text)
    except ValueError as error:
        raise ValueError(f"{text[:60]} {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:100]!r} is named twice")
        found[name] = value
    return found
