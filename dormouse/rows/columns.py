"""The columns of a row table: their types, limits, defaults, and the values that they may have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from dormouse.errors import InvalidColumn, InvalidRow, InvalidSchema
from dormouse.model.table import DROPPED, ROW_DELETED, ROW_ID, ROW_VERSION
from dormouse.model.types import DataType, check_field_name, json_value
from dormouse.rows.kinds import FORMS, STORED, TYPES, ColumnType, Misfit, parsed_value, stored_value

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


def value_of(column: Column, value: Any, label: str, *, formed: bool = True) -> Any:
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


def text_value(column: Column, text: str | None, label: str) -> Any:
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


def _refused(column: Column, value: Any, label: str, cause: Misfit) -> InvalidRow:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}…"
    said = f"{label}, column {column.name!r} ({column.type}): {shown} {cause}"
    return InvalidRow(said, column=column.name)


def _of_column(column: Column, value: Any, label: str) -> Any:
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
