"""DataFusion sessions that read a table's files: sorted scans, exact types, errors that name the file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from datafusion import DataFrame, RuntimeEnvBuilder, SessionConfig, SessionContext
from datafusion.expr import SortExpr

from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.forks import check_not_forked
from dormouse.data.object_access import register
from dormouse.data.transform import Transform, quoted
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore
from dormouse.query.planner import Scan
from dormouse.query.predicates import column, in_slices
from dormouse.query.streams import MEMORY_BYTES_MAX

_names = count(1)
_OPTIONS = {
    # what leaves Dormouse has `string` and `binary`, so nothing needs to be views on the way
    "datafusion.execution.parquet.schema_force_view_types": "false",
    "datafusion.sql_parser.map_string_types_to_utf8view": "false",
    # facts of files are PostgreSQL's: reading footers to plan would open every file at once
    "datafusion.execution.collect_statistics": "false",
    # names mean what they say, in upper and lower case
    "datafusion.sql_parser.enable_ident_normalization": "false",
    "datafusion.optimizer.prefer_existing_sort": "true",
}
_ONE_STREAM = {
    # a file is one sorted stream: nothing may cut it up or mix it
    "datafusion.execution.target_partitions": "1",
    "datafusion.optimizer.repartition_file_scans": "false",
    "datafusion.optimizer.enable_round_robin_repartition": "false",
    "datafusion.optimizer.repartition_aggregations": "false",
}


def session(store: ObjectStore | None, *, in_key_order: bool) -> SessionContext:
    """A session that reads the store's objects; `in_key_order` keeps every plan one sorted stream."""
    check_not_forked()
    config = SessionConfig()
    for name, value in (_OPTIONS | (_ONE_STREAM if in_key_order else {})).items():
        config = config.set(name, value)
    runtime = RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(MEMORY_BYTES_MAX)
    ctx = SessionContext(config, runtime)
    if store is not None:
        register(ctx, store)
    return ctx


def rows(
    ctx: SessionContext, store: ObjectStore, transform: Transform, scans: Sequence[Scan], now_ms: int
) -> DataFrame:
    """The wanted rows of some files, with the table's filter and aggregation applied; in no order."""
    found = _union([_scan(ctx, store, transform.schema, scan) for scan in scans])
    if not transform.aggregates and transform.age_off is None:
        return found
    # a space is in no table's name
    name = quoted(f"dormouse source {next(_names)}")
    ctx.register_view(name, found)
    try:
        columns = ", ".join(map(quoted, transform.schema.names))
        return ctx.sql(transform.sql(f"SELECT {columns} FROM {name}", now_ms))
    finally:
        ctx.deregister_table(name)


def no_rows(ctx: SessionContext, schema: Schema) -> DataFrame:
    """A table of the schema without any row."""
    return ctx.from_arrow(arrow_schema(schema).empty_table())


def key_order(schema: Schema) -> list[SortExpr]:
    """How a table's files are sorted."""
    return [column(name).sort(ascending=True, nulls_first=False) for name in schema.key_names]


def _scan(ctx: SessionContext, store: ObjectStore, schema: Schema, scan: Scan) -> DataFrame:
    found = ctx.read_parquet(
        _url(store, scan.filename),
        file_extension="",
        schema=arrow_schema(schema),
        file_sort_order=[key_order(schema)],
    )
    predicate = in_slices(schema, scan.slices)
    return found if predicate is None else found.filter(predicate)


def _url(store: ObjectStore, filename: str) -> str:
    """As a URL, in which DataFusion takes no character for a pattern."""
    path = store.local_path(filename)
    return store.uri(filename) if path is None else path.as_uri()


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    """All of them, as a tree whose depth stays small however many there are."""
    if len(frames) == 1:
        return frames[0]
    middle = len(frames) // 2
    return _union(frames[:middle]).union(_union(frames[middle:]))
