"""The values of a column for which an expression, such as `k + 1` or `year(k)`, has a value in a span.

Each function is inverted by itself, from the outermost to the column. The result may have more values than
needed, as all arithmetic here is exact, while DuckDB rounds DOUBLE and FLOAT. It never lacks a value: an
expression that is not understood has no result. Times are microseconds since 1970, dates are days since then,
and the time zone is UTC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fractions import Fraction
from typing import Any, TypeAlias

from dormouse.model.region import number_of_value
from dormouse.model.types import DATE, INT, LONG, TIMESTAMP
from dormouse.reading.sql.constants import WHOLE, ZONED, Interval, Node, Time, constant

Number: TypeAlias = int | Fraction
Step: TypeAlias = "tuple[Node, Span] | None"
DAY = 86_400_000_000
"""The microseconds of a day."""
_MONTH_DAYS = Fraction(146_097, 4_800)
"""The mean length of a month: the days of 400 years divided by the months."""
_SHIFT_DAYS = 8
"""The most days by which adding months may differ from adding months of the mean length."""
_ROUNDINGS = {
    # relative, and absolute where numbers become too small for all their digits
    "DOUBLE": (Fraction(1, 1 << 50), Fraction(1, 1 << 1000)),
    "FLOAT": (Fraction(1, 1 << 21), Fraction(1, 1 << 120)),
}
"""The largest errors of one operation on numbers of a type; more than DuckDB makes."""
_SIGNED = {name for name in WHOLE if not name.startswith("U")}
"""Whole numbers of these types alone are inverted: a negative UTINYINT becomes a large one."""
_EXACT = {*_SIGNED, "DECIMAL"}
"""The types of numbers whose arithmetic is exact, or fails."""
_NUMBERS = {*_EXACT, *_ROUNDINGS}
_MOMENTS = {"TIMESTAMP", ZONED}
_UNITS = {**dict.fromkeys(_MOMENTS, 1), "DATE": DAY}
"""The microseconds of one unit of each type of times."""
_TRUNCATED_DAYS = {
    "millennium": 365_243, "century": 36_525, "decade": 3_653, "year": 366, "quarter": 92, "month": 31,
    "week": 7, "day": 1, "hour": 1, "minute": 1,
}  # fmt: skip
"""The most days between a time and its truncation."""
_YEARS = range(1, 9_999)
_DIFFERENCES = {("DATE", "BIGINT"), *((kind, "INTERVAL") for kind in _MOMENTS)}
"""The types of two times and of their difference, which is in the same unit as the times."""
_FACTOR_MAX = 1 << 64
STEPS_MAX = 8
"""The most functions that are inverted one after another, so that no product of factors overflows."""
LIMITS = {
    INT: (-(1 << 31), (1 << 31) - 1),
    LONG: (-(1 << 63), (1 << 63) - 1),
    DATE: tuple(map(number_of_value, (date.min, date.max))),
    TIMESTAMP: tuple(number_of_value(end.replace(tzinfo=UTC)) for end in (datetime.min, datetime.max)),
}
"""The smallest and the largest key of each type, as `number_of_value` returns them."""
_INFINITE = {"DATE": (1 << 31) - 1, **dict.fromkeys(_MOMENTS, (1 << 63) - 1)}


@dataclass(frozen=True, slots=True)
class Span:
    """All numbers from `low` to `high`, both included; None stands for no bound."""

    low: Number | None
    high: Number | None

    def by(self, low: Callable[[Any], Number], high: Callable[[Any], Number] | None = None) -> Span:
        """Returns the span whose ends are functions of this one's; `high` is by default the same as `low`."""
        return Span(
            None if self.low is None else low(self.low),
            None if self.high is None else (high or low)(self.high),
        )

    def moved(self, by: Number) -> Span:
        return self.by(lambda end: end + by)

    def widened(self, less: Number, more: Number | None = None) -> Span:
        """Returns the span with its ends moved apart."""
        return self.by(lambda low: low - less, lambda high: high + (less if more is None else more))

    def rounded(self, type_name: str) -> Span:
        """Returns a span that has all numbers which an operation may round into this one."""
        relative, absolute = _ROUNDINGS.get(type_name, (0, 0))
        return self.by(
            lambda low: low - abs(low) * relative - absolute,
            lambda high: high + abs(high) * relative + absolute,
        )

    def negated(self) -> Span:
        return Span(None if self.high is None else -self.high, None if self.low is None else -self.low)

    def divided(self, by: Number) -> Span:
        """Returns the span of numbers whose product with `by`, which is not 0, lies in this one."""
        return self.by(lambda end: Fraction(end) / by) if by > 0 else self.negated().divided(-by)


def compared(expression: Node, operator: str, value: Any) -> Span | None:
    """Returns the span of an expression's values that meet a comparison with a value; None if unknown."""
    number = number_of(value)
    if number is None:
        return None
    low, high = number, number
    if type_of(expression) not in {"DECIMAL", *_ROUNDINGS}:
        # one unit from an end that does not belong to the comparison
        low, high = math.ceil(number), math.floor(number)
        low, high = low + (operator == ">" and low == number), high - (operator == "<" and high == number)
    return Span(None if operator[0] == "<" else low, None if operator[0] == ">" else high)


def number_of(value: Any) -> Number | None:  # noqa: PLR0911 one a type
    """Returns a constant as a number; None if it is none, is infinite, or has parts of different signs."""
    match value:
        case bool():
            return None
        case int() | Fraction():
            return value
        case float():
            return Fraction(value) if math.isfinite(value) else None
        case date():  # or a datetime
            return number_of_value(value)
        case Time(microseconds):
            return None if abs(microseconds) >= _INFINITE["TIMESTAMP"] else microseconds
        case Interval(months, days, microseconds):
            parts = (months * 30 * DAY, days * DAY, microseconds)
            return None if min(parts) < 0 < max(parts) else sum(parts)
    return None


def type_of(expression: Node) -> str:
    """Returns the name of an expression's type; "" if the plan does not tell."""
    found = expression.get("return_type") or expression.get("value", {}).get("type") or {}
    return str(found.get("id", ""))


def column_of(expression: Node, span: Span) -> tuple[Node, Span] | None:
    """Returns the column in an expression of one column, and its values that give one in the span.

    Returns None for an expression that is not understood.
    """
    for _ in range(STEPS_MAX + 1):
        if expression.get("expression_class") == "BOUND_REF":
            return expression, span
        step = _step(expression, span)
        if step is None:
            return None
        expression, span = step
    return None


def _step(expression: Node, span: Span) -> Step:
    """Returns the argument of the outermost function, and the span of its values."""
    match expression:
        case {"try_cast": True}:
            return None
        case {"expression_class": "BOUND_CAST", "child": child}:
            return _cast(type_of(child), type_of(expression), child, span)
        case {"expression_class": "BOUND_FUNCTION", "name": str(name), "children": [argument]}:
            return _ONE[name](argument, span) if name in _ONE else None
        case {"expression_class": "BOUND_FUNCTION", "name": str(name), "children": [left, right]}:
            return _two(name, left, right, span, type_of(expression))
    return None


def _cast(source: str, target: str, child: Node, span: Span) -> Step:  # noqa: PLR0911 one a kind
    if source == target:
        return child, span
    if source in _NUMBERS and target in _NUMBERS:
        if source in _SIGNED or target == "DOUBLE":
            return child, span.rounded(target)
        # a number too large for FLOAT is not rounded; other casts round to their last digit
        return None if target == "FLOAT" else (child, span.widened(1).rounded(source))
    if source in _MOMENTS and target in _MOMENTS:
        return child, span
    if source == "DATE" and target in _MOMENTS:
        return child, span.divided(DAY)
    if source in _MOMENTS and target == "DATE":
        return child, span.by(lambda low: low * DAY, lambda high: high * DAY + DAY - 1)
    return None


def _two(name: str, left: Node, right: Node, span: Span, result: str) -> Step:
    """Inverts a function of two arguments, of which one is a constant."""
    first, second = constant(left), constant(right)
    if {type_of(left), type_of(right)} <= _NUMBERS:
        span = span.rounded(result)
        if (number := _factor(second, result)) is not None and name in _BY_NUMBER:
            return _step_to(left, _BY_NUMBER[name](span, number, result))
        if (number := _factor(first, result)) is not None and name in _OF_NUMBER:
            return _step_to(right, _OF_NUMBER[name](span, number, result))
        return None
    return _TIMED[name](left, right, first, second, span, result) if name in _TIMED else None


def _step_to(argument: Node, span: Span | None) -> Step:
    return None if span is None else (argument, span)


def _factor(value: Any, result: str) -> Number | None:
    """Returns a constant with which no operation on DOUBLE overflows, or becomes too small; else None."""
    number = number_of(value)
    if number is None or number == 0 or result in _EXACT:
        return number
    is_moderate = result == "DOUBLE" and Fraction(1, _FACTOR_MAX) <= abs(Fraction(number)) <= _FACTOR_MAX
    return number if is_moderate else None


def _over(span: Span, number: Number, result: str) -> Span | None:
    return None if number == 0 or result != "DOUBLE" else span.divided(1 / Fraction(number))


def _whole_over(span: Span, number: Number, result: str) -> Span | None:
    """Inverts a division that rounds towards zero."""
    if number == 0 or result not in _SIGNED:
        return None
    span, by = (span, number) if number > 0 else (span.negated(), -number)
    return span.by(
        lambda low: low * by if low > 0 else (low - 1) * by + 1,
        lambda high: high * by if high < 0 else (high + 1) * by - 1,
    )


def _times(span: Span, number: Number, _result: str) -> Span | None:
    return None if number == 0 else span.divided(number)


def _less(span: Span, number: Number, _result: str) -> Span | None:
    return span.moved(-number)


_BY_NUMBER: Mapping[str, Callable[[Span, Number, str], Span | None]] = {
    "+": _less,
    "-": lambda span, number, _: span.moved(number),
    "*": _times,
    "/": _over,
    "//": _whole_over,
}
"""The inverses of functions whose second argument is a number."""
_OF_NUMBER: Mapping[str, Callable[[Span, Number, str], Span | None]] = {
    "+": _less,
    "-": lambda span, number, _: span.moved(-number).negated(),
    "*": _times,
}
"""The inverses of functions whose first argument is a number."""


def _shifted(argument: Node, value: Any, sign: int, span: Span, result: str) -> Step:
    """Inverts the addition of an interval or of days to a time."""
    unit = _UNITS.get(type_of(argument))
    if unit == DAY and isinstance(value, int) and result == "DATE":
        return argument, span.moved(-sign * value)
    if unit is None or not isinstance(value, Interval) or result not in _MOMENTS:
        return None
    span = span.moved(-sign * (value.days * DAY + value.microseconds))
    if value.months:
        span = span.moved(-sign * value.months * _MONTH_DAYS * DAY).widened(_SHIFT_DAYS * DAY)
    return argument, span.divided(unit)


def _plus(left: Node, right: Node, first: Any, second: Any, span: Span, result: str) -> Step:
    return _shifted(left, second, 1, span, result) or _shifted(right, first, 1, span, result)


def _minus(left: Node, right: Node, first: Any, second: Any, span: Span, result: str) -> Step:
    kind = type_of(left)
    if (kind, result) not in _DIFFERENCES or kind != type_of(right):
        return _shifted(left, second, -1, span, result)
    if (number := number_of(second)) is not None:
        return left, span.moved(number)
    number = number_of(first)
    return None if number is None else (right, span.moved(-number).negated())


def _truncated(_left: Node, right: Node, first: Any, _second: Any, span: Span, result: str) -> Step:
    unit, of_result = _UNITS.get(type_of(right)), _UNITS.get(result)
    days = _TRUNCATED_DAYS.get(first) if isinstance(first, str) else None
    if unit is None or of_result is None or days is None:
        return None
    before = 2 * days * DAY if _may_precede_years(right) else 0
    return right, span.by(lambda end: end * of_result).widened(before, days * DAY).divided(unit)


def _zoned(_left: Node, right: Node, first: Any, _second: Any, span: Span, _result: str) -> Step:
    return (right, span) if first == "UTC" and type_of(right) in _MOMENTS else None


_TIMED: Mapping[str, Callable[[Node, Node, Any, Any, Span, str], Step]] = {
    "+": _plus,
    "-": _minus,
    "date_trunc": _truncated,
    "datetrunc": _truncated,
    "timezone": _zoned,
}


def _year(argument: Node, span: Span) -> Step:
    unit = _UNITS.get(type_of(argument))
    if unit is None:
        return None
    if _may_precede_years(argument):
        span = Span(None, span.high)
    low = None if span.low is None or span.low < _YEARS.start else first_day(math.ceil(span.low))
    high = None if span.high is None or span.high not in _YEARS else first_day(math.floor(span.high) + 1)
    days = Span(low, high)
    return argument, days.by(lambda start: start * DAY // unit, lambda end: end * DAY // unit - 1)


def _may_precede_years(argument: Node) -> bool:
    """Returns whether a time may lie before year 1 and be counted from there backwards.

    DuckDB does so if the time has a zone: it numbers the years before year 1 from 1 on, too, and truncates
    some of them to later times. Keys have no such times.
    """
    return type_of(argument) == ZONED and argument.get("expression_class") != "BOUND_REF"


def first_day(year: int) -> int:
    """Returns the first day of a year from 1 on, also of years after 9999, in days since 1970."""
    before = year - 1
    days = 365 * before + before // 4 - before // 100 + before // 400
    return number_of_value(date.fromordinal(1)) + days


def _seconds(scale: int) -> Callable[[Node, Span], Step]:
    """Returns the inverse of a function that counts the time since 1970 in units of `scale` microseconds."""

    def inverted(argument: Node, span: Span) -> Step:
        if type_of(argument) not in _MOMENTS:
            return None
        return argument, span.rounded("DOUBLE").by(lambda end: end * scale).widened(scale - 1)

    return inverted


def _near(argument: Node, span: Span) -> Step:
    """Inverts a function whose value differs from a number by at most 1."""
    return (argument, span.widened(1)) if type_of(argument) in _NUMBERS else None


def _last_day(argument: Node, span: Span) -> Step:
    unit = _UNITS.get(type_of(argument))
    if unit is None:
        return None
    # a month's last day is at most 30 days after the others
    return argument, span.by(lambda low: (low - 30) * DAY, lambda high: (high + 1) * DAY - 1).divided(unit)


_ONE: Mapping[str, Callable[[Node, Span], Step]] = {
    "-": lambda argument, span: (argument, span.negated()) if type_of(argument) in _NUMBERS else None,
    "+": lambda argument, span: (argument, span) if type_of(argument) in _NUMBERS else None,
    "abs": lambda argument, span: (
        (argument, Span(None if span.high is None else -span.high, span.high))
        if type_of(argument) in _NUMBERS
        else None
    ),
    **dict.fromkeys(("floor", "ceil", "ceiling", "trunc", "round"), _near),
    "year": _year,
    "epoch": _seconds(1_000_000),
    "epoch_ms": _seconds(1_000),
    "epoch_us": _seconds(1),
    "last_day": _last_day,
    "normalized_interval": lambda argument, span: (argument, span),
}
