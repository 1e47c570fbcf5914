"""Fields and data types, and conversions of values from other libraries and from text.

Key columns have one of a few types; value columns can have any type. docs/reference/values.md lists the forms
of values. `dormouse.sources.export` writes Arrow columns by the same rules.
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, InvalidOperation
from typing import Any, cast
from uuid import UUID

from dormouse.errors import InvalidQuery, InvalidSchema
from dormouse.model.text import check_cases

FIELD_NAME_LENGTH_MAX = 1_000
NESTING_DEPTH_MAX = 16
DECIMAL_DIGITS_MAX = 38
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

_PACKAGES = {"numpy", "pandas", "polars", "pyarrow"}
_OF_MANY = ("to_pylist", "to_list", "tolist")
_OF_ONE = ("as_py", "to_pydatetime", "item")

Parameters = Sequence[Any] | Mapping[str, Any]
PARAMETERS_MAX = 10_000
NESTING_MAX = 100
"""The limit of the depth of lists within lists in a parameter."""

_TYPES = (bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal, UUID, type(None))
EXACT_MAX = 2.0**53
"""The limit up to which a double can represent every whole number."""


@dataclass(frozen=True, slots=True)
class DataType:
    """A data type.

    - `element`: the type of the elements of a list, or of the values of a map.
    - `key`: the type of the keys of a map.
    - `precision`, `scale`: the most digits of a decimal, and the number of digits after the point.
    - `parts`: the fields of a struct.
    """

    name: str
    element: DataType | None = None
    key: DataType | None = None
    precision: int | None = None
    scale: int | None = None
    parts: tuple[Field, ...] = ()

    def __repr__(self) -> str:
        """Returns the Python expression of the type."""
        if self.precision is not None:
            inside = f"{self.precision}, {self.scale}"
        elif self.parts:
            inside = f"[{', '.join(map(repr, self.parts))}]"
        else:
            inside = ", ".join(map(repr, self.inner))
        return f"{self.name.upper()}({inside})" if inside else self.name.upper()

    def __str__(self) -> str:
        if self.key is not None:
            return f"map<{self.key},{self.element}>"
        if self.precision is not None:
            return f"decimal({self.precision},{self.scale})"
        if self.parts:
            parts = (f"{p.name}:{p.type}{'?' if p.nullable else ''}" for p in self.parts)
            return f"struct<{','.join(parts)}>"
        return f"list<{self.element}>" if self.element is not None else self.name

    @staticmethod
    def from_json(value: Any) -> DataType:
        """Converts the result of `to_json` back to a type. Raises `InvalidSchema` for other values."""
        if isinstance(value, str) and value in _PRIMITIVES:
            return _PRIMITIVES[value]
        match value:
            case {"list": {"element": element}}:
                return LIST(DataType.from_json(element))
            case {"map": {"key": key, "element": element}}:
                return MAP(DataType.from_json(key), DataType.from_json(element))
            case {"decimal": {"precision": precision, "scale": scale}}:
                return DECIMAL(precision, scale)
            case {"struct": {"parts": list(parts)}}:
                return STRUCT([Field.from_json(part) for part in parts])
        known = ", ".join(sorted(_PRIMITIVES))
        raise InvalidSchema(f"unknown type {value!r}; use one of {known}, decimal, list, map or struct")

    @property
    def is_key_type(self) -> bool:
        return self.name in KEY_TYPES

    @property
    def is_nested(self) -> bool:
        return self.element is not None or bool(self.parts)

    @property
    def is_floating(self) -> bool:
        """True if values may be NaN. Parquet's statistics do not count NaN."""
        return self.name in {"double", "float"}

    @property
    def inner(self) -> tuple[DataType, ...]:
        """The types that a list, map or struct contains."""
        return (*(t for t in (self.key, self.element) if t is not None), *(part.type for part in self.parts))

    def to_json(self) -> Any:
        """Returns the type as JSON: its name, or an object for a type with parameters."""
        if self.precision is not None:
            return {self.name: {"precision": self.precision, "scale": self.scale}}
        if self.parts:
            return {self.name: {"parts": [part.to_json() for part in self.parts]}}
        if self.element is None:
            return self.name
        inner: dict[str, Any] = {"element": self.element.to_json()}
        if self.key is not None:
            inner["key"] = self.key.to_json()
        return {self.name: inner}


@dataclass(frozen=True, slots=True)
class Field:
    """A named, typed column, or part of a struct. Key columns cannot be nullable."""

    name: str
    type: DataType
    nullable: bool = False

    def __repr__(self) -> str:
        return f"Field({self.name!r}, {self.type!r}{', nullable=True' if self.nullable else ''})"

    def __post_init__(self) -> None:
        check_field_name(self.name)
        if not isinstance(self.nullable, bool):
            raise InvalidSchema(f"field {self.name!r}: nullable is True or False, not {self.nullable!r}")
        if not isinstance(self.type, DataType):
            raise InvalidSchema(
                f"field {self.name!r}: {self.type!r} is not a type; use dm.LONG, dm.STRING, …"
            )

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type.to_json(), "nullable": self.nullable}

    @staticmethod
    def from_json(value: Any) -> Field:
        """Converts the result of `to_json` to a field; `nullable` may be missing. Raises `InvalidSchema`."""
        match value:
            case {"name": name, "type": type_, **rest} if set(rest) <= {"nullable"}:
                return Field(name, DataType.from_json(type_), cast(bool, rest.get("nullable", False)))
        raise InvalidSchema(f"a field is an object with name, type and optionally nullable, not {value!r}")


def is_text(value: object) -> bool:
    """Returns whether the value is a string that PostgreSQL can store."""
    return (
        isinstance(value, str)
        and "\x00" not in value
        and (value.isascii() or not _LONE_SURROGATE.search(value))
    )


def check_field_name(name: object) -> None:
    """Raises `InvalidSchema` for a name that is not text, is empty, too long, reserved or has a NUL."""
    if not isinstance(name, str) or not name or not is_text(name):
        raise InvalidSchema(f"field name {name!r}: it must be text, not empty, and without NUL")
    if name.startswith("__"):
        raise InvalidSchema(f"field name {name!r}: names that begin with two underscores are reserved")
    if len(name) > FIELD_NAME_LENGTH_MAX:
        raise InvalidSchema(f"field name {name[:20]!r}… is longer than {FIELD_NAME_LENGTH_MAX} characters")


INT = DataType("int")  # 32 bit, signed
LONG = DataType("long")  # 64 bit, signed
STRING = DataType("string")  # Unicode; compares by code point
BYTES = DataType("bytes")  # compares unsigned
DOUBLE = DataType("double")
FLOAT = DataType("float")  # 32 bit
BOOLEAN = DataType("boolean")
TIMESTAMP = DataType("timestamp")  # microseconds since the epoch, UTC
DATE = DataType("date")  # a day of no time zone

KEY_TYPES = frozenset({"int", "long", "string", "bytes", "timestamp", "date"})
KEY_TYPE_NAMES = "INT, LONG, STRING, BYTES, TIMESTAMP or DATE"
_PRIMITIVES = {t.name: t for t in (INT, LONG, STRING, BYTES, DOUBLE, FLOAT, BOOLEAN, TIMESTAMP, DATE)}


def DECIMAL(precision: int, scale: int) -> DataType:  # noqa: N802 - a type, like the constants
    """Returns a type of exact numbers: up to `precision` digits (at most 38), `scale` of them after the
    point.
    """
    for what, given, most in (("precision", precision, DECIMAL_DIGITS_MAX), ("scale", scale, precision)):
        least = int(what == "precision")
        if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
            raise InvalidSchema(
                f"a decimal's {what} must be a whole number from {least} to {most}, not {given!r}"
            )
    return DataType("decimal", precision=precision, scale=scale)


def LIST(element: DataType) -> DataType:  # noqa: N802
    """Returns a type of lists of `element`; lists, maps and structs may be nested."""
    return DataType("list", element=_checked(element, "a list's element"))


def MAP(key: DataType, value: DataType) -> DataType:  # noqa: N802
    """Returns a type of maps from a key type to any type."""
    if not (isinstance(key, DataType) and key.is_key_type):
        raise InvalidSchema(f"a map's key must be {KEY_TYPE_NAMES}, not {key}")
    return DataType("map", element=_checked(value, "a map's value"), key=key)


def STRUCT(parts: Iterable[Field]) -> DataType:  # noqa: N802
    """Returns a type of several named values: `dm.STRUCT([dm.Field("x", dm.DOUBLE), dm.Field("y",
    dm.DOUBLE)])`.
    """
    found = tuple(parts) if isinstance(parts, Iterable) else ()
    if not found or not all(isinstance(part, Field) for part in found):
        raise InvalidSchema(f"a struct's parts must be a list of dm.Field, not {parts!r}")
    names = [part.name.casefold() for part in found]
    for part in found:
        if names.count(part.name.casefold()) > 1:
            raise InvalidSchema(f"a struct has two parts {part.name!r} (case does not count)")
        _checked(part.type, f"part {part.name!r}")
    return DataType("struct", parts=found)


def _checked(inner: DataType, what: str) -> DataType:
    if not isinstance(inner, DataType):
        raise InvalidSchema(f"{what} must be a type such as dm.STRING, not {inner!r}")
    if _depth(inner) >= NESTING_DEPTH_MAX:
        raise InvalidSchema(f"lists, maps and structs nest at most {NESTING_DEPTH_MAX} deep")
    return inner


def _depth(data_type: DataType) -> int:
    return 1 + max(map(_depth, data_type.inner), default=0)


def plain(value: Any) -> Any:
    """Converts a value of NumPy, pandas, Polars or Arrow to a Python value, an array or series to a list.

    It imports none of these libraries, and returns Python values unchanged. A time with digits beyond
    microseconds is returned unchanged, too.
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
    # pandas turns Arrow's nanoseconds into a type of its own
    return value if getattr(found, "nanosecond", 0) else found


def checked_parameters(parameters: object) -> Parameters:
    """Returns the parameters of a statement as a list or a dict; an empty list for None.

    Raises `InvalidQuery` for too many parameters, for two whose names differ in upper and lower case only, or
    for a value for which DuckDB has no type.
    """
    if parameters is None:
        return []
    if isinstance(parameters, Mapping):
        _check_count(parameters)
        check_cases("parameters", map(_parameter_name, parameters))
        return {name: _checked_parameter(f"${name}", value) for name, value in parameters.items()}
    if isinstance(parameters, Sequence) and not isinstance(parameters, str | bytes | bytearray):
        _check_count(parameters)
        return [_checked_parameter(f"${number}", value) for number, value in enumerate(parameters, 1)]
    raise InvalidQuery(
        f"parameters must be a list for $1, $2, … or a dict for $name, not {type(parameters).__name__}"
    )


def _check_count(parameters: Sequence[Any] | Mapping[Any, Any]) -> None:
    count = len(parameters)
    if count > PARAMETERS_MAX:
        raise InvalidQuery(
            f"a statement can have {PARAMETERS_MAX:,} parameters, not {count:,}: send several statements; "
            "SQL over tables takes a list as one parameter, for x = ANY($1)"
        )


def _parameter_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidQuery(f"{name!r} cannot be a parameter's name: use letters, digits and '_'")
    return name


def check_nesting(name: str, depth: int) -> None:
    """Raises `InvalidQuery` if `depth`, the depth of lists in a parameter, exceeds `NESTING_MAX`."""
    if depth > NESTING_MAX:
        raise InvalidQuery(f"parameter {name} has more than {NESTING_MAX} lists nested in each other")


def _checked_parameter(name: str, value: Any, depth: int = 1) -> Any:
    if type(value).__module__ == "numpy":
        # data frames give NumPy's types
        value = value.tolist()
    if isinstance(value, list | tuple):
        check_nesting(name, depth)
        return [_checked_parameter(name, item, depth + 1) for item in value]
    if isinstance(value, str) and not is_text(value):
        raise InvalidQuery(f"parameter {name} must have no NUL and no half of a surrogate pair")
    if not isinstance(value, _TYPES):
        raise InvalidQuery(
            f"parameter {name} is {value!r:.100}, which SQL has no type for; give a number, text, bytes, a "
            "time, None, or a list of these"
        )
    return value


def value_of_text(field: Field, text: str) -> Any:
    """Parses a text as a value of the field's type. Raises `InvalidQuery` if that fails.

    Bytes are hexadecimal digits after `0x`, or else the text in UTF-8. Dates and times are in ISO 8601. A
    time without a zone is in UTC.
    """
    parse, what = _OF_TEXT.get(field.type.name, (str, "text"))
    try:
        return parse(text)
    except (ValueError, KeyError, InvalidOperation):
        raise InvalidQuery(f"{field.name!r} is {field.type}; {text!r} is not {what}") from None


def base64_text(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def bytes_of_base64(text: str) -> bytes:
    """Decodes base64. Raises `ValueError` for text that is not base64 in its canonical form."""
    return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)


def interval_text(value: Any) -> str:
    """Returns an interval of Arrow (months, days, nanoseconds) in ISO 8601."""
    return f"P{value.months}M{value.days}DT{Decimal(value.nanoseconds).scaleb(-9).normalize():f}S"


def is_interval(value: Any) -> bool:
    return hasattr(value, "nanoseconds") and hasattr(value, "months")


def time_text(value: datetime) -> str:
    """Returns a time in ISO 8601 with microseconds: in UTC, or without a zone if the time has none."""
    if value.tzinfo is None:
        return value.isoformat(timespec="microseconds")
    return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def time_of_text(text: str) -> datetime:
    """Parses a time in ISO 8601; without a zone, it is in UTC. Raises `ValueError` for other texts."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _double_of_text(text: str) -> float:
    """Parses a double. Raises `ValueError` for digits that are too large for a double."""
    if math.isinf(found := float(text)) and any(map(str.isdigit, text)):
        raise ValueError
    return found


def _bytes_of_text(text: str) -> bytes:
    return bytes.fromhex(text[2:]) if text.startswith("0x") else text.encode()


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


# for each type the parser, and the expected form, for messages
_OF_TEXT: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "long": (int, "a whole number"),
    "double": (_double_of_text, "a number that fits a double"),
    "float": (_double_of_text, "a number that fits a double"),
    "date": (date.fromisoformat, "a date, like 2026-01-31"),
    "decimal": (Decimal, "a decimal number, like 0.10"),
    "bytes": (_bytes_of_text, "hexadecimal after 0x"),
    "boolean": (_truth, "true or false"),
    "timestamp": (time_of_text, "a time like 2026-01-31T12:00"),
}


def keeps(number: float, text: str, shortest: str) -> bool:
    """Returns whether a floating-point number has the same digits as the text from which it was parsed.

    It has them in two cases:
    - The text has the value of `shortest`, the shortest text that identifies the number.
    - The number's exact value, rounded to as many digits as the text has, equals the text's value.
    """
    if not math.isfinite(number):
        return False
    value = Decimal(text.strip())
    if value == Decimal(shortest):
        return True
    if value != value.to_integral_value():
        value = value.normalize()  # zeros at the end of a fraction carry no precision
    return value == Context(prec=len(value.as_tuple().digits)).create_decimal(Decimal(number))


def exact_double(text: str) -> float:
    """Parses a decimal number as a double. Raises `ValueError` in these cases, with the reason:

    - The number is too large or too small, so that the double would be infinity or zero.
    - The number is 2**53 or more, and the double would have other digits.

    Smaller numbers are rounded to the nearest double.
    """
    number = float(text)
    if (
        math.isfinite(number)
        and (number == 0 or abs(number) >= EXACT_MAX)
        and not keeps(number, text, repr(number))
    ):
        raise ValueError("is not exact in a double" if number else "is smaller than any double")
    if not math.isfinite(number) and any(map(str.isdigit, text)):
        raise ValueError("is larger than any double")
    return number
