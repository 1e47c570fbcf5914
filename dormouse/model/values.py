"""Values of rows, keys and answers as JSON and as text, and back; docs/reference/values.md has the table.

Arrow columns are written by `dormouse.data.value_columns`, after the same rules.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from dormouse.errors import InvalidQuery
from dormouse.model.types import Field

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NOT_FINITE |= {"infinity": math.inf, "-infinity": -math.inf}


def json_value(value: Any) -> Any:
    """A value as JSON has it, with all that is in it; dataclasses are objects, what JSON lacks is text."""
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple) and not _is_interval(value):
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
    if _is_interval(value):
        return interval_text(value)
    return _time_text(value) if isinstance(value, datetime) else str(value)


def shown_value(value: Any) -> str:
    """A value as a person reads it, and `value_of_text` does; null is empty."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if _is_interval(value):
        return interval_text(value)
    if isinstance(value, bool | list | tuple | dict):
        return json.dumps(json_value(value), ensure_ascii=False)
    return _time_text(value) if isinstance(value, datetime) else str(value)


def value_of_json(field: Field, value: Any) -> Any:
    """Of the field's type, as far as JSON has no word for it; the query checks the rest."""
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


def value_of_text(field: Field, text: str) -> Any:
    """A number, text, bytes as text or 0x and hexadecimal digits, true or false, a date, or a time.

    Dates and times in ISO 8601, in UTC when it names no zone.
    """
    parse, what = _OF_TEXT.get(field.type.name, (str, "text"))
    try:
        return parse(text)
    except (ValueError, KeyError, InvalidOperation):
        raise InvalidQuery(f"{field.name!r} is {field.type}; {text!r} is not {what}") from None


def base64_text(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def bytes_of_base64(text: str) -> bytes:
    """Raises `ValueError` for what is not base64, or not in its one form."""
    return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)


def interval_text(value: Any) -> str:
    """ISO 8601, of Arrow's months, days and nanoseconds."""
    return f"P{value.months}M{value.days}DT{Decimal(value.nanoseconds).scaleb(-9).normalize():f}S"


def _is_interval(value: Any) -> bool:
    return hasattr(value, "nanoseconds") and hasattr(value, "months")


def _time_text(value: datetime) -> str:
    """ISO 8601 with microseconds, in UTC; without a zone when it has none."""
    if value.tzinfo is None:
        return value.isoformat(timespec="microseconds")
    return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def time_of_text(text: str) -> datetime:
    """A time in ISO 8601, in UTC when it names no zone; ValueError."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


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


def _double_of_text(text: str) -> float:
    """Returns the number, which is infinite only where the text says so in letters."""
    if math.isinf(found := float(text)) and any(map(str.isdigit, text)):
        raise ValueError
    return found


def _decimal_of_json(value: Any) -> Decimal:
    """JSON's numbers are not all exact: text is."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError
    return Decimal(value)


def _bytes_of_text(text: str) -> bytes:
    return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode()


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


# for each type what reads it, and what it should have been
_OF_JSON: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bytes": (_bytes_of_json, "base64"),
    "timestamp": (time_of_text, "a time in ISO 8601, like 2026-01-31T12:00:00Z"),
    "date": (date.fromisoformat, "a date, like 2026-01-31"),
    "decimal": (_decimal_of_json, 'a decimal number in quotes, like "0.10"'),
    "double": (_double_of_json, 'a number, "NaN", "Infinity" or "-Infinity"'),
    "float": (_double_of_json, 'a number, "NaN", "Infinity" or "-Infinity"'),
}
_OF_TEXT: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "long": (int, "a whole number"),
    "double": (_double_of_text, "a number that a double has"),
    "float": (_double_of_text, "a number that a double has"),
    "date": (date.fromisoformat, "a date, like 2026-01-31"),
    "decimal": (Decimal, "a decimal number, like 0.10"),
    "bytes": (_bytes_of_text, "hexadecimal after 0x"),
    "boolean": (_truth, "true or false"),
    "timestamp": (time_of_text, "a time like 2026-01-31T12:00"),
}
