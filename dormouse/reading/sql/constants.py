"""The constants in plans that DuckDB serialized as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dormouse.model.region import KeyValue, value_of_number
from dormouse.model.types import DATE, TIMESTAMP

Node = dict[str, Any]
WHOLE = {f"{sign}{name}" for name in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT") for sign in "U"}
WHOLE |= {name[1:] for name in WHOLE}
"""DuckDB's names of the types of whole numbers."""
ZONED = "TIMESTAMP WITH TIME ZONE"
_TIMES = {ZONED: TIMESTAMP, "DATE": DATE}
_ESCAPED = re.compile(r"\\x([0-9A-F]{2})")


class _Unknown:
    """The type of `UNKNOWN`, which stands for a value that this module cannot determine."""


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Time:
    """A TIMESTAMP without a zone, in microseconds since 1970."""

    microseconds: int


@dataclass(frozen=True, slots=True)
class Interval:
    """An INTERVAL."""

    months: int
    days: int
    microseconds: int


def value_of(constant: Node) -> Any:  # noqa: PLR0911 one a type
    """Returns a constant as a value of Python, `Time` or `Interval`; `UNKNOWN` for other types."""
    match constant:
        case {"is_null": True}:
            return None
        case {"type": {"id": name}, "value": {"upper": int(upper), "lower": int(lower)}} if name in WHOLE:
            return (upper << 64) + lower
        case {"type": {"id": name}, "value": int(value)} if name in WHOLE:
            return value
        case {"type": {"id": "DECIMAL", "type_info": {"scale": scale}}, "value": value}:
            number = value if isinstance(value, int) else (value["upper"] << 64) + value["lower"]
            return Fraction(number, 10**scale)
        case {"type": {"id": "DOUBLE" | "FLOAT"}, "value": float() | int() as value}:
            return float(value)
        case {"type": {"id": name}, "value": int(value)} if name in _TIMES:
            return _time(name, value)
        case {"type": {"id": "TIMESTAMP"}, "value": int(value)}:
            return Time(value)
        case {"type": {"id": "INTERVAL"}, "value": dict(parts)}:
            return Interval(*(int(parts.get(name, 0)) for name in ("months", "days", "micros")))
        case {"type": {"id": "VARCHAR"}, "value": str(value)}:
            return value
        case {"type": {"id": "BLOB"}, "value": str(value)}:
            return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), value).encode("latin-1")
        case {"type": {"id": "STRUCT"}, "value": {"children": list(children)}}:
            return tuple(map(value_of, children))
        case {"type": {"id": "LIST" | "ARRAY"}, "value": {"children": list(children)}}:
            return list(map(value_of, children))
    return UNKNOWN


def _time(name: str, number: int) -> KeyValue | _Unknown:
    try:
        return value_of_number(_TIMES[name], number)
    except (ValueError, OverflowError):
        # infinity, or a year that no key can have
        return UNKNOWN


def constant(expression: Node) -> Any:
    """Returns the value of an expression that is a constant, else `UNKNOWN`."""
    known = expression.get("expression_class") == "BOUND_CONSTANT"
    return value_of(expression["value"]) if known else UNKNOWN
