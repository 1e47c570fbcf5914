"""The rule of numbers that a double keeps, and JSON that is read by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Context, Decimal
from math import isfinite
from typing import Any

EXACT_MAX = 2.0**53
"""Up to it each whole number is a double."""


def keeps(number: float, text: str, shortest: str) -> bool:
    """Returns whether a floating number has the digits of a text.

    It has them if the text is `shortest`, which tells the number apart, or if the number's exact value,
    rounded to as many digits as the text has, is the text's.
    """
    if not isfinite(number):
        return False
    value = Decimal(text.strip())
    if value == Decimal(shortest):
        return True
    if value != value.to_integral_value():
        value = value.normalize()  # zeros at the end of a fraction say nothing
    return value == Context(prec=len(value.as_tuple().digits)).create_decimal(Decimal(number))


def exact_double(text: str) -> float:
    """Returns the double of a decimal number; ValueError says why a double does not keep it.

    It is infinite or zero only where the text says so, and from 2**53 it has all digits of the text.
    """
    number = float(text)
    if (
        isfinite(number)
        and (number == 0 or abs(number) >= EXACT_MAX)
        and not keeps(number, text, repr(number))
    ):
        raise ValueError("is not exact in a double" if number else "is smaller than any double")
    if not isfinite(number) and any(map(str.isdigit, text)):
        raise ValueError("is larger than any double")
    return number


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Returns the value of JSON; ValueError for a name that is there twice, and numbers that would change.

    `parse_constant` is called for NaN and infinities, as `json.loads` calls it.
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
