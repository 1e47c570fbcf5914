"""The inner loop of compaction: a streaming merge of sorted Parquet files into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from datafusion import DataFrame, Expr, SessionContext

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.datafusion_session import (
    in_region,
    key_order,
    panics_as_errors,
    query_error,
    sorted_session,
    table_file,
    union,
)
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError, InvalidData
from dormouse.model.loops import portions
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.writing.parquet_file import SAMPLE_ROWS, FileFacts, FileShape, write_sorted, writer_options

if TYPE_CHECKING:
    from dormouse.objects.store import ObjectStore

ROW_GROUPS_MAX = 32_000
"""Parquet numbers them with 15 bits, and ranges of a job become one file."""
_TELLING_ROWS, _TELLING_BYTES = 1_000, 1 << 20
"""Of a row group with less, what is beside its values may be most of its bytes."""


def merge_sorted(
    inputs: Sequence[str],
    schema: Schema,
    output_path: Path,
    *,
    region: Region | None = None,
    properties: TableProperties | None = None,
    now_ms: int,
    store: ObjectStore | None = None,
    remains: Sequence[Expr | None] = (),
    row_bytes: float = 0.0,
) -> FileFacts:
    """Merge sorted Parquet files (paths or `store.uri(name)`) into one, and tell what is in it.

    Rows outside `region` are left out (files may also hold other partitions' rows), and those that do not
    meet the expression that `remains` has for their file, if there is one; then the table's `filter`
    and `aggregate` apply, with ages measured from `now_ms`. Streams: memory grows with the number of files,
    not with their size; of rows of many `row_bytes` fewer are held at once. With no rows left no file is
    written, and `row_count` is 0. The inputs must be in key order, which a sample of the output checks.
    Raises `InvalidData` or `ObjectNotFound` that names the file, `JobFailed` for anything else (a full disk,
    memory); then nothing is left at `output_path`.
    """
    if not inputs:
        return FileFacts(0)
    properties = properties or TableProperties()
    context = sorted_session(store=store, options=writer_options(), row_bytes=row_bytes)
    files = [table_file(context, schema, file) for file in inputs]
    left = [file if one is None else file.filter(one) for file, one in zip_longest(files, remains)]
    try:
        with panics_as_errors():
            rows = merged_rows(context, left, schema, region=region, properties=properties, now_ms=now_ms)
            shape = FileShape.like(_sample(files[0], schema, properties.row_group_bytes), schema, properties)
            groups = chain.from_iterable(_row_groups(file, store) for file in inputs)
            shape = replace(shape, group_rows=_group_rows(shape, groups, properties.row_group_bytes))
            return write_sorted(rows, schema, output_path, shape, _constant(schema, region))
    except InvalidData as error:
        raise InvalidData(f"{error} in the merge of {', '.join(map(repr, inputs))}") from None
    except DormouseError:
        raise
    except Exception as error:
        too_large = Transform.parse(schema, properties).overflow(str(error))
        raise too_large or query_error(context, schema, inputs, error) from error


def merged_rows(
    context: SessionContext,
    files: list[DataFrame],
    schema: Schema,
    *,
    region: Region | None,
    properties: TableProperties,
    now_ms: int,
) -> DataFrame:
    """The rows of the files in the region, filtered and aggregated, in key order."""
    inside = None if region is None else in_region(schema, region)
    rows = union(files) if inside is None else union(files).filter(inside)
    found = Transform.parse(schema, properties).of(rows, context, now_ms)
    return found.sort(*key_order(schema.key_names))


def _constant(schema: Schema, region: Region | None) -> list[str]:
    """The row keys of which a region has one value."""
    found = region or Region()
    return [field.name for field in schema.row_keys if found.range(field.name).has_one_value(field)]


def _sample(file: DataFrame, schema: Schema, byte_count: int) -> pa.Table:
    """The first rows of a file: a few, and not many more bytes than these."""
    batches = (batch.to_pyarrow() for batch in file.limit(SAMPLE_ROWS).execute_stream())
    found = next(portions(batches, attrgetter("nbytes"), byte_count), [])
    fields = [pa.field(field.name, arrow_type(field.type)) for field in schema.fields]
    return pa.Table.from_batches(found, None if found else pa.schema(fields)).cast(pa.schema(fields))


def _group_rows(like_first: FileShape, groups: Iterator[tuple[int, int]], byte_count: int) -> int:
    """Rows of each row group: few where any of the inputs' rows are wide, but no more groups than may be.

    The writer makes all of so many rows, and those that come later may be wider than the first ones.
    """
    group_rows, total = like_first.group_rows, 0
    for rows, size in groups:
        total += rows
        if rows >= _TELLING_ROWS or size >= min(byte_count, _TELLING_BYTES):
            group_rows = min(group_rows, byte_count * rows // max(size, 1))
    return max(group_rows, -(-total // ROW_GROUPS_MAX), 1)


def _row_groups(file: str, store: ObjectStore | None) -> Iterator[tuple[int, int]]:
    """The rows of each row group of an input that DataFusion has opened, and their bytes before the codec."""
    name = file if store is None else file.removeprefix(f"{store.url}/")
    if store is None or name == file:
        metadata = pq.read_metadata(file)
    else:
        with store.reader(name) as source:
            metadata = pq.read_metadata(source)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        yield group.num_rows, group.total_byte_size
