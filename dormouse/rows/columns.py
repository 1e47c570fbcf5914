"""The columns of row tables and their types: how values of Python, JSON and CSV are stored in files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any, Literal, get_args

from dormouse.errors import InvalidColumn, InvalidRow, InvalidSchema, one_line
from dormouse.model.json_values import json_text, json_value, parse_json
from dormouse.model.table import DROPPED, ROW_DELETED, ROW_ID, ROW_VERSION
from dormouse.model.types import (
    BOOLEAN,
    DOUBLE,
    EXACT_MAX,
    LONG,
    STRING,
    DataType,
    check_field_name,
    exact_double,
)

ColumnType = Literal["INTEGER", "DOUBLE", "STRING", "DATE", "BOOLEAN", "ENTITY", "LINK", "FILE", "JSON"]
TYPES: tuple[ColumnType, ...] = get_args(ColumnType)

STORED: dict[str, DataType] = {
    "INTEGER": LONG,
    "DOUBLE": DOUBLE,
    "STRING": STRING,
    "DATE": LONG,  # UTC milliseconds
    "BOOLEAN": BOOLEAN,
    "ENTITY": STRING,
    "LINK": STRING,
    "FILE": STRING,
    "JSON": STRING,
}
"""The type in which files store the values of each column type."""

FILE_REFERENCE = (
    r"file:([0-9a-f]{32}):([0-9]{1,18}):([0-9a-f]{64}):([^/.\x00-\x1f\x7f][^/\x00-\x1f\x7f]{0,254})"
)
LINK_SCHEMES = ("http", "https", "ftp", "ftps", "sftp", "s3", "gs", "mailto")
_ROW = r"(?::[1-9][0-9]{0,18}){0,2}"
FORMS: dict[str, tuple[str, str]] = {
    "ENTITY": (
        rf"[A-Za-z_][A-Za-z0-9_-]*{_ROW}",
        "is no reference to a table or a row: write table, table:ROW_ID or table:ROW_ID:ROW_VERSION",
    ),
    "LINK": (
        r"(?i:(?:https?|ftps?|sftp|s3|gs)://[^\x00-\x20\x7f/]|mailto:[^\x00-\x20\x7f])[^\x00-\x20\x7f]*",
        f"is no link: a link is a whole URL without spaces, of the schemes {', '.join(LINK_SCHEMES)}",
    ),
    "FILE": (FILE_REFERENCE, "is no reference to a file: put the file first, which gives the reference"),
}
"""The pattern of valid texts of some types, and the error for other texts.

Python and Arrow match the same texts with the patterns.
"""

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1
JSON_CHARACTERS_MAX = 64 * 1024 * 1024
_SPECIAL = {"nan", "infinity", "inf", "-infinity", "-inf"}
_WHOLE_FLOAT = re.compile(r"([+-]?\d{1,16})\.0*")
"""A whole number as pandas writes it in a column with nulls, such as 5.0.

A number of more than 16 digits does not match, because a float may have lost some of its digits.
"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Misfit(ValueError):
    """An error: a value does not fit its type. Its text completes a sentence that begins with the value."""


def stored_value(kind: str, value: Any) -> Any:
    """Returns a value in the form in which files store it. The value is not null. Raises `Misfit`."""
    return _CHECKS[kind](value)


def parsed_value(kind: str, text: str) -> Any:
    """Returns the value of a text in the form in which files store it. Raises `Misfit`.

    The text has no white space at its ends and is not empty.
    """
    return _PARSERS[kind](text)


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
        return int(value)  # pandas has whole numbers as floats if there are nulls
    if not isinstance(value, int) or isinstance(value, bool):
        raise Misfit("is not a whole number")
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        raise Misfit("does not fit 64 bits")
    return value


def _double(value: Any) -> float:
    if isinstance(value, str) and value.lower() in _SPECIAL:
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Misfit("is not a number")
    if isinstance(value, float):
        return value
    try:
        return exact_double(str(value))
    except ValueError as error:
        raise Misfit(str(error)) from None


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Misfit("is not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Misfit("has half a surrogate pair, which is no character") from None
    if "\0" in value:
        raise Misfit("has a NUL character")  # PostgreSQL's text cannot hold it
    return value


def _text(value: Any) -> str:
    if not _string(value):
        raise Misfit("is empty")
    return str(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Misfit("is neither true nor false")
    return value


def _date(value: Any) -> int:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise Misfit("is not a date, like 2024-01-31T12:00:00Z") from None
        value = moment if moment.tzinfo else moment.replace(tzinfo=UTC)  # text without a zone is in UTC
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise Misfit("has no time zone: give it one, as datetime.now(UTC) has one")
        past = value - _EPOCH
        return (past.days * 86_400 + past.seconds) * 1_000 + past.microseconds // 1_000
    if isinstance(value, date):
        return (value.toordinal() - _EPOCH.toordinal()) * 86_400_000
    if not isinstance(value, int) or isinstance(value, bool):
        raise Misfit("is neither milliseconds since 1970 nor a date")
    return _integer(value)


def _json(value: Any) -> str:
    try:
        text = json_text(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Misfit(f"is not a JSON value: {one_line(error)}") from None
    if len(text) > JSON_CHARACTERS_MAX:
        raise Misfit(f"is longer than {JSON_CHARACTERS_MAX:,} characters")
    return text


def _integer_of(text: str) -> int:
    if not text.isascii() or "_" in text:
        raise Misfit("is not a whole number")
    try:
        if not (found := _WHOLE_FLOAT.fullmatch(text)):
            return _integer(int(text))
        whole = int(found[1])
        return _integer(whole if abs(whole) <= EXACT_MAX else text)
    except Misfit:
        raise
    except ValueError:
        raise Misfit("is not a whole number") from None


def _double_of(text: str) -> float:
    try:
        float(text if text.isascii() and "_" not in text else "-")
    except ValueError:
        raise Misfit("is not a number") from None
    try:
        return exact_double(text)
    except ValueError as error:
        raise Misfit(str(error)) from None


def _boolean_of(text: str) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if known is None:
        raise Misfit("is neither true nor false")
    return known


def _date_of(text: str) -> int:
    digits = text.removeprefix("-")
    return _date(_integer_of(text) if digits.isascii() and digits.isdigit() else text)


def _json_of(text: str) -> str:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a value of JSON")

    try:
        return _json(parse_json(text, no_constant))
    except Misfit:
        raise
    except (ValueError, RecursionError) as error:
        raise Misfit(f"is not JSON: {one_line(error)}") from None


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "INTEGER": _integer,
    "DOUBLE": _double,
    "STRING": _string,
    "DATE": _date,
    "BOOLEAN": _boolean,
    **dict.fromkeys(FORMS, _text),
    "JSON": _json,
}
_PARSERS: dict[str, Callable[[str], Any]] = {
    **_CHECKS,
    "INTEGER": _integer_of,
    "DOUBLE": _double_of,
    "BOOLEAN": _boolean_of,
    "DATE": _date_of,
    "JSON": _json_of,
}


RESERVED = frozenset({ROW_ID, ROW_VERSION, ROW_DELETED, "ROW_ETAG"})

COLUMNS_MAX = 152
SIZE_DEFAULT, SIZE_MAX = 50, 1_000
"""The default and the largest number of characters of a STRING."""
LINK_MAX = 1_000
ENUM_MAX = 1_000
_SHOWN_MAX, _LISTED_MAX = 60, 10
_LACKING = re.compile(r'^"(NaN|-?Infinity)"$|-0\.0|\\u0000')
"""A pattern of JSON that `jsonb` cannot keep: numbers that are not finite, the negative zero, and NUL."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a row table.

    `size_max` is the largest number of characters of a STRING, by default 50. Rows without a value get
    `default`. `enum` lists the allowed values. The table sets `column_id`, which never changes. Raises
    `InvalidColumn`.
    """

    name: str
    type: ColumnType
    size_max: int | None = None
    default: Any = field(default=None, hash=False)  # of JSON it may be a list
    enum: Sequence[Any] | None = None
    column_id: int | None = None

    def __post_init__(self) -> None:
        check_column_name(self.name)
        if self.type not in TYPES:
            raise InvalidColumn(
                f"column {self.name!r}: {self.type!r} is no type; they are {', '.join(TYPES)}"
            )
        object.__setattr__(self, "size_max", self._checked_size())
        object.__setattr__(self, "enum", self._checked_enum())
        if self.default is not None and self.type == "JSON":
            _of_column(self, self.default, "the default")  # only checks: files store JSON as text
        elif self.default is not None:
            object.__setattr__(self, "default", _of_column(self, self.default, "the default"))

    def _checked_size(self) -> int | None:
        if self.type != "STRING":
            if self.size_max is not None:
                raise InvalidColumn(f"column {self.name!r} is {self.type}: only a STRING has a size_max")
            return None
        size = SIZE_DEFAULT if self.size_max is None else self.size_max
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= SIZE_MAX:
            raise InvalidColumn(
                f"column {self.name!r}: size_max is 1 to {SIZE_MAX} characters, not {self.size_max!r}"
            )
        return size

    def _checked_enum(self) -> tuple[Any, ...] | None:
        if self.enum is None:
            return None
        if self.type in ("JSON", "DOUBLE", "BOOLEAN"):
            raise InvalidColumn(f"column {self.name!r}: a {self.type} has no enum")
        if isinstance(self.enum, str) or not isinstance(self.enum, Iterable):
            raise InvalidColumn(f"column {self.name!r}: enum is a list of values, not {self.enum!r}")
        plain = replace(self, enum=None, default=None)
        values = tuple(_of_column(plain, value, "the enum") for value in self.enum)
        if not values or len(values) > ENUM_MAX or None in values or len(set(values)) < len(values):
            raise InvalidColumn(
                f"column {self.name!r}: an enum has 1 to {ENUM_MAX} values, all different and none null"
            )
        return values

    @property
    def stored(self) -> DataType:
        """The type in which files store the column's values."""
        return STORED[self.type]

    @property
    def characters_max(self) -> int | None:
        """The largest number of characters of a value, or None for types without such a limit."""
        return self.size_max if self.type == "STRING" else LINK_MAX if self.type in FORMS else None

    @property
    def stored_default(self) -> Any:
        """The default value in the form in which files store it."""
        return value_of(self, self.default, "the default", formed=False)

    def __str__(self) -> str:
        return f"{self.name} {self.type}" + (f"({self.size_max})" if self.size_max else "")

    def to_json(self) -> dict[str, Any]:
        """Returns the column as a JSON object, without fields that are not set."""
        given = {
            "column_id": self.column_id,
            "name": self.name,
            "type": self.type,
            "size_max": self.size_max,
            "default": self.default,
            "enum": None if self.enum is None else list(self.enum),
        }
        return {key: value for key, value in given.items() if value is not None}

    @staticmethod
    def from_json(value: Any) -> Column:
        """Returns the column of an object that `to_json` made. Raises `InvalidColumn`."""
        known = {"column_id", "name", "type", "size_max", "default", "enum"}
        if not isinstance(value, dict) or not {"name", "type"} <= value.keys() <= known:
            raise InvalidColumn(
                f"a column is an object with name, type and optionally size_max, default, enum, not {value!r}"
            )
        return Column(**value)


def check_new(column: Column) -> Column:
    """Returns a new column after checking that its default and enum have the form of its type.

    Raises `InvalidColumn`. Only new columns are checked, because columns of earlier releases may break this
    rule.
    """
    if (form := FORMS.get(column.type)) is not None:
        for value in (column.default, *(column.enum or ())):
            if value is not None and not re.fullmatch(form[0], value):
                raise InvalidColumn(f"column {column.name!r} ({column.type}): {value!r} {form[1]}")
    return column


def to_jsonb(column: Column) -> dict[str, Any]:
    """Returns a column as the JSON object that the database keeps.

    A default that `jsonb` cannot hold is kept as JSON text, in a field that earlier releases do not know.
    """
    stored = column.to_json()
    if column.default is not None and _LACKING.search(text := json.dumps(json_value(column.default))):
        stored["default_text"] = text
        del stored["default"]
    return stored


def from_jsonb(stored: Any) -> Column:
    """Returns the column of an object that `to_jsonb` made, or that `to_json` made in earlier releases."""
    given = dict(stored)
    text = given.pop("default_text", None)
    return Column.from_json(given if text is None else {**given, "default": json.loads(text)})


def value_of(column: Column, value: Any, label: object, *, formed: bool = True) -> Any:
    """Returns a Python or JSON value in the form in which files store it.

    NaN becomes null, except in a DOUBLE.

    With `formed`, a text must match the pattern of its type in `FORMS`. Raises `InvalidRow`, whose message
    begins with the label.
    """
    if value is None or (column.type != "DOUBLE" and _is_nan(value)):
        return None
    try:
        return _within(column, stored_value(column.type, value), formed=formed)
    except Misfit as cause:
        raise _refused(column, value, label, cause) from None


def _is_nan(value: Any) -> bool:
    """Returns whether a value is NaN or NaT, which pandas uses for missing values."""
    return isinstance(value, float | datetime) and value != value  # noqa: PLR0124


def text_value(column: Column, text: str | None, label: object) -> Any:
    """Returns the value of a CSV text in the form in which files store it. The text is stripped.

    Raises `InvalidRow`, whose message begins with the label.
    """
    if text is None:
        return None
    try:
        return _within(column, parsed_value(column.type, text), formed=True)
    except Misfit as cause:
        raise _refused(column, text, label, cause) from None


def _within(column: Column, value: Any, *, formed: bool) -> Any:
    size = column.characters_max
    if size is not None and len(value) > size:
        raise Misfit(f"has {len(value):,} characters, and may have {size:,}")
    if formed and (form := FORMS.get(column.type)) is not None and not re.fullmatch(form[0], value):
        raise Misfit(form[1])
    if column.enum is not None and value not in column.enum:
        allowed = ", ".join(map(repr, column.enum[:_LISTED_MAX]))
        raise Misfit(f"is none of {allowed}{', …' if len(column.enum) > _LISTED_MAX else ''}")
    return value


def _refused(column: Column, value: Any, label: object, cause: Misfit) -> InvalidRow:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}…"
    return InvalidRow(f"{label}, column {column.name!r} ({column.type}): {shown} {cause}", column=column.name)


def _of_column(column: Column, value: Any, label: object) -> Any:
    try:
        return value_of(column, value, label, formed=False)
    except InvalidRow as error:
        raise InvalidColumn(str(error)) from None


def check_column_name(name: object) -> None:
    """Raises `InvalidColumn` for a name that a column cannot have."""
    try:
        check_field_name(name)
        if not str(name).isidentifier():
            raise InvalidSchema(
                f"field name {name!r}: use letters, digits and underscores, first a letter or one underscore"
            )
    except InvalidSchema as error:
        raise InvalidColumn(str(error).replace("field name", "column name")) from None
    if str(name).upper() in RESERVED:
        raise InvalidColumn(f"column name {name!r} is reserved, as are {', '.join(sorted(RESERVED))}")
    if str(name).lower().startswith(DROPPED):
        raise InvalidColumn(f"column name {name!r}: names that begin with {DROPPED!r} are reserved")


def check_columns(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Returns the columns of one table as a tuple.

    Raises `InvalidColumn` for too many columns, and for names that differ only in case.
    """
    if isinstance(columns, Column) or not isinstance(columns, Iterable):
        raise InvalidColumn(f"columns must be a list of dm.Column, not {columns!r}")
    listed = tuple(columns)
    for column in listed:
        if not isinstance(column, Column):
            raise InvalidColumn(f"columns must be a list of dm.Column, not {column!r}")
    if len(listed) > COLUMNS_MAX:
        raise InvalidColumn(f"a row table has at most {COLUMNS_MAX} columns, not {len(listed)}")
    seen: dict[str, str] = {}
    for column in listed:
        other = seen.setdefault(column.name.casefold(), column.name)
        if other is not column.name:
            raise InvalidColumn(
                f"column names {other!r} and {column.name!r} must differ (case does not count)"
            )
    return listed


def column_named(columns: Sequence[Column], name: object) -> Column:
    """Returns the column with the given name. Raises `InvalidColumn` if there is none."""
    for column in columns:
        if column.name == name:
            return column
    known = ", ".join(column.name for column in columns)
    raise InvalidColumn(f"there is no column {name!r}; the columns are {known or 'none'}", column=str(name))
