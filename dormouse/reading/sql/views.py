"""DuckDB views of tables, made from their files, all as of one moment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema, exact
from dormouse.data.transform import Transform, quoted
from dormouse.errors import InvalidQuery, ObjectAlreadyExists, ObjectNotFound, ObjectStoreError
from dormouse.model.cut import Position, When
from dormouse.model.file_reference import is_inlined
from dormouse.model.region import KeyRanges
from dormouse.model.schema import is_as_stored
from dormouse.model.table import VERSIONS, is_keyed
from dormouse.objects.names import schema_version_of
from dormouse.objects.store import ObjectStore, open_store
from dormouse.reading.checked_files import check_columns, checked_sizes, on_current
from dormouse.reading.planner import Scan
from dormouse.reading.row_filter import every, in_slices, remains, rendered_unless_all
from dormouse.reading.row_sets import RowSet
from dormouse.reading.sql.conditions import DUCKDB, text, type_name
from dormouse.reading.sql.engine import Sessions, connection
from dormouse.reading.sql.selects import Select
from dormouse.reading.sql.statements import sql_of
from dormouse.reading.streams import Interruption
from dormouse.reading.table_moments import Moments, at_moment
from dormouse.reading.table_view import check_files, plan_tables
from dormouse.reading.where import Question, Where, checked_offset, question, unknown
from dormouse.state.context import TableContext

# A table's files for other readers, each with the condition for the rows that count.


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A Parquet file of a table, and the SQL condition for its rows that count; None if all rows count.

    The file is a path or an S3 URL. `byte_count` is its size, 0 if not known.
    """

    path: str
    condition: str | None
    byte_count: int


def live_files(
    context: TableContext, as_of: When | None = None, inlined_to: str | os.PathLike[str] | None = None
) -> list[LiveFile]:
    """Returns the files that contain the table's rows, now or at another moment, each file once.

    Each has the SQL condition, on columns of the file, for the rows to read. If a row was ingested several
    times, the files contain it as many times. Inlined files are copied to the folder or S3 URL `inlined_to`,
    unless they are there. Raises `InvalidQuery` for inlined files without it, and if no condition can select
    the rows: for tables that merge or hide rows, and for files that were written before the table's columns
    changed.
    """
    then, at = at_moment(context, as_of)
    copies = None if inlined_to is None else open_store(inlined_to)

    def listed(then: TableContext) -> list[LiveFile]:
        _check_plain(then)
        [plan] = plan_tables([(then, KeyRanges())], at=None if at is None else [at])
        return [_live_file(then, scan, copies) for group in plan.groups for scan in group]

    return on_current(context, listed) if at is None else listed(then)


def _check_plain(context: TableContext) -> None:
    properties, name = context.properties, context.table.name
    if context.current_rows:
        raise InvalidQuery(
            f"the files of row table {name!r} hold every version of its rows: list them by the name "
            f"{name + VERSIONS!r}, or read the current rows by query, sql or instance.duckdb()"
        )
    transform = Transform.parse(context.schema, properties)
    if is_keyed(properties) or transform.aggregates or transform.age_off:
        which = "keep" if is_keyed(properties) else "aggregate" if transform.aggregates else "filter"
        raise InvalidQuery(
            f"the files of table {name!r} alone do not show its rows, as it has the property {which}: read "
            "it by query, sql or instance.duckdb()"
        )


def _live_file(context: TableContext, scan: Scan, copies: ObjectStore | None) -> LiveFile:
    schema, objects, name = context.schema, context.objects, scan.filename
    written = context.stored_schema.as_written(schema_version_of(scan.filename))
    if not is_as_stored(written, schema):
        raise InvalidQuery(
            f"file {scan.filename!r} of table {context.table.name!r} was written before its columns were "
            "changed: compact the table, or read it by query, sql or instance.duckdb()"
        )
    if is_inlined(name):
        if copies is None:
            raise InvalidQuery(
                f"file {name!r} of table {context.table.name!r} is in the database until it is compacted: "
                "name a folder or S3 URL for copies of such files, as in live_files(inlined_to='./copies'), "
                "or call compact(full=True) first"
            )
        objects, name = copies, _copied(objects, name, copies)
    if listing := [one.deletion_id for one in scan.deletions if isinstance(one.rows, RowSet)]:
        raise InvalidQuery(
            f"deletion {listing[0]} of table {context.table.name!r} lists rows, maybe of file "
            f"{scan.filename!r}, which no condition expresses: call compact(full=True) first, or read the "
            "table by query, sql or instance.duckdb()"
        )
    counts = every([in_slices(schema, scan.slices), remains(schema, scan.deletions)])
    path = objects.local_path(name)
    return LiveFile(
        objects.uri(name) if path is None else str(path),
        rendered_unless_all(counts, DUCKDB),
        scan.byte_count or 0,
    )


def _copied(objects: ObjectStore, name: str, copies: ObjectStore) -> str:
    """Copies an inlined file, whose content never changes, unless it was copied; returns the copy's name."""
    copy = "-".join(name.split("/")[-2:])
    with suppress(ObjectAlreadyExists):
        copies.put(copy, objects.get(name))
    return copy


# Queries of one table, which is identified by its context, even if it is renamed meanwhile.


def descending(
    sessions: Sessions,
    context: TableContext,
    where: Where,
    columns: Sequence[str] | None,
    limit: int | None,
    offset: int,
    interruption: Interruption | None,
    as_of: When | None,
) -> pa.RecordBatchReader:
    """Returns the rows that `where` selects, largest keys first. DuckDB sorts them, and spills to disk.

    Raises the errors of `Table.query`.
    """
    skipped = checked_offset(offset)

    def read(now: TableContext) -> pa.RecordBatchReader:
        schema = at_moment(now, as_of)[0].schema
        checked = question(schema, where, columns, limit)
        statement = f"select {', '.join(map(quoted, checked.columns))} from {quoted(now.table.name)}"
        statement += f" order by {', '.join(f'{quoted(key)} desc' for key in schema.key_names)}"
        statement += f" limit {'all' if limit is None else limit} offset {skipped}"
        found = sql_of(sessions, now, checked, statement, interruption, as_of)
        whole = arrow_schema(schema)
        wanted = pa.schema([whole.field(column) for column in checked.columns])
        return pa.RecordBatchReader.from_batches(wanted, _exactly(found, wanted))

    return on_current(context, read)


def value(sessions: Sessions, context: TableContext, expression: str, as_of: When | None = None) -> Any:
    """Returns the value of an aggregate expression over all rows. Raises the errors of `Table.query`."""

    def read(now: TableContext) -> Any:
        checked = question(now.schema, None, None, None)
        statement = f"select {expression} from {quoted(now.table.name)}"
        answer = sql_of(sessions, now, checked, statement, as_of=as_of)
        return answer.read_all().column(0)[0].as_py()

    return on_current(context, read)


def _exactly(answer: pa.RecordBatchReader, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    with answer:
        for batch in answer:
            yield exact(batch, wanted)


FILES_MAX = 10_000
"""The most files of a view: DuckDB looks at each file whenever the view is used."""
REPLANS_MAX = 10


def opened(
    objects: ObjectStore,
    contexts: Mapping[str, TableContext],
    where: Mapping[str, Where],
    as_of: When | None = None,
) -> duckdb.DuckDBPyConnection:
    """Returns a connection with a view of each table, by name, all as of one moment.

    `where` restricts the rows of a table. A view of a table with more than `FILES_MAX` files raises an error
    when it is used. Raises `InvalidQuery` for a condition that does not fit its table, and for an unknown
    table.
    """
    for name in where.keys() - contexts.keys():
        raise unknown("table", name, contexts)
    moments = Moments(contexts, as_of)
    contexts, refused = moments.contexts, moments.refused
    questions = {
        name: question(context.schema, where.get(name), None, None) for name, context in contexts.items()
    }
    for name, one in questions.items():
        if name not in refused and (why := _refusal(contexts[name], one.ranges, moments.of(name))):
            refused[name] = why
    planned = {name: one for name, one in questions.items() if name not in refused}
    moments.read(planned, planned)
    failed: dict[str, str] = {}
    for _ in range(REPLANS_MAX):
        before = failed
        made, failed = _with_views(objects, contexts, planned, moments)
        if failed == before:
            for name, why in (refused | failed).items():
                made.execute(f"CREATE VIEW {quoted(name)} AS {_refusing(contexts[name], why)}")
            return made
        # a file was collected since the plan, or is lost: a second plan distinguishes the two
        made.close()
    raise ObjectNotFound(
        f"files are collected faster than they are planned: {next(iter(failed.values()), '')}"
    )


def _with_views(
    objects: ObjectStore,
    contexts: Mapping[str, TableContext],
    questions: Mapping[str, Question],
    moments: Moments,
) -> tuple[duckdb.DuckDBPyConnection, dict[str, str]]:
    """Returns a connection with views of tables, and the error of each table whose files cannot be read."""
    wanted = [(contexts[name], one.ranges) for name, one in questions.items()]
    plans = plan_tables(wanted, at=moments.all(list(questions)))
    failed: dict[str, str] = {}
    made = connection(objects)
    try:
        # the optimizer that `Select` works around in known statements: see `joins_outer`
        made.execute("SET disabled_optimizers = 'top_n'")
        for (name, one), plan in zip(questions.items(), plans, strict=True):
            scans = [scan for group in plan.groups for scan in group]
            now_ms = moments.milliseconds(name)
            context, files = contexts[name], plan.summary.files
            if files <= FILES_MAX:
                select = Select(context, one, now_ms, ranges=one.ranges).of(scans)
            else:
                table = context.table.name
                many = f"table {table!r} has {files:,} files, more than {FILES_MAX:,}: bound it by "
                select = _refusing(context, f"{many}where={{{table!r}: …}}, or compact it")
            if why := _damage(contexts[name], scans) or _failure(made, name, select):
                failed[name] = f"table {name!r} cannot be read: {why}"
    except BaseException:
        made.close()
        raise
    return made, failed


def _failure(made: duckdb.DuckDBPyConnection, name: str, select: str) -> str | None:
    """Creates a view; returns a message of one line if its files cannot be read, otherwise None."""
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
    """Returns a message if a file is missing or damaged, otherwise None.

    It also checks the columns of the first file, since DuckDB assumes that all files have them.
    """
    try:
        with checked_sizes(context, scans):
            for scan in scans[:1]:
                check_columns(context, scan)
    except (ObjectStoreError, InvalidQuery) as error:  # InvalidQuery is raised for a file without a digest
        return str(error)
    return None


def _refusal(context: TableContext, ranges: KeyRanges, at: Position | None) -> str | None:
    """Returns a message if a table has too many files to be planned in one piece, otherwise None."""
    try:
        check_files(context, ranges, FILES_MAX, at)
    except InvalidQuery as error:
        return str(error)
    return None


def _refusing(context: TableContext, why: str) -> str:
    """Returns a SELECT of a table's columns that always fails; its error is the text `why`."""
    columns = (
        f"error({text(why)})::{type_name(field.type)} AS {quoted(field.name)}"
        for field in context.schema.fields
    )
    return f"SELECT {', '.join(columns)} WHERE error({text(why)})"
