"""The times for which their text, or their month or quarter, meets a comparison.

Texts are those of strftime and of casts. They sort like the times, if their parts go from the year down and
the year has four digits, as in all row keys. The time zone is UTC.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from dormouse.model.region import KeyValue, number_of_value, value_of_number
from dormouse.model.types import DATE, TIMESTAMP
from dormouse.reading.sql.constants import ZONED, Node, constant
from dormouse.reading.sql.inverses import DAY, LIMITS, Span, first_day, type_of

_TYPES = {"DATE": DATE, "TIMESTAMP": TIMESTAMP, ZONED: TIMESTAMP}
_PARTS = ("%Y", "%m", "%d", "%H", "%M", "%S")
"""The parts of a format, in the order in which texts sort like times."""
_MONTHS = {"month": 1, "quarter": 3}
"""The functions that return a part of a year, each with its number of months."""
_YEARS = range(1900, 2101)
"""The years with ranges for single months. Earlier and later times count as wanted."""


def text_of_time(expression: Node) -> tuple[Node, Callable[[KeyValue], str]] | None:
    """Returns the time of which an expression is the text, and a function that makes the text."""
    match expression:
        case {"try_cast": True}:
            return None
        case {"expression_class": "BOUND_CAST", "child": time} if type_of(expression) == "VARCHAR":
            kind = type_of(time)
            return (_plain(time), _CASTS[kind]) if kind in _TYPES and _plain(time) else None
        case {"expression_class": "BOUND_FUNCTION", "name": "strftime", "children": [one, other]}:
            time, pattern = (one, constant(other)) if type_of(one) in _TYPES else (other, constant(one))
            if type_of(time) not in _TYPES or not isinstance(pattern, str) or not _is_sorted(pattern):
                return None
            return (_plain(time), _formatted(pattern)) if _plain(time) else None
    return None


def _plain(time: Node) -> Node:
    """Returns a time that is a column, maybe with casts to other times; else an empty node."""
    inner = time
    while True:
        match inner:
            case {"expression_class": "BOUND_CAST", "child": child, "try_cast": False}:
                inner = child
            case {"expression_class": "BOUND_FUNCTION", "name": "timezone", "children": [zone, child]}:
                if constant(zone) != "UTC":
                    return {}
                inner = child
            case {"expression_class": "BOUND_REF"}:
                return time
            case _:
                return {}
        if type_of(inner) not in _TYPES:
            return {}


def _is_sorted(pattern: str) -> bool:
    parts = [f"%{part[:1]}" for part in pattern.split("%")[1:]]
    return bool(parts) and parts == list(_PARTS[: len(parts)])


def _formatted(pattern: str) -> Callable[[KeyValue], str]:
    def text(value: KeyValue) -> str:
        parts = value.timetuple()[:6] if not isinstance(value, int | str | bytes) else ()
        found = pattern
        for name, part in zip(_PARTS, parts, strict=False):
            found = found.replace(name, f"{part:04}" if name == "%Y" else f"{part:02}")
        return found

    return text


def _cast(zone: str) -> Callable[[KeyValue], str]:
    whole = _formatted("%Y-%m-%d %H:%M:%S")

    def text(value: KeyValue) -> str:
        fraction = f".{value.microsecond:06}".rstrip("0") if isinstance(value, datetime) else "."
        return whole(value) + fraction.rstrip(".") + zone

    return text


_CASTS = {"DATE": _formatted("%Y-%m-%d"), "TIMESTAMP": _cast(""), ZONED: _cast("+00")}


def span_of_text(time: Node, text: Callable[[KeyValue], str], low: Any, high: Any) -> Span:
    """Returns the span of the times whose text is from `low` on and below or equal to `high`.

    Each end is a pair of a text and a flag, which is true if the text itself belongs to it; None for no end.
    """
    kind = _TYPES[type_of(time)]
    ends = LIMITS[kind]
    numbers = range(ends[0], ends[1] + 1)

    def key(number: int) -> str:
        return text(value_of_number(kind, number))

    first = 0 if low is None else (bisect_left if low[1] else bisect_right)(numbers, low[0], key=key)
    after = len(numbers)
    if high is not None:
        after = (bisect_right if high[1] else bisect_left)(numbers, high[0], key=key)
    return Span(
        None if first == 0 else ends[0] + first, None if after == len(numbers) else ends[0] + after - 1
    )


def spans_of_part(expression: Node, holds: Callable[[int], bool]) -> tuple[Node, Sequence[Span]] | None:
    """Returns the time whose month or quarter an expression is, and the spans where its number `holds`."""
    match expression:
        case {"expression_class": "BOUND_FUNCTION", "name": str(name), "children": [time]}:
            if name in _MONTHS and type_of(time) in _TYPES:
                return time, list(_spans(_MONTHS[name], holds, 1 if type_of(time) == "DATE" else DAY))
    return None


def _spans(months: int, holds: Callable[[int], bool], unit: int) -> Iterator[Span]:
    wanted = [(first, first + months) for first in range(0, 12, months) if holds(first // months + 1)]
    yield Span(None, first_day(_YEARS.start) * unit - 1)
    for year in _YEARS:
        for first, after in wanted:
            yield Span(first_of_month(year, first) * unit, first_of_month(year, after) * unit - 1)
    yield Span(first_day(_YEARS.stop) * unit, None)


def first_of_month(year: int, month: int) -> int:
    """Returns the first day of a month, counted from 0, in days since 1970; 12 is the next year's first."""
    return number_of_value(datetime(year + month // 12, month % 12 + 1, 1).date())
