"""Changes of a row table's columns: what they make of its columns and of its files' schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.errors import InvalidColumn, InvalidRow, InvalidSchema
from dormouse.model.reshaping import added, renamed
from dormouse.model.schema import Field, Schema
from dormouse.model.table import DROPPED
from dormouse.rows.changes import AddColumn, DropColumn, RenameColumn, RetypeColumn
from dormouse.rows.columns import Column, check_column_name, check_columns, check_new, column_named
from dormouse.rows.values import Label, fitting, of_text, row_label

_TEXTS = frozenset({"STRING", "ENTITY", "LINK", "FILE"})
_NUMBERS = frozenset({"INTEGER", "DATE", "DOUBLE", "BOOLEAN"})


@dataclass(frozen=True, slots=True)
class Retyped:
    """A column that is another: its values are checked, and, where it has an id of its own, written anew."""

    before: Column
    after: Column

    @property
    def rewrites(self) -> bool:
        return self.before.column_id != self.after.column_id


@dataclass(frozen=True, slots=True)
class Reshaped:
    """What one change of columns does: the columns after it, and in words."""

    columns: tuple[Column, ...]
    said: str


@dataclass
class ColumnPlan:
    """The columns of a table through the changes of one transaction.

    `schemas` are the versions of the schema that the changes make, with what is said of each; `added` are the
    columns that rows of before have the default of.
    """

    schema: Schema
    columns: tuple[Column, ...]
    schemas: list[tuple[Schema, str]] = field(default_factory=list)
    retyped: list[Retyped] = field(default_factory=list)
    added: list[Column] = field(default_factory=list)

    def planned(self, changes: Sequence[object]) -> list[Reshaped | None]:
        """What each change does to the columns; None: nothing. `InvalidColumn`."""
        return [self._reshaped(change) for change in changes]

    def _reshaped(self, change: object) -> Reshaped | None:
        match change:
            case AddColumn():
                said = self._add(change)
            case RenameColumn():
                said = self._rename(change)
            case DropColumn():
                said = self._drop(change)
            case RetypeColumn():
                said = self._retype(change)
            case _:
                return None
        self.columns = check_columns(self.columns)
        return Reshaped(self.columns, said)

    def _add(self, change: AddColumn) -> str:
        if not isinstance(change.column, Column):
            raise InvalidColumn(f"dm.AddColumn takes a dm.Column, not {change.column!r}")
        column = self._new(check_new(change.column))
        self.columns = (*self.columns, column)
        self.added.append(column)
        return f"added {column}"

    def _new(self, column: Column) -> Column:
        column = replace(column, column_id=self.schema.shape.last_id + 1)
        said = f"added {column}"
        if any(known.name.casefold() == column.name.casefold() for known in self.columns):
            raise InvalidColumn(f"there is a column {column.name!r} already (case does not count)")
        new = Field(column.name, column.stored, nullable=True)
        self._next(lambda schema: added(schema, new, column.stored_default), said)
        return column

    def _rename(self, change: RenameColumn) -> str:
        column = column_named(self.columns, change.name)
        check_column_name(change.new_name)
        if any(
            known.name.casefold() == change.new_name.casefold() for known in self.columns if known != column
        ):
            raise InvalidColumn(f"there is a column {change.new_name!r} already (case does not count)")
        said = f"renamed {change.name} to {change.new_name}"
        self._next(lambda schema: renamed(schema, change.name, change.new_name), said)
        self._put(column, replace(column, name=change.new_name))
        return said

    def _drop(self, change: DropColumn) -> str:
        column = column_named(self.columns, change.name)
        self._hide(column, f"dropped {column.name}")
        self.columns = tuple(known for known in self.columns if known != column)
        return f"dropped {column.name}"

    def _retype(self, change: RetypeColumn) -> str:
        before = column_named(self.columns, change.name)
        size = change.size_max
        if size is None and change.type == "STRING":
            size = before.size_max
        after = Column(
            before.name,
            change.type,  # type: ignore[arg-type] # checked there
            size,
            change.default,
            change.enum,
            before.column_id,
        )
        check_new(after)
        said = f"retyped {before} to {after}"
        if not _as_it_is(before, after):
            self._hide(before, f"dropped {before}")
            number = self.columns.index(before)
            self.columns = tuple(known for known in self.columns if known != before)
            # its rows are written anew: those of before have no value, and not the default
            plain = self._new(replace(after, default=None))
            after = replace(after, column_id=plain.column_id)
            self.columns = (*self.columns[:number], after, *self.columns[number:])
        else:
            self._put(before, after)
        self.retyped.append(Retyped(before, after))
        return said

    def _put(self, before: Column, after: Column) -> None:
        self.columns = tuple(after if known == before else known for known in self.columns)

    def _hide(self, column: Column, said: str) -> None:
        """Older versions of rows still have it."""
        self._next(lambda schema: renamed(schema, column.name, f"{DROPPED}{column.column_id}"), said)

    def _next(self, change: Callable[[Schema], Schema], said: str) -> None:
        try:
            self.schema = change(self.schema)
        except InvalidSchema as error:
            raise InvalidColumn(str(error)) from None
        self.schemas.append((self.schema, said))


def converted(retyped: Retyped, array: pa.Array, label: Label = row_label) -> pa.Array:
    """The values of a column as those of what it became; `InvalidRow` names the first that does not fit."""
    before, after = retyped.before, retyped.after
    if _as_it_is(before, after):
        return fitting(after, array, label)
    if before.type in _NUMBERS and after.type in _NUMBERS:
        return fitting(after, _number(before, after, array, label), label)
    if after.type == "JSON" and before.type in _NUMBERS:
        return fitting(after, _texts(before, array), label)
    texts = _texts(before, array)
    if (empty := pc.index(texts, "").as_py()) >= 0:  # which in CSV is null, and here would be lost
        said = f"{label(empty)}, column {after.name!r} ({after.type}): an empty text is none"
        raise InvalidRow(said, column=after.name)
    return of_text(after, texts, label)


def _as_it_is(before: Column, after: Column) -> bool:
    """Whether the files have the values of both types in the same way."""
    same = {before.type, after.type}
    return (
        len(same) == 1
        or same <= _TEXTS
        or same <= {"INTEGER", "DATE"}
        or (before.type, after.type) == ("JSON", "STRING")
    )


def _texts(before: Column, array: pa.Array) -> pa.Array:
    if pa.types.is_floating(array.type):
        special = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
        values = [None if v is None else special.get(repr(v), repr(v)) for v in array.to_pylist()]
        return pa.array(values, pa.string())
    return array.cast(pa.string())


def _number(before: Column, after: Column, array: pa.Array, label: Label) -> pa.Array:
    wanted = {"DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}.get(after.type, pa.int64())
    if after.type == "BOOLEAN":
        ok = pc.or_(pc.equal(array, 0), pc.equal(array, 1))
    else:
        loose = array.cast(wanted, safe=False)
        ok = pc.equal(loose.cast(array.type, safe=False), array)
        if pa.types.is_floating(array.type):
            ok = pc.and_(ok, pc.less(pc.abs(array), float(1 << 63)))
    if pc.all(ok, skip_nulls=True).as_py() is False:
        number = pc.index(ok, False).as_py()
        value = array[number].as_py()
        raise InvalidRow(
            f"{label(number)}, column {after.name!r} ({before.type}): {value!r} is no {after.type}",
            column=after.name,
        )
    return array.cast(wanted, safe=False)
