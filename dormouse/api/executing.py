"""Statements that write, bound to the calls of tables that do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dormouse.api.table import Table
from dormouse.api.tables import Tables
from dormouse.data.transform import quoted
from dormouse.errors import InvalidInput, InvalidQuery
from dormouse.model.edits import (
    SOURCE,
    TARGET,
    ExecuteReport,
    Sql,
    When,
    WhenMatched,
    WhenNotMatched,
    WhenNotMatchedBySource,
)
from dormouse.model.schema import Field, Schema
from dormouse.model.table import is_keyed
from dormouse.model.types import checked_parameters
from dormouse.reading.sql.clauses import Expression
from dormouse.reading.sql.conditions import literal_of, text, type_name
from dormouse.reading.sql.named import table_named
from dormouse.reading.sql.plain_where import plain_where
from dormouse.reading.sql.writes import (
    Assignment,
    Clause,
    Conflict,
    Delete,
    Insert,
    Merge,
    Query,
    Target,
    Update,
    Written,
)
from dormouse.reading.streams import Interruption
from dormouse.reading.where import ALL, unknown
from dormouse.writing.edit_rules import MUST_MATCH
from dormouse.writing.edits import check_may_edit, counted, edited_alone
from dormouse.writing.plain_changes import Replace

if TYPE_CHECKING:
    from dormouse.model.types import Parameters
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.where import DeleteWhere

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Calls(Protocol[R_co]):
    """The calls that statements become, with results of their own.

    `load` and `merge` get queries. `load` upserts or ingests the rows, and `kind` names the statement.
    """

    def update(self, where: DeleteWhere | Sql, values: Mapping[str, Any]) -> R_co: ...

    def delete(self, where: DeleteWhere | Sql) -> R_co: ...

    def load(self, rows: str, *, upserts: bool) -> R_co: ...

    def merge(self, kind: str, source: Sql, on: list[str] | Sql, whens: Sequence[When]) -> R_co: ...


def execute(
    find: Callable[[str], Table],
    tables: Tables,
    statement: str,
    parameters: Parameters | None,
    how: How,
    sessions: Sessions | None = None,
    interruption: Interruption | None = None,
) -> ExecuteReport:
    """Runs one statement that writes; see `Instance.execute`."""
    if sessions is not None or interruption is not None:
        opened, end = sessions or tables.sessions(), interruption or Interruption()
        tables = tables.running_in(lambda _: opened(end))
    found, table = written(find, tables, statement, parameters)
    table = Table(table.context, tables)
    return Bound(tables, table, _OfTable(tables, table, how)).run(found)


def written(
    find: Callable[[str], Table], tables: Tables, statement: str, parameters: Parameters | None
) -> tuple[Written, Table]:
    """Returns a parsed statement and its table."""
    with closing(tables.sessions()(Interruption())) as session:
        found = session.written(statement, checked_parameters(parameters))
    table = find(table_named(found.target.table, tables.named()))
    check_may_edit(table.context)
    return found, table


@dataclass(frozen=True, slots=True)
class How:
    """The options of `Instance.execute`."""

    edit_id: str | None
    dry_run: bool
    attempts_max: int


@dataclass(frozen=True, slots=True)
class _OfTable:
    """The calls of a table, which report what they did."""

    tables: Tables
    table: Table
    how: How

    @property
    def _edit(self) -> dict[str, Any]:
        how = self.how
        return {"edit_id": how.edit_id, "dry_run": how.dry_run, "attempts_max": how.attempts_max}

    def update(self, where: DeleteWhere | Sql, values: Mapping[str, Any]) -> ExecuteReport:
        report = self.table.update(where, values, **self._edit)
        return self._report("update", report, updated=report.rows)

    def delete(self, where: DeleteWhere | Sql) -> ExecuteReport:
        context, how = self.table.context, self.how
        change = Replace(self.tables.sessions(), where)
        if how.dry_run:
            done = counted(context, change)
        else:
            with self.tables.changing():
                done = edited_alone(context, change, how.edit_id, how.attempts_max)
        # a recorded condition counts no rows
        rows = done.counts.get("deleted") if done.applied or how.dry_run else 0
        return self._report("delete", done, deleted=rows)

    def load(self, rows: str, *, upserts: bool) -> ExecuteReport:
        name, reader = self.table.known_name, self.tables.sql(rows)
        if self.how.dry_run:
            count = sum(batch.num_rows for batch in reader)
            return ExecuteReport("insert", name, None, count, 0, 0, 1, applied=False)
        load = self.table.upsert if upserts else self.table.ingest
        report = load(reader, ingest_id=self.how.edit_id)
        rows_added = report.rows if report.applied else 0
        return ExecuteReport("insert", name, report.ingest_id, rows_added, 0, 0, 1, report.applied)

    def merge(self, kind: str, source: Sql, on: list[str] | Sql, whens: Sequence[When]) -> ExecuteReport:
        report = self.table.merge_into(source, on, whens, **self._edit)
        done = {name: getattr(report, name) for name in ("inserted", "updated", "deleted")}
        return self._report(kind, report, **done)

    def _report(
        self, kind: str, report: Any, *, inserted: int = 0, updated: int = 0, deleted: int | None = 0
    ) -> ExecuteReport:
        counts, name = (inserted, updated, deleted), self.table.known_name
        return ExecuteReport(kind, name, report.edit_id, *counts, report.attempts, report.applied)


def parsed_clauses(tables: Tables, schema: Schema, texts: Iterable[str]) -> list[When]:
    """Returns the clauses of a merge from texts like "matched and s.gone then delete".

    `UPDATE` and `INSERT` without columns set those that the source has. Raises `InvalidQuery`.
    """
    whens = " ".join(f"WHEN {one}\n" for one in texts)
    with closing(tables.sessions()(Interruption())) as session:
        found = session.written(f"MERGE INTO {TARGET} USING {SOURCE} ON true {whens}", ())
    assert isinstance(found, Merge)  # noqa: S101 it begins so
    return [
        _when(schema, clause, {TARGET: TARGET, SOURCE: SOURCE}, lambda clause: "*")
        for clause in found.clauses
    ]


class Bound(Generic[R]):
    """A table to which statements are bound, and the calls that they become."""

    def __init__(self, tables: Tables, table: Table, calls: Calls[R]) -> None:
        self._tables, self._table, self._calls = tables, table, calls
        self._name = table.known_name
        self._schema = table.known_schema
        self._is_keyed = is_keyed(table.properties)

    def run(self, statement: Written) -> R:
        match statement:
            case Insert():
                return self.insert(statement)
            case Update(target, sets, where):
                values = _values(self._schema, sets, {target.alias.lower(): TARGET})
                return self._calls.update(self._where(target, where), values)
            case Delete(target, where):
                return self._calls.delete(self._where(target, where))
            case Merge():
                return self.merge(statement)

    def insert(self, statement: Insert) -> R:
        if statement.conflict is not None:
            self._check_conflict(statement.conflict)
        columns = self._columns(statement)
        try:
            return self._inserted(statement, columns)
        except InvalidInput as error:
            query = replace(statement.query, text=self._with_types(statement.query, columns))
            if len(self._names_of(query)) != len(columns):
                raise InvalidQuery(
                    f"the rows have another number of columns than INSERT gives to table {self._name!r}: "
                    "name its columns in parentheses after it"
                ) from None
            error.args = (str(error).replace(MUST_MATCH, "INSERT OR REPLACE replaces it"),)
            raise

    def _inserted(self, statement: Insert, columns: Sequence[Field]) -> R:
        conflict = statement.conflict
        rows = self._rows(statement, columns)
        keys, names = list(self._schema.row_key_names), [field.name for field in columns]
        inserted = WhenNotMatched(insert=names)
        if not self._is_keyed:
            return self._calls.load(rows, upserts=False)
        if conflict is None:
            # no row matches, so that a key which the table has is refused, as one that is given twice
            return self._calls.merge("insert", Sql(rows), Sql("false"), [inserted])
        if conflict.action == "nothing":
            return self._calls.merge("insert", Sql(rows), keys, [inserted])
        if conflict.action == "replace" or _replaces(conflict.sets, conflict.condition, names, keys):
            return self._calls.load(rows, upserts=True)
        names_of = {statement.target.alias.lower(): TARGET, "excluded": SOURCE}
        bare = dict.fromkeys(map(str.lower, self._schema.names), TARGET)
        changed = WhenMatched(
            _condition(conflict.condition, names_of, bare),
            update=_values(self._schema, conflict.sets, names_of, bare),
        )
        return self._calls.merge("insert", Sql(rows), keys, [changed, inserted])

    def merge(self, statement: Merge) -> R:
        names = {statement.target.alias.lower(): TARGET, statement.source.lower(): SOURCE}
        source = f"{statement.query.prefix}\n{statement.query.text}".strip()
        on, equal = self._on(statement, names)
        whens = [
            _when(self._schema, clause, names, lambda clause: self._all(clause, source, equal))
            for clause in statement.clauses
        ]
        return self._calls.merge("merge", Sql(source), on, whens)

    def _where(self, target: Target, expression: Expression | None) -> Any:
        if expression is None:
            return ALL
        found = plain_where(self._schema, target.alias, expression)
        # a table that merges rows of equal key records no deletion by values: an edit reads the merged rows
        is_merging = self._table.properties.aggregate is not None
        if found is None or (is_merging and not set(self._schema.key_names).issuperset(found)):
            return Sql(expression.called({target.alias.lower(): TARGET}))
        return found

    def _check_conflict(self, conflict: Conflict) -> None:
        """Raises `InvalidInput` if the conflicts of a statement are not those of the table's keys."""
        keys = list(self._schema.row_key_names)
        if not self._is_keyed:
            raise InvalidInput(
                f"table {self._name!r} keeps every row, so that no rows conflict: leave OR REPLACE and ON "
                "CONFLICT out, or write MERGE INTO … USING … ON …"
            )
        named = [_column(self._schema, name).name for name in conflict.columns]
        if named and sorted(named) != sorted(keys):
            raise InvalidInput(
                f"rows of table {self._name!r} conflict by {', '.join(keys)}: name these columns"
            )

    def _columns(self, statement: Insert) -> list[Field]:
        """Returns the columns that an INSERT gives, in the order of its rows."""
        names: Sequence[str] = statement.columns or self._schema.names
        if statement.by_name:
            names = self._names_of(statement.query)
        return [_column(self._schema, name) for name in names]

    def _names_of(self, query: Query) -> list[str]:
        """Returns the names of a query's columns."""
        return list(self._tables.sql(f"{query.prefix} SELECT * FROM ({query.text}) LIMIT 0").schema.names)

    def _rows(self, statement: Insert, columns: Sequence[Field]) -> str:
        """Returns a SELECT of the rows of an INSERT, with the names and types of the table's columns."""
        names = [quoted(f"c{n}") for n in range(len(columns))]
        casts = ", ".join(
            f"CAST({name} AS {type_name(field.type)}) AS {quoted(field.name)}"
            for name, field in zip(names, columns, strict=True)
        )
        nulls = ", ".join(["NULL"] * len(columns))
        # the union fails if the query has another number of columns
        given = f"({self._with_types(statement.query, columns)}) UNION ALL SELECT {nulls} WHERE false"
        return f"{statement.query.prefix} SELECT {casts} FROM ({given}) AS given({', '.join(names)})"

    def _with_types(self, query: Query, columns: Sequence[Field]) -> str:
        """Returns the text of a query with each value in VALUES cast, and defaults in place of DEFAULT.

        Without the casts, DuckDB would look for one type for all values of a column: that of
        9007199254740993 and 1e0 is DOUBLE, which cannot hold the first.
        """
        raw, parts, at = query.text.encode(), [], 0
        for begin, end, number, is_default in query.cells:
            if number >= len(columns):
                continue
            cell, field = raw[begin:end].decode(), columns[number]
            if is_default:
                default = self._schema.default(field.name)
                if isinstance(default, dict | list):
                    raise InvalidQuery(f"DEFAULT of column {field.name!r}: leave the column out")
                cell = literal_of(default)
            parts += [raw[at:begin].decode(), f"CAST({cell} AS {type_name(field.type)})"]
            at = end
        return "".join([*parts, raw[at:].decode()])

    def _on(self, statement: Merge, names: Mapping[str, str]) -> tuple[list[str] | Sql, dict[str, str]]:
        """Returns the condition of a MERGE, and pairs of equal columns of the table and the source."""
        if statement.on is None:
            columns = [_column(self._schema, name).name for name in statement.using]
            return columns, {name.lower(): name.lower() for name in columns}
        equal: dict[str, str] = {}
        for one in statement.on.comparisons or ():
            sides = {
                names.get(side[0].lower()): side[1].lower()
                for side in (one.column, one.other)
                if len(side) == 2
            }
            if one.sign != "=" or sides.keys() != {TARGET, SOURCE}:
                return Sql(statement.on.called(names)), equal
            equal[sides[TARGET]] = sides[SOURCE]
        if equal and all(
            one == other and one in map(str.lower, self._schema.names) for one, other in equal.items()
        ):
            return [_column(self._schema, name).name for name in equal], equal
        return Sql(statement.on.called(names)), equal

    def _all(self, clause: Clause, source: str, equal: Mapping[str, str]) -> Any:
        """Returns the columns of a clause that sets all: in the order of the source's, or by their names."""
        given = list(self._tables.sql(f"SELECT * FROM ({source}) LIMIT 0").schema.names)
        columns = self._schema.names
        if clause.star == "by name":
            for name in given:
                _column(self._schema, name)
            return "*"
        if len(given) != len(columns):
            raise InvalidQuery(
                f"the source has {len(given)} columns, and table {self._name!r} has {len(columns)}: write "
                f"{clause.action.upper()} BY NAME, or name the columns"
            )
        if [name.lower() for name in given] == [name.lower() for name in columns]:
            return "*"
        pairs = dict(zip(columns, given, strict=True))
        if clause.action == "update" and self._is_keyed:
            # keys that are equal need not be set
            keys = [key for key in self._schema.row_key_names if equal.get(key.lower()) == pairs[key].lower()]
            pairs = {name: one for name, one in pairs.items() if name not in keys}
        return {name: Sql(f"{SOURCE}.{quoted(one)}") for name, one in pairs.items()}


def _replaces(
    sets: Sequence[Assignment], condition: Expression | None, names: Sequence[str], keys: Sequence[str]
) -> bool:
    """Returns whether DO UPDATE sets each given column to its new value, and nothing else."""
    if condition is not None:
        return False
    given = {name.lower() for name in names} - {key.lower() for key in keys}
    found = {
        one.column.lower()
        for one in sets
        if one.value is not None
        and [part.names for part in one.value.references] == [("excluded", one.column)]
        and one.value.text.lower() == f"excluded.{one.column.lower()}"
    }
    return found == given and len(sets) == len(given)


def _when(
    schema: Schema, clause: Clause, names: Mapping[str, str], all_columns: Callable[[Clause], Any]
) -> When:
    """Returns a clause as `Table.merge_into` takes it; `all_columns` returns those of UPDATE or INSERT *."""
    condition = _condition(clause.condition, names)
    if clause.action == "error":
        # the action is never reached, but without one the clause would not be looked at
        condition = _failing(clause, condition, names)
    is_insert = clause.of == "not matched"
    if clause.action in {"update", "insert"}:
        sets = (
            all_columns(clause) if clause.star else _values(schema, clause.sets, names, is_insert=is_insert)
        )
    else:
        sets = {schema.key_names[0]: Sql("NULL")}
    if is_insert:
        return WhenNotMatched(condition, None if clause.action == "nothing" else sets)
    kind = WhenMatched if clause.of == "matched" else WhenNotMatchedBySource
    if clause.action == "update":
        return kind(condition, sets)
    return kind(condition, delete=clause.action != "nothing")


def _failing(clause: Clause, condition: str | None, names: Mapping[str, str]) -> str:
    """Returns the condition of a clause with ERROR, which fails for a row that meets `condition`."""
    said = text(f"MERGE INTO found a row that is {clause.of.upper()}")
    message = said if clause.message is None else clause.message.called(names)
    return f"CASE WHEN ({condition or 'true'}) THEN CAST(error({message}) AS BOOLEAN) ELSE false END"


def _values(
    schema: Schema,
    sets: Sequence[Assignment],
    names: Mapping[str, str],
    bare: Mapping[str, str] | None = None,
    *,
    is_insert: bool = False,
) -> dict[str, Any]:
    """Returns the new value of each column that a statement sets."""
    columns = [one.column for one in sets]
    if "" in columns:
        if len(columns) != len(schema.names):
            raise InvalidQuery(
                f"INSERT has {len(columns)} values, and the table has {len(schema.names)} columns"
            )
        columns = list(schema.names)
    found: dict[str, Any] = {}
    for column, one in zip(columns, sets, strict=True):
        name = _column(schema, column).name
        if one.value is not None:
            found[name] = Sql(one.value.called(names, bare))
        elif not is_insert:
            found[name] = schema.default(name)
    return found


def _condition(
    expression: Expression | None, names: Mapping[str, str], bare: Mapping[str, str] | None = None
) -> str | None:
    return None if expression is None else expression.called(names, bare)


def _column(schema: Schema, name: str) -> Field:
    """Returns the column of a name, in which upper and lower case are equal. Raises `InvalidQuery`."""
    found = [column for column in schema.names if column.lower() == name.lower()]
    if name not in found and len(found) != 1:
        raise unknown("column", name, schema.names)
    return schema.field(name if name in found else found[0])
