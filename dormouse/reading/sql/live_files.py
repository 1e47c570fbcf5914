"""A table's files for readers that know nothing of it, each with the condition on the rows that count."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.data.transform import Transform, quoted
from dormouse.errors import InvalidQuery
from dormouse.model.cut import When
from dormouse.model.keyed import is_keyed
from dormouse.model.properties import VERSIONS
from dormouse.model.reshaping import is_as_stored
from dormouse.objects.names import schema_version_of
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.planner import Scan
from dormouse.reading.schemas import on_current
from dormouse.reading.sql.conditions import all_of, in_slices, remains
from dormouse.reading.table_view import plan_tables
from dormouse.state.context import TableContext
from dormouse.state.history.moments import position_of


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A Parquet file of a table: a path, or a URL of S3, and a condition in SQL; None: all of its rows count.

    `byte_count` is its size, 0 where it is not known.
    """

    path: str
    condition: str | None
    byte_count: int


def live_files(context: TableContext, as_of: When | None = None) -> list[LiveFile]:
    """The files that hold the table's rows now, or at another moment, each once, by their names.

    A row is in as many files as it was ingested. Conditions are DuckDB's SQL, on columns of the file. Raises
    `InvalidQuery` where no condition on a file's rows says which count: of tables that merge or hide rows,
    and of files that were written before columns were changed.
    """
    at = None if as_of is None else position_of(context, as_of)

    def listed(then: TableContext) -> list[LiveFile]:
        _check_plain(then)
        [plan] = plan_tables([(then, KeyRanges())], at=None if at is None else [at])
        return [_told(then, scan) for group in plan.groups for scan in group]

    return on_current(context, listed) if at is None else listed(context.as_of(at))


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
            f"the property {which} of table {name!r} makes rows what no file has: read it by query, sql or "
            "instance.duckdb()"
        )


def _told(context: TableContext, scan: Scan) -> LiveFile:
    schema, objects = context.schema, context.objects
    written = context.stored_schema.as_written(schema_version_of(scan.filename))
    if not is_as_stored(written, schema):
        raise InvalidQuery(
            f"file {scan.filename!r} of table {context.table.name!r} was written before its columns were "
            "changed: compact the table, or read it by query, sql or instance.duckdb()"
        )
    left = remains(schema, scan.deletions, lambda field: quoted(field.name))
    path = objects.local_path(scan.filename)
    return LiveFile(
        objects.uri(scan.filename) if path is None else str(path),
        all_of([in_slices(schema, scan.slices), left]),
        scan.byte_count or 0,
    )
