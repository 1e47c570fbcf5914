"""Schemas: what a table is sorted and partitioned by (row keys), sorted by (sort keys) and holds (values)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as option
from functools import cached_property
from typing import Any

from dormouse.errors import InvalidSchema
from dormouse.model.shape import Shape
from dormouse.model.types import KEY_TYPE_NAMES, Field

__all__ = ["FIELDS_MAX", "Field", "Schema"]

FIELDS_MAX = 1_000


@dataclass(frozen=True)
class Schema:
    """Row keys, sort keys and values, in this order in every file.

    A file is sorted by the row keys, then the sort keys. Schemas of equal fields are equal, whatever they
    were: that is their `shape`. Raises `InvalidSchema`.
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
        """Returns it as it is written in Python, without the parts that it has not."""
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
        """What files are sorted by: the row keys, then the sort keys."""
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
        """The field of this name; `KeyError` when there is none."""
        return self._by_name[name]

    def default(self, name: str) -> Any:
        """Returns the value of a column where rows that are added lack it; None: null, or there is none."""
        return self.shape.columns[self.names.index(name)].default

    def is_optional(self, name: str) -> bool:
        """Returns whether data may lack a column: it can be null, or has a default."""
        return self.field(name).nullable or self.default(name) is not None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def version(self) -> int:
        """Which of the table's schemas it is; the first is 1."""
        return self.shape.version

    @property
    def was_changed(self) -> bool:
        """Whether anything is known of its columns but what they are."""
        return self.version > 1 or self.shape.known is not None

    def knows(self, version: int) -> bool:
        """Whether it tells of columns as of a version that is the newest."""
        return version == (self.shape.known or self.version)

    def as_written(self, version: int) -> Schema:
        """Those of its columns that files of a version have, by what they were then. `SchemaMoved`."""
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

    def row_key_index(self, name: str) -> int:
        """The position of a row key; `KeyError` when it is not one."""
        if name not in self.row_key_names:
            raise KeyError(name)
        return self.row_key_names.index(name)

    def to_record(self) -> dict[str, Any]:
        """As the database keeps it, with its versions, if there are several."""
        shape = {} if self.version == 1 else {"shape": self.shape.to_json(self.fields)}
        return {**self.to_json(), **shape}

    @staticmethod
    def from_record(value: Any) -> Schema:
        """The schema of `to_record`."""
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
        """The schema of `to_json`'s object; `nullable`, `sort_keys` and `values` may be left out."""
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
        # Spark and many readers of Parquet do not tell names apart by case alone
        folded = field.name.casefold()
        other = seen.get(folded)
        if other is not None:
            raise InvalidSchema(f"field names {other!r} and {field.name!r} must differ (case does not count)")
        seen[folded] = field.name
