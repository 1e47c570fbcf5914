"""Values of rows, keys and answers as JSON and as text, and back; docs/reference/values.md has the table.

Arrow columns are written by `dormouse.data.export`, after the same rules.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from dormouse.errors import InvalidQuery
from dormouse.model.text import is_text
from dormouse.model.types import Field

# Values of NumPy, pandas, Polars and Arrow as Python's, without importing any of them.

_PACKAGES = {"numpy", "pandas", "polars", "pyarrow"}
_OF_MANY = ("to_pylist", "to_list", "tolist")
_OF_ONE = ("as_py", "to_pydatetime", "item")


def plain(value: Any) -> Any:
    """The value as Python has it, a list for arrays and series; what is Python's already, as it is.

    Instants are taken in microseconds, and left alone if that would lose anything.
    """
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _PACKAGES:
        return value
    if kind.__name__ == "datetime64":
        exact = value.astype("datetime64[us]")
        return exact.item() if exact == value and value.dtype.str[-2:] != "D]" else value.item()
    methods = _OF_ONE if getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__") else _OF_MANY
    convert = next((getattr(value, name) for name in methods if hasattr(value, name)), None)
    if convert is None or bool(getattr(value, "nanosecond", 0)):
        return value
    found = convert()
    # of Arrow's nanoseconds pandas makes its own
    return value if getattr(found, "nanosecond", 0) else found


# Parameters of statements, as users give them.

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
