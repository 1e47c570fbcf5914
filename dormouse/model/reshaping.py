"""Changes of a table's columns: each returns the next version of the schema, or the changed properties."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from dormouse.errors import InvalidInput, InvalidSchema
from dormouse.model.schema import Column, Schema, Stage
from dormouse.model.table import TableProperties
from dormouse.model.text import NAME, name_of, parts_of, quoted_name
from dormouse.model.types import DOUBLE, FLOAT, INT, LONG, DataType, Field

_WIDER = {INT: LONG, FLOAT: DOUBLE}
_CALLS = ("aggregate", "filter")
"""The properties that name columns in calls, like `sum(count)`."""
_LISTS = ("bloom_filter_columns",)
"""The properties that list columns' names."""


Evolve = Literal["add"]
"""The ways in which a load treats columns that its table lacks."""


def check_evolve(evolve: object) -> None:
    """Raises `InvalidInput` for a value that is not one of `Evolve`."""
    if evolve is not None and evolve != "add":
        raise InvalidInput(f"evolve is 'add', to add columns that the table lacks, or None, not {evolve!r}")


def with_added_column(schema: Schema, field: Field, default: Any) -> Schema:
    """Returns the schema with one more value column.

    Existing rows get `default`, a value of the field's type.
    """
    _check_new(schema, field.name)
    if default is None and not field.nullable:
        raise InvalidSchema(
            f"column {field.name!r} must not be null, and existing rows have no value for it: give a "
            "default, or make it nullable"
        )
    version, last_id = schema.version + 1, schema.shape.last_id + 1
    column = Column(last_id, (Stage(version, field.name, field.type),), default)
    return _next(schema, [*schema.fields, field], [*schema.shape.columns, column], last_id)


def with_renamed_column(schema: Schema, name: str, new_name: str) -> Schema:
    """Returns the schema with a column renamed; it may be a key."""
    number = _number(schema, name)
    _check_new(schema, new_name, but=name)
    return _changed(schema, number, replace(schema.fields[number], name=new_name))


def with_widened_column(schema: Schema, name: str, to: DataType) -> Schema:
    """Returns the schema with a column's type changed to one that holds all values of the old type."""
    number = _number(schema, name)
    field = schema.fields[number]
    if not isinstance(to, DataType):
        raise InvalidSchema(f"{to!r} is not a type; use dm.LONG, dm.DOUBLE or dm.DECIMAL(precision, scale)")
    if not _is_wider(field.type, to):
        raise InvalidSchema(
            f"column {name!r} is {field.type}, and {to} cannot hold all of its values or is not wider; INT "
            "can become LONG, FLOAT DOUBLE, and a DECIMAL one with more digits on either side of the point"
        )
    if number < len(schema.key_fields):
        raise InvalidSchema(
            f"{name!r} is a key, and keys cannot be widened: the partitions are divided by values of its type"
        )
    return _changed(schema, number, replace(field, type=to))


def without_column(schema: Schema, name: str) -> Schema:
    """Returns the schema without a value column.

    A column that is added later with the same name is a new column.
    """
    number = _number(schema, name)
    if number < len(schema.key_fields):
        raise InvalidSchema(f"{name!r} is a key, by which the rows are sorted: it cannot be dropped")
    fields, columns = list(schema.fields), list(schema.shape.columns)
    del fields[number], columns[number]
    return _next(schema, fields, columns)


def as_known_by(schema: Schema, newest: Schema) -> Schema:
    """Returns an older schema that also knows the names and types of its columns in all versions to `newest`.

    So files of these versions can be read with it. Raises `InvalidSchema` if a column was dropped since.
    """
    known = {column.column_id: column for column in newest.shape.columns}
    columns = []
    for field, column in zip(schema.fields, schema.shape.columns, strict=True):
        if column.column_id not in known:
            raise InvalidSchema(f"column {field.name!r} was dropped")
        columns.append(known[column.column_id])
    return _made(schema, schema.fields, replace(schema.shape, columns=tuple(columns), known=newest.version))


def properties_naming(properties: TableProperties, name: str) -> list[str]:
    """Returns the names of the properties whose values contain the name of this column."""
    return [key for key, text, pattern in _naming(properties) if name in _named(text, key, pattern)]


def property_changes(properties: TableProperties, called: Callable[[str], str | None]) -> dict[str, Any]:
    """Returns the properties that must change after columns were renamed or dropped, with new values.

    `called` returns the new name of a column, or None if it no longer exists.
    """
    found: dict[str, Any] = {}
    for key, text, pattern in _naming(properties):
        parts = [text] if key in {"filter", "newest_by"} else parts_of(text)
        there = [part for part in parts if all(called(name) for name in _named(part, key, pattern))]
        renamed = ",".join(_renamed(part, key, pattern, called) for part in there)
        if renamed != text:
            found[key] = renamed.strip() or None
    return found


def _renamed(part: str, key: str, pattern: re.Pattern[str], called: Callable[[str], str | None]) -> str:
    def new(match: re.Match[str]) -> str:
        name = str(called(_name(match[1], key)))
        return match[0].removesuffix(match[1]) + (name if key == "newest_by" else quoted_name(name))

    return pattern.sub(new, part)


def with_properties(properties: TableProperties, changes: dict[str, Any]) -> TableProperties:
    """Returns the properties with some of them changed; None resets one to its default."""
    given = {**properties.model_dump(exclude_defaults=True), **changes}
    return TableProperties(**{key: value for key, value in given.items() if value is not None})


def _naming(properties: TableProperties) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """Yields each property that names columns: its name, its text, and a pattern that finds the names."""
    for keys, pattern in (
        (_CALLS, rf"\(\s*({NAME})"),
        (_LISTS, rf"({NAME})"),
        (("newest_by",), r"(?s)^(.+)$"),
    ):
        for key in keys:
            text = getattr(properties, key, None)
            if text:
                yield key, text, re.compile(pattern)


def _named(text: str, key: str, pattern: re.Pattern[str]) -> list[str]:
    return [_name(found, key) for found in pattern.findall(text)]


def _name(text: str, key: str) -> str:
    """Returns the column's name, from its form in the text of property `key`.

    Only `newest_by` contains a name that is never in quotes.
    """
    return text if key == "newest_by" else name_of(text)


def _number(schema: Schema, name: object) -> int:
    if name not in schema:
        raise InvalidSchema(f"there is no column {name!r}; the columns are {', '.join(schema.names)}")
    return schema.names.index(str(name))


def _check_new(schema: Schema, name: object, but: str | None = None) -> None:
    for known in schema.names:
        if known != but and isinstance(name, str) and known.casefold() == name.casefold():
            raise InvalidSchema(f"there is a column {known!r} already (case does not count)")
    if name == but:
        raise InvalidSchema(f"column {name!r} already has that name")


def _is_wider(now: DataType, to: DataType) -> bool:
    if now.precision is None or now.scale is None or to.precision is None or to.scale is None:
        return _WIDER.get(now) == to
    whole = to.precision - to.scale >= now.precision - now.scale
    return now != to and whole and to.scale >= now.scale


def _changed(schema: Schema, number: int, field: Field) -> Schema:
    """Returns the next version of the schema, with one field changed."""
    fields, columns = list(schema.fields), list(schema.shape.columns)
    fields[number] = field
    stage = Stage(schema.version + 1, field.name, field.type)
    columns[number] = replace(columns[number], stages=(*columns[number].stages, stage))
    return _next(schema, fields, columns)


def _next(
    schema: Schema, fields: Sequence[Field], columns: Sequence[Column], last_id: int | None = None
) -> Schema:
    shape = replace(
        schema.shape,
        version=schema.version + 1,
        columns=tuple(columns),
        last_id=last_id or schema.shape.last_id,
    )
    return _made(schema, fields, shape)


def _made(schema: Schema, fields: Sequence[Field], shape: Any) -> Schema:
    first, second = len(schema.row_keys), len(schema.key_fields)
    return Schema(fields[:first], fields[first:second], fields[second:], shape=shape)
