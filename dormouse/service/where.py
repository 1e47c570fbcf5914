"""What `where` says in JSON, as what `Table.query` takes: values by the type of their column."""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from dormouse.errors import InvalidQuery
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema

_ENDS = {"min", "max"}
_INCLUSIVE = {"min_inclusive", "max_inclusive"}
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def parse_where(schema: Schema, where: Mapping[str, Any] | None) -> dict[str, Any]:
    """Columns with a value, values, a range or null; `InvalidQuery` for what the type cannot be."""
    return {
        name: _wanted(schema.field(name), wanted) if name in schema else wanted
        for name, wanted in (where or {}).items()
    }


def _wanted(field: Field, wanted: Any) -> Any:
    if isinstance(wanted, list):
        return [_range_or_value(field, item) for item in wanted]
    return _range_or_value(field, wanted)


def _range_or_value(field: Field, wanted: Any) -> Any:
    return _range(field, wanted) if isinstance(wanted, dict) else _value(field, wanted)


def _range(field: Field, wanted: dict[str, Any]) -> Range:
    if unknown := sorted(wanted.keys() - _ENDS - _INCLUSIVE):
        raise InvalidQuery(
            f"{field.name!r}: a range has min, max, min_inclusive and max_inclusive, not {unknown[0]!r}"
        )
    if not _ENDS & wanted.keys():
        raise InvalidQuery(f"{field.name!r}: a range has min, max or both")
    for name in sorted(_INCLUSIVE & wanted.keys()):
        if not isinstance(wanted[name], bool):
            raise InvalidQuery(f"{field.name!r}: {name} is true or false, not {wanted[name]!r}")
    low, high = (_value(field, wanted.get(end)) for end in ("min", "max"))
    return Range(low, high, wanted.get("min_inclusive", True), wanted.get("max_inclusive", False))


def _value(field: Field, value: Any) -> Any:
    """Of the field's type, as far as JSON has no word for it; the query checks the rest."""
    parser = _PARSERS.get(field.type.name)
    if value is None or parser is None:
        return value
    parse, what = parser
    try:
        return parse(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InvalidQuery(f"{field.name!r} is {field.type}: {_shown(value)} is not {what}") from None


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return binascii.a2b_base64(value.encode("ascii"), strict_mode=True)


def _time(value: Any) -> datetime:
    found = datetime.fromisoformat(value)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _double(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return _NOT_FINITE[value] if isinstance(value, str) else float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


_PARSERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bytes": (_bytes, "base64"),
    "timestamp": (_time, "a time in ISO 8601, like 2026-01-31T12:00:00Z"),
    "double": (_double, 'a number, "NaN", "Infinity" or "-Infinity"'),
}
