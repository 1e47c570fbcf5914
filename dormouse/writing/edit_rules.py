"""The rules of edits, for every engine: what users may set, by which clauses, and which row is the newest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type, conform
from dormouse.errors import InvalidData, InvalidInput, InvalidQuery
from dormouse.model.edits import (
    SOURCE,
    TARGET,
    Columns,
    Condition,
    Sql,
    When,
    WhenMatched,
    WhenNotMatched,
    WhenNotMatchedBySource,
)
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed
from dormouse.model.types import Field
from dormouse.reading.where import unknown, value_of
from dormouse.sources.source import unkeyed
from dormouse.state.context import TableContext

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
Kind = Literal["matched", "not_matched", "by_source"]
Action = Literal["update", "insert", "delete", "nothing"]
SEEN: Mapping[Kind, tuple[str, ...]] = {
    "matched": (TARGET, SOURCE),
    "not_matched": (SOURCE,),
    "by_source": (TARGET,),
}
"""The rows that the clauses of a kind have."""
MUST_MATCH = "'on' must match it"
"""The advice of a merge that inserts a key which the table has. An INSERT has another."""

# Columns and constants.


def check_editable(context: TableContext, what: str) -> None:
    """Raises `InvalidInput` for a table whose filter hides rows, which an edit could not find."""
    if context.properties.filter is not None:
        raise InvalidInput(
            f"{what}: the table's filter hides rows, which an edit would not change; clear the property "
            "'filter' first, or delete and ingest rows"
        )


def without_filter(context: TableContext) -> TableContext:
    """Returns services that also read the rows that the table's filter hides."""
    unfiltered = context.table.properties.model_copy(update={"filter": None})
    return replace(context, table=replace(context.table, properties=unfiltered))


def checked_columns(what: str, schema: Schema, names: Iterable[object]) -> list[Field]:
    """Returns the fields of some columns. Raises `InvalidQuery` for an unknown one."""
    for name in names:
        if not isinstance(name, str) or name not in schema:
            raise InvalidQuery(f"{what}: {unknown('column', name, schema.names)}")
    return [schema.field(str(name)) for name in names]


def check_not_key(what: str, context: TableContext, name: str) -> None:
    """Raises `InvalidQuery` if an edit would change a row key of a keyed table."""
    if is_keyed(context.properties) and name in context.schema.row_key_names:
        raise InvalidQuery(
            f"{what}: the table keeps one row for each key, and {name!r} is a row key, which no update "
            "changes; delete the row and insert another"
        )


def checked_constant(what: str, column: Field, value: Any) -> Any:
    """Returns a constant as a value of a column's type. Raises `InvalidQuery` if it does not fit."""
    try:
        if value is not None and not column.type.is_nested:
            return value_of(column, value)
        values = pa.array([value], arrow_type(column.type))
        return conform(pa.table([values], names=[column.name]), unkeyed([column])).column(0)[0].as_py()
    except InvalidData:
        said = f"column {column.name!r} must not be null"
    except InvalidQuery as error:
        said = str(error)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        said = f"{column.name!r} is {column.type}, and {value!r} does not fit"
    raise InvalidQuery(f"{what}: {said}")


# Which rows an edit changes.


def identity(context: TableContext, columns: Iterable[str]) -> tuple[str, ...]:
    """Returns the columns by which an edit deletes rows that it chose by `columns`.

    Rows with equal values in them are treated alike. If the table merges rows of equal keys, only keys
    identify a row.
    """
    schema = context.schema
    if context.properties.aggregate is not None:
        return schema.key_names
    wanted = {*schema.key_names, *columns}
    return tuple(name for name in schema.names if name in wanted)


def check_newest(
    what: str, schema: Schema, properties: TableProperties, rows: pa.RecordBatch, before: pa.Array
) -> None:
    """Raises `InvalidQuery` if a new row of a keyed table would lose against the row that it replaces.

    Raises `InvalidData` if its value is NaN. `before` has the value of `newest_by` in each replaced row, or
    null for a row that replaces none.
    """
    name = properties.newest_by or ""
    of = f"{what}: {name!r} determines which row is the newest"
    if schema.field(name).type.is_floating:
        at = pc.index(pc.is_nan(rows.column(name)), True).as_py()
        if at >= 0:
            raise InvalidData(f"{of}, and is NaN in the row with {key_text(schema, rows, at)}", column=name)
    at = pc.index(pc.less(rows.column(name), before), True).as_py()
    if at >= 0:
        old, new = before[at].as_py(), rows.column(name)[at].as_py()
        raise InvalidQuery(
            f"{of}, and {new!r} of the row with {key_text(schema, rows, at)} is less than its {old!r}, so "
            "the old row would stay"
        )


def already_there(what: str, schema: Schema, rows: pa.RecordBatch | pa.Table) -> InvalidInput:
    """Returns the error for inserted rows whose keys a keyed table has; it names the first of them."""
    said = f"the source inserts the row with {key_text(schema, rows, 0)}, which is there already"
    return InvalidInput(f"{what}: {said}: {MUST_MATCH}")


def key_text(schema: Schema, rows: pa.RecordBatch | pa.Table, number: int) -> str:
    """Returns the row keys of a row, for an error."""
    return ", ".join(f"{name} {rows.column(name)[number].as_py()!r}" for name in schema.row_key_names)


# The clauses of a merge.


@dataclass(frozen=True, slots=True)
class Clause(Generic[V]):
    """A checked clause, which sets columns to `values`; its condition is a text for the engine."""

    kind: Kind
    action: Action
    condition: str = "true"
    values: Mapping[str, V] = field(default_factory=dict)


class Engine(Protocol[V_co]):
    """The checks of an engine for expressions over the rows `TARGET` and `SOURCE` that a kind of clause has.

    They raise `InvalidQuery` or `InvalidData`, which begin with `what`.
    """

    def condition(self, what: str, given: Sql, kind: Kind) -> str:
        """Returns the text of a condition."""
        ...

    def expression(self, what: str, column: Field, given: Sql, kind: Kind) -> V_co:
        """Returns the value of an expression for a column."""
        ...

    def constant(self, column: Field, value: Any) -> V_co:
        """Returns a value that fits the column."""
        ...

    def of_source(self, what: str, column: Field) -> V_co:
        """Returns the value of the source's column of the same name."""
        ...

    def left_out(self, what: str, column: Field) -> V_co:
        """Returns the value of a column that an insert does not set."""
        ...


def read_on(
    what: str, schema: Schema, source: Collection[str], on: object, quoted: Callable[[str], str]
) -> Sql:
    """Returns the condition that joins the rows of a merge, which may be given as columns.

    `quoted` quotes a name for the engine. Raises `InvalidInput` and `InvalidQuery`.
    """
    what = f"{what}: on"
    if isinstance(on, str) and on in schema:
        on = [on]
    if isinstance(on, str | Sql):
        return _sql(what, on)
    if not isinstance(on, Sequence):
        raise InvalidInput(f"{what}: give a list of columns or a condition in SQL, not {on!r}")
    if not on:
        raise InvalidInput(f"{what} is empty; name the columns that match")
    names = [quoted(one.name) for one in _in_source(what, checked_columns(what, schema, on), source)]
    return Sql(" AND ".join(f"{TARGET}.{name} = {SOURCE}.{name}" for name in names))


@dataclass(frozen=True)
class ClauseReader(Generic[V]):
    """The reader of a merge's clauses. `equal` are row keys that are equal in all matching rows."""

    engine: Engine[V]
    what: str
    context: TableContext
    source: Collection[str]
    equal: Collection[str]

    def read(self, when: object) -> list[Clause[V]]:
        """Returns the clauses of a list. Raises `InvalidInput`, and the errors of the engine."""
        clauses: list[object] = [when] if isinstance(when, When) else []
        if isinstance(when, Sequence) and not isinstance(when, str):
            clauses = list(when)
        kinds = "dm.WhenMatched, dm.WhenNotMatched or dm.WhenNotMatchedBySource"
        if not clauses:
            raise InvalidInput(f"{self.what}: give clauses: {kinds}")
        found = []
        for number, clause in enumerate(clauses, 1):
            what = f"{self.what}: clause {number}"
            if not isinstance(clause, When):
                raise InvalidInput(f"{what}: {clause!r} is no clause; use {kinds}")
            found.append(self._clause(what, clause))
        if all(one.action == "nothing" for one in found):
            raise InvalidInput(f"{self.what}: no clause updates, deletes or inserts")
        return found

    def inserted(self, what: str, values: Mapping[str, V]) -> dict[str, V]:
        """Returns the values of all columns of an inserted row."""
        return {
            one.name: values[one.name] if one.name in values else self.engine.left_out(what, one)
            for one in self.context.schema.fields
        }

    def _clause(self, what: str, clause: When) -> Clause[V]:
        match clause:
            case WhenNotMatched(condition, insert):
                where = self._where(what, condition, "not_matched")
                if insert is None:
                    return Clause("not_matched", "nothing", where)
                values = self._values(what, insert, "not_matched")
                return Clause("not_matched", "insert", where, self.inserted(what, values))
            case WhenMatched(condition, update, delete):
                return self._changing(what, "matched", condition, update, delete)
            case WhenNotMatchedBySource(condition, update, delete):
                return self._changing(what, "by_source", condition, update, delete)

    def _changing(
        self, what: str, kind: Kind, condition: Condition, update: Columns, delete: bool
    ) -> Clause[V]:
        where = self._where(what, condition, kind)
        if update is None:
            return Clause(kind, "delete" if delete else "nothing", where)
        if delete:
            raise InvalidInput(f"{what}: a clause updates or deletes, not both")
        values = self._values(what, update, kind)
        if update == "*":  # a key that is equal in both stays
            values = {name: value for name, value in values.items() if name not in self.equal}
        for name in values:
            check_not_key(what, self.context, name)
        return Clause(kind, "update", where, values)

    def _where(self, what: str, condition: Condition, kind: Kind) -> str:
        if condition is None:
            return "true"
        what = f"{what}: condition"
        return self.engine.condition(what, _sql(what, condition), kind)

    def _values(self, what: str, columns: Columns, kind: Kind) -> dict[str, V]:
        schema = self.context.schema
        if isinstance(columns, Mapping):
            found = {
                one.name: self._value(what, one, columns[one.name], kind)
                for one in checked_columns(what, schema, columns)
            }
        else:
            if columns == "*":
                listed = [one for one in schema.fields if one.name in self.source]
            elif isinstance(columns, Sequence) and not isinstance(columns, str):
                listed = checked_columns(what, schema, columns)
            else:
                raise InvalidInput(f'{what}: {columns!r} is neither "*", nor columns, nor values by column')
            if kind == "by_source":
                raise InvalidInput(f"{what}: without a source, give new values as a dict by column")
            found = {
                one.name: self.engine.of_source(what, one) for one in _in_source(what, listed, self.source)
            }
        if not found:
            raise InvalidQuery(f"{what}: it sets no column; name some")
        return found

    def _value(self, what: str, column: Field, value: object, kind: Kind) -> V:
        if isinstance(value, Sql):
            return self.engine.expression(f"{what}: {column.name!r}", column, value, kind)
        return self.engine.constant(column, checked_constant(what, column, value))


def _in_source(what: str, columns: Sequence[Field], source: Collection[str]) -> Sequence[Field]:
    for one in columns:
        if one.name not in source:
            raise unknown("column", one.name, source, f"{what}: the source has no")
    return columns


def _sql(what: str, given: object) -> Sql:
    if isinstance(given, Sql):
        return given
    if not isinstance(given, str) or not given.strip():
        raise InvalidInput(f"{what}: give a condition in SQL, not {given!r}")
    return Sql(given)
