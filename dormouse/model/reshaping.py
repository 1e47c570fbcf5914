"""Changes of a table's columns: each gives the next version of its schema, and what properties follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from dormouse.errors import InvalidInput, InvalidSchema
from dormouse.model.schema import Column, Schema, Stage
from dormouse.model.table import TableProperties
from dormouse.model.text import NAME, name_of, parts_of, written
from dormouse.model.types import DOUBLE, FLOAT, INT, LONG, DataType, Field

_WIDER = {INT: LONG, FLOAT: DOUBLE}
_CALLS = ("aggregate", "filter")
"""Properties that name columns in calls, like `sum(count)`."""
_LISTS = ("bloom_filter_columns",)
"""Properties that name columns, one or more."""


Evolve = Literal["add"]
"""What a load does with columns that its table lacks."""


def check_evolve(evolve: object) -> None:
    """Raises `InvalidInput` for what no load does."""
    if evolve is not None and evolve != "add":
        raise InvalidInput(f"evolve is 'add', to add columns that the table lacks, or None, not {evolve!r}")


def added(schema: Schema, field: Field, default: Any) -> Schema:
    """With one more value, which rows of before have the `default` of; it is of the field's type."""
    _check_new(schema, field.name)
    if default is None and not field.nullable:
        raise InvalidSchema(
            f"column {field.name!r} must not be null, and rows that are there have no value of it: give a "
            "default, or make it nullable"
        )
    version, last_id = schema.version + 1, schema.shape.last_id + 1
    column = Column(last_id, (Stage(version, field.name, field.type),), default)
    return _next(schema, [*schema.fields, field], [*schema.shape.columns, column], last_id)


def renamed(schema: Schema, name: str, new_name: str) -> Schema:
    """With another name for a column, which may be a key."""
    number = _number(schema, name)
    _check_new(schema, new_name, but=name)
    return _changed(schema, number, replace(schema.fields[number], name=new_name))


def widened(schema: Schema, name: str, to: DataType) -> Schema:
    """With a type of a column that has all values of its type, and more."""
    number = _number(schema, name)
    field = schema.fields[number]
    if not isinstance(to, DataType):
        raise InvalidSchema(f"{to!r} is not a type; use dm.LONG, dm.DOUBLE or dm.DECIMAL(precision, scale)")
    if not _is_wider(field.type, to):
        raise InvalidSchema(
            f"column {name!r} is {field.type}, and {to} has not all of its values, or is no wider; INT "
            "becomes LONG, FLOAT becomes DOUBLE, a DECIMAL one of more digits on either side of the point"
        )
    if number < len(schema.key_fields):
        raise InvalidSchema(
            f"{name!r} is a key, and keys are not widened: the partitions are divided by values of its type"
        )
    return _changed(schema, number, replace(field, type=to))


def dropped(schema: Schema, name: str) -> Schema:
    """Without a value; one of its name that is added later is another column."""
    number = _number(schema, name)
    if number < len(schema.key_fields):
        raise InvalidSchema(f"{name!r} is a key, which the rows are sorted by: it cannot be dropped")
    fields, columns = list(schema.fields), list(schema.shape.columns)
    del fields[number], columns[number]
    return _next(schema, fields, columns)


def seen_with(schema: Schema, newest: Schema) -> Schema:
    """The same columns, with what a later version knows of them: files that were written since can be read.

    `InvalidSchema` names a column that was dropped since.
    """
    known = {column.column_id: column for column in newest.shape.columns}
    columns = []
    for field, column in zip(schema.fields, schema.shape.columns, strict=True):
        if column.column_id not in known:
            raise InvalidSchema(f"column {field.name!r} was dropped")
        columns.append(known[column.column_id])
    return _made(schema, schema.fields, replace(schema.shape, columns=tuple(columns), known=newest.version))


def properties_naming(properties: TableProperties, name: str) -> list[str]:
    """Those that name a column."""
    return [key for key, text, pattern in _naming(properties) if name in _named(text, key, pattern)]


def following(properties: TableProperties, called: Callable[[str], str | None]) -> dict[str, Any]:
    """What changes of properties where columns are called differently, or are not there."""
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
        return match[0].removesuffix(match[1]) + (name if key == "newest_by" else written(name))

    return pattern.sub(new, part)


def with_properties(properties: TableProperties, changes: dict[str, Any]) -> TableProperties:
    """Properties, some of them others; None gives one its default."""
    given = {**properties.model_dump(exclude_defaults=True), **changes}
    return TableProperties(**{key: value for key, value in given.items() if value is not None})


def _naming(properties: TableProperties) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """Properties with columns' names in them, and what finds the names."""
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


def _name(found: str, key: str) -> str:
    """A single name stands as it is."""
    return found if key == "newest_by" else name_of(found)


def _number(schema: Schema, name: object) -> int:
    if name not in schema:
        raise InvalidSchema(f"there is no column {name!r}; the columns are {', '.join(schema.names)}")
    return schema.names.index(str(name))


def _check_new(schema: Schema, name: object, but: str | None = None) -> None:
    for known in schema.names:
        if known != but and isinstance(name, str) and known.casefold() == name.casefold():
            raise InvalidSchema(f"there is a column {known!r} already (case does not count)")
    if name == but:
        raise InvalidSchema(f"column {name!r} is called so already")


def _is_wider(now: DataType, to: DataType) -> bool:
    if now.precision is None or now.scale is None or to.precision is None or to.scale is None:
        return _WIDER.get(now) == to
    whole = to.precision - to.scale >= now.precision - now.scale
    return now != to and whole and to.scale >= now.scale


def _changed(schema: Schema, number: int, field: Field) -> Schema:
    """With one field that is another."""
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
