"""What columns were in each version of a schema: a file is read by the one that it was written with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps, loads
from typing import Any

from dormouse.errors import InvalidSchema
from dormouse.errors.moved import SchemaMoved
from dormouse.model.types import DataType, Field
from dormouse.model.values import json_value, value_of_json


@dataclass(frozen=True, slots=True)
class Stage:
    """What a column is called, and its type, from a version on."""

    since: int
    name: str
    type: DataType


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its id, which no other column of the table ever has; `stages` are in their order.

    Files of versions before it have the `default` of it.
    """

    column_id: int
    stages: tuple[Stage, ...]
    default: Any = None

    def at(self, version: int) -> Stage | None:
        """What it is in a version; None before it was added."""
        return next((stage for stage in reversed(self.stages) if stage.since <= version), None)

    def to_json(self, field: Field) -> dict[str, Any]:
        """`field` is what it is now. The default is JSON as text, since `jsonb` has neither NUL nor -0.0."""
        stages = [{"since": one.since, "name": one.name, "type": one.type.to_json()} for one in self.stages]
        default = None if self.default is None else dumps(json_value(self.default))
        return {"id": self.column_id, "stages": stages, "default": default}

    @staticmethod
    def from_json(found: Any, field: Field) -> Column:
        stages = [
            Stage(one["since"], one["name"], DataType.from_json(one["type"])) for one in found["stages"]
        ]
        default = None if found["default"] is None else value_of_json(field, loads(found["default"]))
        return Column(found["id"], tuple(stages), default)


@dataclass(frozen=True, slots=True)
class Shape:
    """A version of a table's schema: its columns, in the order of the fields, and the last id that was given.

    `known` is the last version of which the columns' stages tell; None: this one.
    """

    version: int
    columns: tuple[Column, ...]
    last_id: int
    known: int | None = None

    def check_known(self, version: int) -> None:
        """`SchemaMoved` for what was written by a version that is not known here."""
        if version > (self.known or self.version):
            raise SchemaMoved(f"version {version} of the table's schema is newer than {self.version}")

    @staticmethod
    def first(fields: Iterable[Field]) -> Shape:
        """That of a table when it is made."""
        stages = [Stage(1, field.name, field.type) for field in fields]
        columns = tuple(Column(number, (stage,)) for number, stage in enumerate(stages, 1))
        return Shape(1, columns, len(columns))

    def to_json(self, fields: Sequence[Field]) -> dict[str, Any]:
        columns = [one.to_json(field) for one, field in zip(self.columns, fields, strict=True)]
        return {"version": self.version, "last_id": self.last_id, "columns": columns}

    @staticmethod
    def from_json(found: Any, fields: Sequence[Field]) -> Shape:
        """The shape of `to_json`."""
        try:
            columns = zip(found["columns"], fields, strict=True)
            listed = tuple(Column.from_json(one, field) for one, field in columns)
            return Shape(found["version"], listed, found["last_id"])
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidSchema(f"the versions of a schema cannot be read: {error!r}") from None
