"""Tables as DuckDB's views of their files, all of one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb

from dormouse.data.transform import quoted
from dormouse.errors import InvalidQuery, ObjectNotFound, ObjectStoreError
from dormouse.model.cut import Position, When
from dormouse.objects import ObjectStore
from dormouse.reading.checked_files import check_columns, checked_sizes
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.planner import Scan
from dormouse.reading.sql.as_of import Moments
from dormouse.reading.sql.conditions import text, type_name
from dormouse.reading.sql.connection import connection
from dormouse.reading.sql.selects import Select
from dormouse.reading.table_view import check_files, plan_tables
from dormouse.reading.where import Question, Where, question, unknown
from dormouse.state.context import TableContext

FILES_MAX = 10_000
"""Of a view: whenever it is used, DuckDB looks at each."""
REPLANS_MAX = 10


def opened(
    objects: ObjectStore,
    contexts: Mapping[str, TableContext],
    where: Mapping[str, Where],
    as_of: When | None = None,
) -> duckdb.DuckDBPyConnection:
    """A connection with a view of each table, by name, as all of them are, or were, at one moment.

    `where` bounds what is seen of a table. The view of a table that has more than `FILES_MAX` files says so
    when it is used. Raises `InvalidQuery` for a condition that does not fit its table, or a table that there
    is not.
    """
    for name in where.keys() - contexts.keys():
        raise unknown("table", name, contexts)
    moments = Moments(contexts, as_of)
    contexts, refused = moments.contexts, moments.refused
    asked = {
        name: question(context.schema, where.get(name), None, None) for name, context in contexts.items()
    }
    for name, one in asked.items():
        if name not in refused and (why := _refusal(contexts[name], one.ranges, moments.of(name))):
            refused[name] = why
    planned = {name: one for name, one in asked.items() if name not in refused}
    moments.read(planned, planned)
    failed: dict[str, str] = {}
    for _ in range(REPLANS_MAX):
        before = failed
        made, failed = _with_views(objects, contexts, planned, moments)
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
    objects: ObjectStore,
    contexts: Mapping[str, TableContext],
    asked: Mapping[str, Question],
    moments: Moments,
) -> tuple[duckdb.DuckDBPyConnection, dict[str, str]]:
    """A connection with views of tables at one moment; and of which the files cannot be read, and why."""
    wanted = [(contexts[name], one.ranges) for name, one in asked.items()]
    plans = plan_tables(wanted, at=moments.all(list(asked)))
    failed: dict[str, str] = {}
    made = connection(objects)
    try:
        # what `Select` avoids in statements that it knows: see `joins_outer`
        made.execute("SET disabled_optimizers = 'top_n'")
        for (name, one), plan in zip(asked.items(), plans, strict=True):
            scans = [scan for group in plan.groups for scan in group]
            now_ms = moments.milliseconds(name)
            select = _select(contexts[name], one, now_ms, plan.summary.files, scans)
            if why := _damage(contexts[name], scans) or _failure(made, name, select):
                failed[name] = f"table {name!r} cannot be read: {why}"
    except BaseException:
        made.close()
        raise
    return made, failed


def _select(context: TableContext, asked: Question, now_ms: int, files: int, scans: Sequence[Scan]) -> str:
    if files <= FILES_MAX:
        return Select(context, asked, now_ms).of(scans)
    found = f"{files:,} files, more than {FILES_MAX:,}"
    name = context.table.name
    return _refusing(context, f"table {name!r} has {found}: bound it by where={{{name!r}: …}}, or compact it")


def _failure(made: duckdb.DuckDBPyConnection, name: str, select: str) -> str | None:
    """Makes a view; why its files cannot be read, in one line."""
    try:
        made.execute(f"CREATE VIEW {quoted(name)} AS {select}")
    except duckdb.CatalogException:
        raise InvalidQuery(
            f"DuckDB cannot tell table {name!r} from another whose name differs in upper and lower case "
            "only: rename one"
        ) from None
    except (duckdb.IOException, duckdb.InvalidInputException, duckdb.BinderException) as error:
        return str(error).partition("\n")[0]
    return None


def _damage(context: TableContext, scans: Sequence[Scan]) -> str | None:
    """Why files are not what was written; of the first, whose columns DuckDB takes for those of all, too."""
    try:
        with checked_sizes(context, scans):
            for scan in scans[:1]:
                check_columns(context, scan)
    except (ObjectStoreError, InvalidQuery) as error:  # the latter of a file that has no digest
        return str(error)
    return None


def _refusal(context: TableContext, ranges: KeyRanges, at: Position | None) -> str | None:
    """Why a table has too many files to be planned whole."""
    try:
        check_files(context, ranges, FILES_MAX, at)
    except InvalidQuery as error:
        return str(error)
    return None


def _refusing(context: TableContext, why: str) -> str:
    """A select of a table's columns that fails, whatever is asked of it."""
    columns = (
        f"error({text(why)})::{type_name(field.type)} AS {quoted(field.name)}"
        for field in context.schema.fields
    )
    return f"SELECT {', '.join(columns)} WHERE error({text(why)})"
