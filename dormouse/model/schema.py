"""Schemas: a table's row keys (which sort and partition it), sort keys (which only sort it) and values.

Each schema has a shape: the names and types of its columns in every version. A file is read with the names
and types of the version with which it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as option
from functools import cached_property
from json import dumps, loads
from typing import Any

from dormouse.errors import DormouseError, InvalidSchema
from dormouse.model.json_values import json_value, value_of_json
from dormouse.model.types import KEY_TYPE_NAMES, DataType, Field

__all__ = [
    "FIELDS_MAX", "Column", "Field", "Schema", "SchemaMoved", "Shape", "Stage", "earlier_name",
    "is_as_stored", "pairs",
]  # fmt: skip

FIELDS_MAX = 1_000


class SchemaMoved(DormouseError):
    """The table's columns or properties have changed since the work began.

    The code that catches this error begins the work again with the newer schema. Users never see the error.
    """


@dataclass(frozen=True, slots=True)
class Stage:
    """The name and the type of a column, from version `since` on."""

    since: int
    name: str
    type: DataType


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its id, with its names and types in all versions.

    No other column of the table ever has the same id. `stages` ascend by version. `default` is the column's
    value for rows of files that were written before the column was added.
    """

    column_id: int
    stages: tuple[Stage, ...]
    default: Any = None

    def at(self, version: int) -> Stage | None:
        """Returns the column's name and type in a version; None before it was added."""
        return next((stage for stage in reversed(self.stages) if stage.since <= version), None)

    def to_json(self, field: Field) -> dict[str, Any]:
        """Returns the column as JSON.

        The default is a string that contains JSON, because `jsonb` can hold neither NUL nor -0.0.
        """
        stages = [{"since": one.since, "name": one.name, "type": one.type.to_json()} for one in self.stages]
        default = None if self.default is None else dumps(json_value(self.default))
        return {"id": self.column_id, "stages": stages, "default": default}

    @staticmethod
    def from_json(value: Any, field: Field) -> Column:
        stages = [
            Stage(one["since"], one["name"], DataType.from_json(one["type"])) for one in value["stages"]
        ]
        default = None if value["default"] is None else value_of_json(field, loads(value["default"]))
        return Column(value["id"], tuple(stages), default)


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of one version of a table's schema, in the order of the fields.

    `last_id` is the highest column id that the table has used. `known` is the last version whose names and
    types the columns have; None means this version.
    """

    version: int
    columns: tuple[Column, ...]
    last_id: int
    known: int | None = None

    def check_known(self, version: int) -> None:
        """Raises `SchemaMoved` for a version that is newer than the last known one."""
        if version > (self.known or self.version):
            raise SchemaMoved(f"version {version} of the table's schema is newer than {self.version}")

    @staticmethod
    def first(fields: Iterable[Field]) -> Shape:
        """Returns the shape of a new table."""
        stages = [Stage(1, field.name, field.type) for field in fields]
        columns = tuple(Column(number, (stage,)) for number, stage in enumerate(stages, 1))
        return Shape(1, columns, len(columns))

    def to_json(self, fields: Sequence[Field]) -> dict[str, Any]:
        columns = [one.to_json(field) for one, field in zip(self.columns, fields, strict=True)]
        return {"version": self.version, "last_id": self.last_id, "columns": columns}

    @staticmethod
    def from_json(value: Any, fields: Sequence[Field]) -> Shape:
        """Converts the result of `to_json` back to a shape. Raises `InvalidSchema` if that fails."""
        try:
            columns = zip(value["columns"], fields, strict=True)
            listed = tuple(Column.from_json(one, field) for one, field in columns)
            return Shape(value["version"], listed, value["last_id"])
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidSchema(f"the versions of a schema cannot be read: {error!r}") from None


@dataclass(frozen=True)
class Schema:
    """Row keys, sort keys and values, in this order in every file. An invalid schema raises `InvalidSchema`.

    A file is sorted by the row keys, then the sort keys. Schemas with equal fields are equal, even if their
    earlier versions (`shape`) differ.
    """

    row_keys: tuple[Field, ...]
    sort_keys: tuple[Field, ...]
    values: tuple[Field, ...]
    shape: Shape = option(compare=False, repr=False)

    def __init__(
        self,
        row_keys: Iterable[Field],
        sort_keys: Iterable[Field] = (),
        values: Iterable[Field] = (),
        *,
        shape: Shape | None = None,
    ) -> None:
        for name, given in (("row_keys", row_keys), ("sort_keys", sort_keys), ("values", values)):
            object.__setattr__(self, name, _fields(name, given))
        self._check()
        object.__setattr__(self, "shape", shape or Shape.first(self.fields))

    def __repr__(self) -> str:
        """Returns the Python expression of the schema, without empty parts."""
        parts = {"row_keys": self.row_keys, "sort_keys": self.sort_keys, "values": self.values}
        given = ", ".join(f"{name}={list(fields)!r}" for name, fields in parts.items() if fields)
        return f"Schema({given})"

    def _check(self) -> None:
        if not self.row_keys:
            raise InvalidSchema(
                "a schema needs at least one row key, e.g. row_keys=[dm.Field('id', dm.LONG)]"
            )
        if len(self.fields) > FIELDS_MAX:
            raise InvalidSchema(f"a schema has at most {FIELDS_MAX} fields, not {len(self.fields)}")
        for field in self.key_fields:
            if not field.type.is_key_type:
                raise InvalidSchema(f"key {field.name!r} is {field.type}; keys are {KEY_TYPE_NAMES}")
            if field.nullable:
                raise InvalidSchema(f"key {field.name!r} must not be nullable")
        _check_names_differ(self.fields)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        return self.row_keys + self.sort_keys + self.values

    @cached_property
    def key_fields(self) -> tuple[Field, ...]:
        """The fields that sort a file: the row keys, then the sort keys."""
        return self.row_keys + self.sort_keys

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @cached_property
    def key_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.key_fields)

    @cached_property
    def row_key_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.row_keys)

    @cached_property
    def _by_name(self) -> Mapping[str, Field]:
        return {field.name: field for field in self.fields}

    def field(self, name: str) -> Field:
        """Returns the field of this name. Raises `KeyError` if there is none."""
        return self._by_name[name]

    def default(self, name: str) -> Any:
        """Returns a column's value for added rows that lack the column. None means null or no default."""
        return self.shape.columns[self.names.index(name)].default

    def is_optional(self, name: str) -> bool:
        """Returns whether data may lack a column: it is nullable, or has a default."""
        return self.field(name).nullable or self.default(name) is not None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def version(self) -> int:
        """The version of the table's schema; the first is 1."""
        return self.shape.version

    @property
    def was_changed(self) -> bool:
        """True if the version is not the first, or a later version is known."""
        return self.version > 1 or self.shape.known is not None

    def knows(self, version: int) -> bool:
        """Returns whether `version`, the table's newest version, is the last one that this schema knows."""
        return version == (self.shape.known or self.version)

    def as_written(self, version: int) -> Schema:
        """Returns the schema of an earlier or later known version, with the names and types of that version.

        Columns that this schema lacks are missing. Raises `SchemaMoved` if the version is not yet known.
        """
        if version == self.version:
            return self
        self.shape.check_known(version)
        parts: list[list[Field]] = [[], [], []]
        ends, columns = (len(self.row_keys), len(self.key_fields)), []
        for number, (now, column) in enumerate(zip(self.fields, self.shape.columns, strict=True)):
            stage = column.at(version)
            if stage is not None:
                part = sum(number >= end for end in ends)
                is_same = (stage.name, stage.type) == (now.name, now.type)
                parts[part].append(now if is_same else Field(stage.name, stage.type, now.nullable))
                columns.append(column)
        return Schema(*parts, shape=Shape(version, tuple(columns), self.shape.last_id))

    def to_record(self) -> dict[str, Any]:
        """Returns the schema as the database stores it, with its versions if there are several."""
        shape = {} if self.version == 1 else {"shape": self.shape.to_json(self.fields)}
        return {**self.to_json(), **shape}

    @staticmethod
    def from_record(value: Any) -> Schema:
        """Converts the result of `to_record` back to a schema."""
        plain = Schema.from_json({part: fields for part, fields in value.items() if part != "shape"})
        if "shape" not in value:
            return plain
        shape = Shape.from_json(value["shape"], plain.fields)
        return Schema(plain.row_keys, plain.sort_keys, plain.values, shape=shape)

    def to_json(self) -> dict[str, Any]:
        parts = {"row_keys": self.row_keys, "sort_keys": self.sort_keys, "values": self.values}
        return {name: [field.to_json() for field in fields] for name, fields in parts.items()}

    @staticmethod
    def from_json(value: Any) -> Schema:
        """Converts the result of `to_json` to a schema; `nullable`, `sort_keys`, `values` may be missing."""
        if not isinstance(value, dict):
            raise InvalidSchema(f"a schema is an object with row_keys, sort_keys and values, not {value!r}")
        unknown = set(value) - {"row_keys", "sort_keys", "values"}
        if unknown:
            raise InvalidSchema(f"unknown schema part {min(unknown)!r}; use row_keys, sort_keys and values")
        return Schema(
            *(_fields_from_json(value.get(part, [])) for part in ("row_keys", "sort_keys", "values"))
        )


def _fields(what: str, given: Iterable[Field]) -> tuple[Field, ...]:
    if not isinstance(given, Iterable | Field):
        raise InvalidSchema(f"{what} must be a list of dm.Field, not {given!r}")
    fields = (given,) if isinstance(given, Field) else tuple(given)
    for field in fields:
        if not isinstance(field, Field):
            raise InvalidSchema(f"{what} must be a list of dm.Field, not {field!r}")
    return fields


def _fields_from_json(items: Any) -> list[Field]:
    if not isinstance(items, list):
        raise InvalidSchema(f"a list of fields was expected, not {items!r}")
    return [Field.from_json(item) for item in items]


def _check_names_differ(fields: Iterable[Field]) -> None:
    seen: dict[str, str] = {}
    for field in fields:
        # Spark and many readers of Parquet ignore case in names
        folded = field.name.casefold()
        other = seen.get(folded)
        if other is not None:
            raise InvalidSchema(f"field names {other!r} and {field.name!r} must differ (case does not count)")
        seen[folded] = field.name


def pairs(stored: Schema, schema: Schema) -> Iterator[tuple[Field, Column, Field | None]]:
    """Yields, for each column of `schema`, its field, the column, and its field in `stored`.

    Both schemas are of the same table. The last is None if `stored` lacks the column.
    """
    ids = (column.column_id for column in stored.shape.columns)
    known = dict(zip(ids, stored.fields, strict=True))
    for field, one in zip(schema.fields, schema.shape.columns, strict=True):
        yield field, one, known.get(one.column_id)


def is_as_stored(stored: Schema, schema: Schema) -> bool:
    """Returns whether each column is stored under its present name, with its present type."""
    return stored is schema or all(
        before is not None and (before.name, before.type) == (field.name, field.type)
        for field, _, before in pairs(stored, schema)
    )


def earlier_name(schema: Schema, then: Schema, name: str) -> str | None:
    """Returns the name of a column in another version of the schema; None if it does not exist there."""
    column_id = schema.shape.columns[schema.names.index(name)].column_id
    pairs = zip(then.names, then.shape.columns, strict=True)
    return next((other for other, column in pairs if column.column_id == column_id), None)
