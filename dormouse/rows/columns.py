"""The columns of a row table and their types: how a value of Python, JSON or CSV stands in files."""

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
"""How the values of each type stand in files."""

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
"""The pattern of the texts of a type, which Python and Arrow read alike, and why other texts are refused."""

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1
JSON_CHARACTERS_MAX = 64 * 1024 * 1024
_SPECIAL = {"nan", "infinity", "inf", "-infinity", "-inf"}
_WHOLE_FLOAT = re.compile(r"([+-]?\d{1,16})\.0*")
"""As pandas writes whole numbers beside nulls; of more digits some may be lost."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Misfit(ValueError):
    """Why a value is none of its type, to follow the value in a sentence."""


def stored_value(kind: str, value: Any) -> Any:
    """A value that is not null, as files have it; `Misfit`."""
    return _CHECKS[kind](value)


def parsed_value(kind: str, text: str) -> Any:
    """A text of CSV, without space around it and not empty, as files have it; `Misfit`."""
    return _PARSERS[kind](text)


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
        return int(value)  # as pandas has whole numbers beside nulls
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
        raise Misfit("has a NUL character")  # which PostgreSQL's text cannot have
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
            found = datetime.fromisoformat(value)
        except ValueError:
            raise Misfit("is not a date, like 2024-01-31T12:00:00Z") from None
        value = found if found.tzinfo else found.replace(tzinfo=UTC)  # text without a zone is in UTC
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
        raise Misfit(f"is no value of JSON: {one_line(error)}") from None
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
        raise ValueError(f"{name} is none of its values")

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
"""Characters of a STRING."""
LINK_MAX = 1_000
ENUM_MAX = 1_000
_SHOWN_MAX, _LISTED_MAX = 60, 10
_LACKING = re.compile(r'^"(NaN|-?Infinity)"$|-0\.0|\\u0000')
"""What is not finite, the negative zero, and NUL."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `column_id` is given by the table, and stays.

    `size_max` are the characters of a STRING, by default 50; `default` is what a row has that has no value;
    `enum` are the values that it may have. Raises `InvalidColumn`.
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
            _of_column(self, self.default, "the default")  # as it was given, which files have as text
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
        """How its values stand in files."""
        return STORED[self.type]

    @property
    def characters_max(self) -> int | None:
        """Of the types that are text with a bound."""
        return self.size_max if self.type == "STRING" else LINK_MAX if self.type in FORMS else None

    @property
    def stored_default(self) -> Any:
        """The default as files have it."""
        return value_of(self, self.default, "the default", formed=False)

    def __str__(self) -> str:
        return f"{self.name} {self.type}" + (f"({self.size_max})" if self.size_max else "")

    def to_json(self) -> dict[str, Any]:
        """Without what is not set."""
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
    def from_json(found: Any) -> Column:
        """The column of `to_json`."""
        known = {"column_id", "name", "type", "size_max", "default", "enum"}
        if not isinstance(found, dict) or not {"name", "type"} <= found.keys() <= known:
            raise InvalidColumn(
                f"a column is an object with name, type and optionally size_max, default, enum, not {found!r}"
            )
        return Column(**found)


def check_new(column: Column) -> Column:
    """Returns a column that is to be made; `InvalidColumn` for a default or an enum without the type's form.

    Columns that earlier versions made may have such values.
    """
    if (form := FORMS.get(column.type)) is not None:
        for value in (column.default, *(column.enum or ())):
            if value is not None and not re.fullmatch(form[0], value):
                raise InvalidColumn(f"column {column.name!r} ({column.type}): {value!r} {form[1]}")
    return column


def to_jsonb(column: Column) -> dict[str, Any]:
    """As the database keeps it: a default that `jsonb` lacks is JSON as text, unknown to earlier versions."""
    found = column.to_json()
    if column.default is not None and _LACKING.search(text := json.dumps(json_value(column.default))):
        found["default_text"] = text
        del found["default"]
    return found


def from_jsonb(found: Any) -> Column:
    """The column of `to_jsonb`; those of earlier versions are as `to_json` gives them."""
    given = dict(found)
    text = given.pop("default_text", None)
    return Column.from_json(given if text is None else {**given, "default": json.loads(text)})


def value_of(column: Column, value: Any, label: object, *, formed: bool = True) -> Any:
    """Returns a value of Python or JSON as files have it; null stays, and NaN is null but in a DOUBLE.

    `InvalidRow` begins with the label.

    `formed`: a text must have the form of its type, which `check_new` checks of defaults and enums.
    """
    if value is None or (column.type != "DOUBLE" and _is_nan(value)):
        return None
    try:
        return _within(column, stored_value(column.type, value), formed=formed)
    except Misfit as cause:
        raise _refused(column, value, label, cause) from None


def _is_nan(value: Any) -> bool:
    """Returns whether a value is NaN or NaT, which pandas has where there is nothing."""
    return isinstance(value, float | datetime) and value != value  # noqa: PLR0124


def text_value(column: Column, text: str | None, label: object) -> Any:
    """As `value_of`, of a text of CSV without space around it."""
    if text is None:
        return None
    try:
        return _within(column, parsed_value(column.type, text), formed=True)
    except Misfit as cause:
        raise _refused(column, text, label, cause) from None


def _within(column: Column, found: Any, *, formed: bool) -> Any:
    size = column.characters_max
    if size is not None and len(found) > size:
        raise Misfit(f"has {len(found):,} characters, and may have {size:,}")
    if formed and (form := FORMS.get(column.type)) is not None and not re.fullmatch(form[0], found):
        raise Misfit(form[1])
    if column.enum is not None and found not in column.enum:
        shown = ", ".join(map(repr, column.enum[:_LISTED_MAX]))
        raise Misfit(f"is none of {shown}{', …' if len(column.enum) > _LISTED_MAX else ''}")
    return found


def _refused(column: Column, value: Any, label: object, cause: Misfit) -> InvalidRow:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}…"
    said = f"{label}, column {column.name!r} ({column.type}): {shown} {cause}"
    return InvalidRow(said, column=column.name)


def _of_column(column: Column, value: Any, label: object) -> Any:
    try:
        return value_of(column, value, label, formed=False)
    except InvalidRow as error:
        raise InvalidColumn(str(error)) from None


def check_column_name(name: object) -> None:
    """`InvalidColumn` for a name that cannot be a column's."""
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
    """The columns of one table; `InvalidColumn` for too many, and for names that only differ in case."""
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
    """`InvalidColumn` when there is none."""
    for column in columns:
        if column.name == name:
            return column
    known = ", ".join(column.name for column in columns)
    said = f"there is no column {name!r}; the columns are {known or 'none'}"
    raise InvalidColumn(said, column=str(name))
