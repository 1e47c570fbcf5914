"""Tables as DuckDB's views of their files, all of one moment."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import duckdb

from dormouse.context import TableContext
from dormouse.data.transform import AgeOff, Function, Transform, quoted
from dormouse.errors import InvalidQuery, ObjectNotFound
from dormouse.model.schema import Field
from dormouse.model.types import DOUBLE, LONG, TIMESTAMP
from dormouse.objects import ObjectStore
from dormouse.query.key_ranges import KeyRanges
from dormouse.query.planner import QueryPlan, Scan
from dormouse.query.table_view import check_files, plan_tables
from dormouse.query.where import Question, Where, question, unknown
from dormouse.sql.conditions import all_of, in_slices, meets, text, type_name
from dormouse.sql.connection import connection, path_of

FILES_MAX = 10_000
"""Of a view: whenever it is used, DuckDB looks at each."""
PARTS_MAX = 1_000
"""Of a view: files of which different keys count are read apart."""
REPLANS_MAX = 10


def opened(
    objects: ObjectStore, contexts: Mapping[str, TableContext], where: Mapping[str, Where]
) -> duckdb.DuckDBPyConnection:
    """A connection with a view of each table, by name, as all of them are at one moment.

    `where` bounds what is seen of a table. The view of a table that has more than `FILES_MAX` files, or parts
    of files in more than `PARTS_MAX` ways, says so when it is used. Raises `InvalidQuery` for a condition
    that does not fit its table, or a table that there is not.
    """
    for name in where.keys() - contexts.keys():
        raise unknown("table", name, contexts)
    asked = {
        name: question(context.schema, where.get(name), None, None) for name, context in contexts.items()
    }
    refused = {name: why for name in asked if (why := _refusal(contexts[name], asked[name].ranges))}
    planned = {name: one for name, one in asked.items() if name not in refused}
    failed: dict[str, str] = {}
    for _ in range(REPLANS_MAX):
        before = failed
        made, failed = _with_views(objects, contexts, planned)
        if failed == before:
            for name, why in (refused | failed).items():
                made.execute(f"CREATE VIEW {quoted(name)} AS {_refusing(contexts[name], why)}")
            return made
        # a file was collected since it was planned, or is lost: another plan tells
        made.close()
    raise ObjectNotFound(
        f"files are collected faster than they are planned: {next(iter(failed.values()), '')}"
    )


def _with_views(
    objects: ObjectStore, contexts: Mapping[str, TableContext], asked: Mapping[str, Question]
) -> tuple[duckdb.DuckDBPyConnection, dict[str, str]]:
    """A connection with views of tables at one moment; and of which the files cannot be read, and why."""
    plans = plan_tables([(contexts[name], one.ranges) for name, one in asked.items()])
    now_ms, failed = time.time_ns() // 1_000_000, {}
    made = connection(objects)
    try:
        for (name, one), plan in zip(asked.items(), plans, strict=True):
            if why := _failure(made, name, _View(contexts[name], one, now_ms).of(plan)):
                failed[name] = f"table {name!r} cannot be read: {why}"
    except BaseException:
        made.close()
        raise
    return made, failed


def _failure(made: duckdb.DuckDBPyConnection, name: str, select: str) -> str | None:
    """Makes a view; why its files cannot be read, in one line."""
    try:
        made.execute(f"CREATE VIEW {quoted(name)} AS {select}")
    except duckdb.CatalogException:
        raise InvalidQuery(
            f"DuckDB cannot tell table {name!r} from another whose name differs in upper and lower case "
            "only: rename one"
        ) from None
    except (duckdb.IOException, duckdb.InvalidInputException) as error:
        return str(error).partition("\n")[0]
    return None


def _refusal(context: TableContext, ranges: KeyRanges) -> str | None:
    """Why a table has too many files to be planned whole."""
    try:
        check_files(context, ranges, FILES_MAX)
    except InvalidQuery as error:
        return str(error)
    return None


def _no_rows(context: TableContext) -> str:
    """A select of a table's columns, and of no row."""
    columns = (f"NULL::{type_name(field.type)} AS {quoted(field.name)}" for field in context.schema.fields)
    return f"SELECT {', '.join(columns)} WHERE false"


def _refusing(context: TableContext, why: str) -> str:
    """A select of a table's columns that fails, whatever is asked of it."""
    columns = (
        f"error({text(why)})::{type_name(field.type)} AS {quoted(field.name)}"
        for field in context.schema.fields
    )
    return f"SELECT {', '.join(columns)} WHERE error({text(why)})"


class _View:
    """What is wanted of one table, as a select."""

    def __init__(self, context: TableContext, asked: Question, now_ms: int) -> None:
        self._context = context
        self._schema = context.schema
        self._transform = Transform.parse(context.schema, context.properties)
        self._asked = asked
        self._now_ms = now_ms

    def of(self, plan: QueryPlan) -> str:
        """The wanted rows of planned files."""
        parts: dict[tuple[KeyRanges, ...], list[Scan]] = defaultdict(list)
        for group in plan.groups:
            for scan in group:
                parts[scan.slices].append(scan)
        if plan.summary.files > FILES_MAX or len(parts) > PARTS_MAX:
            return _refusing(self._context, self._too_much(plan, len(parts)))
        if not parts:
            return _no_rows(self._context)
        rows = " UNION ALL ".join(self._part(slices, scans) for slices, scans in parts.items())
        conditions = [meets(condition) for condition in self._asked.conditions]
        if self._transform.aggregates:
            return _where(f"SELECT * FROM ({self._merged(rows)})", conditions)
        return _where(f"SELECT * FROM ({rows})", [*conditions, self._young()])

    def _too_much(self, plan: QueryPlan, parts: int) -> str:
        found = (
            f"{plan.summary.files:,} files, more than {FILES_MAX:,}"
            if plan.summary.files > FILES_MAX
            else f"parts of files in {parts:,} ways, more than {PARTS_MAX:,}"
        )
        name = self._context.table.name
        return f"table {name!r} has {found}: bound it by where={{{name!r}: …}}, or compact it"

    def _part(self, slices: tuple[KeyRanges, ...], scans: Sequence[Scan]) -> str:
        """The rows of files of which the same counts."""
        columns = ", ".join(map(_column, self._schema.fields))
        files = ", ".join(text(path_of(self._context.objects, scan.filename)) for scan in scans)
        # a folder that is called a=b says nothing of its files' columns
        read = f"read_parquet([{files}], hive_partitioning = false)"
        return _where(f"SELECT {columns} FROM {read}", [in_slices(self._schema, slices)])

    def _merged(self, rows: str) -> str:
        """The rows with those of equal keys made one."""
        keys = ", ".join(map(quoted, self._schema.key_names))
        values = ", ".join(_aggregate(field, function) for field, function in self._transform.aggregates)
        return f"{_where(f'SELECT {keys}, {values} FROM ({rows})', [self._young()])} GROUP BY {keys}"

    def _young(self) -> str | None:
        """Whether a row is one that the table's filter keeps."""
        age_off = self._transform.age_off
        if age_off is None:
            return None
        field, name = self._schema.field(age_off.field), quoted(age_off.field)
        return f"{name} > {_oldest(field, age_off, self._now_ms)} OR {name} IS NULL"


def _column(field: Field) -> str:
    """A column as the file has it.

    Parquet's statistics leave NaN out, and DuckDB, to which it is the largest number, would skip what has
    one: it does not apply them to what is computed. 1.0 times any number is that number, -0.0 too.
    """
    name = quoted(field.name)
    return f"{name} * 1.0::DOUBLE AS {name}" if field.type == DOUBLE else name


def _oldest(field: Field, age_off: AgeOff, now_ms: int) -> str:
    oldest_ms = now_ms - age_off.age_ms
    if field.type == TIMESTAMP:
        return f"make_timestamptz({max(oldest_ms * 1_000, -(1 << 63) + 2)})"
    return f"({oldest_ms})::BIGINT"


def _aggregate(field: Field, function: Function) -> str:
    name = quoted(field.name)
    # a sum of BIGINT is exact, and too large a one an error
    exact = "::BIGINT" if function == "sum" and field.type == LONG else ""
    return f"{function}({name}){exact} AS {name}"


def _where(select: str, conditions: Iterable[str | None]) -> str:
    found = all_of(conditions)
    return select if found is None else f"{select} WHERE {found}"
