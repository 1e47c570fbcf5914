"""Sessions of DataFusion for sorted streams in bounded memory, their errors, and expressions.

Expressions are made of table columns, ranges and orders; their typed literals are exact.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from datafusion import (
    DataFrame,
    Expr,
    RuntimeEnvBuilder,
    SessionConfig,
    SessionContext,
    col,
    functions,
    literal,
)
from datafusion.expr import SortExpr

from dormouse.data.arrow_schema import arrow_type, check_stored, metadata_of, written_schema
from dormouse.data.object_access import register
from dormouse.data.transform import quoted
from dormouse.errors import DormouseError, InvalidData, JobFailed, ObjectNotFound, one_line, panics_as_errors
from dormouse.model.loops import joined
from dormouse.model.region import Region
from dormouse.model.schema import Column, Field, Schema, is_as_stored, pairs
from dormouse.model.types import BYTES, STRING
from dormouse.objects.staging import ForkGuard
from dormouse.objects.store import ObjectStore

check_not_forked = ForkGuard("DataFusion").check
MEMORY_LIMIT_BYTES = 1_500_000_000
_OPTIONS = {
    # a file is one sorted stream: it must not be divided or mixed
    "datafusion.optimizer.repartition_file_scans": "false",
    "datafusion.optimizer.enable_round_robin_repartition": "false",
    "datafusion.optimizer.repartition_aggregations": "false",
    "datafusion.optimizer.prefer_existing_sort": "true",
    # with statistics, DataFusion takes a key that is constant in each file for one that is constant in all of
    # them, and merges by the other keys alone
    "datafusion.execution.collect_statistics": "false",
    # strings as views: a merge compares four inline bytes before it looks further
    "datafusion.execution.parquet.schema_force_view_types": "true",
}
_BATCH_ROWS = 8_192
_BATCH_BYTES = 8 * 1024 * 1024
"""The most bytes of one batch of a file. The wider the rows of the file, the fewer rows a batch has."""
_VIEWS = {STRING: pa.string_view(), BYTES: pa.binary_view()}


def column(name: str) -> Expr:
    return col(quoted(name))


def value(field: Field, item: Any) -> Expr:
    """Returns a literal of exactly the field's type."""
    return literal(pa.scalar(item, arrow_type(field.type)))


def among(field: Field, items: Sequence[Any]) -> Expr:
    """Returns an expression that is true for rows whose column has one of `items`, possibly thousands."""
    if field.type == BYTES:
        # a list of bytes has another type than the views that DataFusion reads
        return functions.in_list(column(field.name), [value(field, item) for item in items])
    # one list literal, which DataFusion plans as it plans IN
    listed = literal(pa.scalar(items, pa.list_(arrow_type(field.type))))
    return functions.array_has(listed, column(field.name))


def in_region(schema: Schema, region: Region) -> Expr | None:
    """Returns an expression that is true for rows in a region; None when the region contains every row."""
    parts = []
    for field in schema.row_keys:
        key, item = column(field.name), region.range(field.name)
        if item.min is not None:
            low = value(field, item.min)
            parts.append(key >= low if item.min_inclusive else key > low)
        if item.max is not None:
            high = value(field, item.max)
            parts.append(key <= high if item.max_inclusive else key < high)
    return reduce(and_, parts) if parts else None


def key_order(names: Iterable[str], descending: Iterable[str] = ()) -> list[SortExpr]:
    """Returns the sort order of a table's files: `names` ascending, then the `descending` columns."""
    return [
        *(column(name).sort(ascending=True, nulls_first=False) for name in names),
        *(column(name).sort(ascending=False, nulls_first=False) for name in descending),
    ]


def union(frames: Sequence[DataFrame]) -> DataFrame:
    """Returns the rows of all frames, of which there must be at least one."""
    return joined(frames, DataFrame.union)


def sorted_session(
    *,
    store: ObjectStore | None = None,
    options: dict[str, str] | None = None,
    row_bytes: float = 0.0,
) -> SessionContext:
    """Returns a session whose plans keep the sort order of files.

    `row_bytes` is the average size of a row in the files. It determines the number of rows in a batch.
    """
    runtime = RuntimeEnvBuilder().with_greedy_memory_pool(MEMORY_LIMIT_BYTES)
    rows = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1.0, row_bytes))))
    at_once = {"datafusion.execution.batch_size": str(rows)}
    return open_session(_OPTIONS | at_once | (options or {}), runtime, store)


def open_session(
    options: dict[str, str], runtime: RuntimeEnvBuilder, store: ObjectStore | None
) -> SessionContext:
    """Returns a session with these options, which can read the store's objects."""
    check_not_forked()
    config = SessionConfig()
    for name, value in options.items():
        config = config.set(name, value)
    context = SessionContext(config, runtime)
    if store is not None:
        register(context, store)
    return context


def sorted_file(
    context: SessionContext, file: str | Path, keys: Sequence[str], descending: Sequence[str] = ()
) -> DataFrame:
    """Returns the rows of a file as one sorted stream; `keys` and `descending` are its sort order."""
    order = key_order(keys, descending)
    return context.read_parquet(file_url(file), file_extension="", file_sort_order=[order])


def table_file(
    context: SessionContext, schema: Schema, file: str, descending: Sequence[str] = ()
) -> DataFrame:
    """Returns the rows of a table's file, with the schema's columns, as one sorted stream.

    The file may have been written with other columns, which its name determines. A file in which no key
    occurs twice is also sorted by the columns `descending` after the key. Raises `InvalidData` or
    `ObjectNotFound`, whose messages name the bad file.
    """
    written = written_schema(schema, file)
    try:
        with panics_as_errors():
            frame = sorted_file(context, file, written.key_names, descending)
    except Exception as error:
        raise file_error(file, error) from error
    try:
        check_stored(frame.schema(), schema, file)
    except InvalidData as error:
        raise InvalidData(f"file {file!r}: {error}") from None
    return reshaped(frame, written, schema, views=True)


def file_url(path: str | Path) -> str:
    """Returns a local path as a URL, with special characters escaped; returns a URL unchanged."""
    text = str(path)
    return text if "://" in text else "file://" + quote(os.path.abspath(text))  # noqa: PTH100  # not links


def file_error(file: str, error: Exception) -> DormouseError:
    """Returns the error for a file that cannot be read; its message names the file."""
    text = one_line(error)
    if "not found" in text.lower() or "no such file" in text.lower() or "no files found" in text.lower():
        return ObjectNotFound(f"file {file!r} does not exist")
    return InvalidData(f"file {file!r} cannot be read as Parquet: {text}")


def query_error(
    context: SessionContext, schema: Schema, files: Sequence[str], error: Exception
) -> DormouseError:
    """Returns the error for a failed query.

    It is the error of the first file that cannot be read. If all files can be read, it is `JobFailed`.
    """
    for file in files:
        try:
            rows = table_file(context, schema, file)
            with panics_as_errors():
                for _ in rows.execute_stream():
                    pass
        except DormouseError as found:
            return found
        except Exception as found:
            return file_error(file, found)
    return JobFailed(f"DataFusion failed: {one_line(error)}")


def reshaped(rows: DataFrame, stored: Schema, schema: Schema, *, views: bool = False) -> DataFrame:
    """Returns the rows with the columns of `schema`, converted from those of `stored`, an earlier version.

    `views` is true if texts and bytes in the rows are Arrow views.
    """
    if is_as_stored(stored, schema):
        return rows.select(*map(column, schema.names))
    return rows.select(*(_as_now(*one, views=views) for one in pairs(stored, schema)))


def _as_now(field: Field, column_: Column, before: Field | None, *, views: bool) -> Expr:
    if before is None:
        kind = _VIEWS[field.type] if views and field.type in _VIEWS else arrow_type(field.type)
        # DataFusion has no null literal of lists and structs
        is_null = column_.default is None
        default = literal(None).cast(kind) if is_null else literal(pa.scalar(column_.default, kind))
        return default.alias(field.name)
    found = column(before.name)
    if before.type != field.type:
        return found.cast(arrow_type(field.type)).alias(field.name)
    return found if before.name == field.name else found.alias(field.name)


def numbered(rows: DataFrame, schema: Schema) -> DataFrame:
    """Returns the rows with the id of each column in its metadata, so that written files record the ids."""
    named = zip(schema.names, schema.shape.columns, strict=True)
    kinds = {field.name: arrow_type(field.type) for field in schema.fields}
    return rows.select(*(column(name).alias(name, metadata_of(kinds[name], one)) for name, one in named))
