"""The inner loop of compaction: a streaming merge of sorted Parquet files into one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datafusion import DataFrame, Expr, SessionContext, functions, literal

from dormouse.data.arrow_schema import arrow_schema, arrow_type, exact
from dormouse.data.datafusion_session import (
    column,
    in_region,
    key_order,
    query_error,
    sorted_session,
    table_file,
    union,
)
from dormouse.data.newest import first_of_keys, without_values
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError, InvalidData, JobFailed, panics_as_errors
from dormouse.model.loops import ahead, portions
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.model.table import DELETED_AT, TableProperties, newest_first, stored_schema
from dormouse.writing.parquet_file import (
    SAMPLE_ROWS,
    FileFacts,
    FileShape,
    write_newest,
    write_sorted,
    writer_options,
)

if TYPE_CHECKING:
    from dormouse.objects.store import ObjectStore

BATCHES_AHEAD = 16
_OPTIONS = {"datafusion.execution.parquet.schema_force_view_types": "false"}
ROW_GROUPS_MAX = 32_000
"""The most row groups of one file: Parquet numbers them with 15 bits."""
_TELLING_ROWS, _TELLING_BYTES = 1_000, 1 << 20
"""The rows or bytes from which a row group shows the size of a row. Smaller ones are mostly overhead."""


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
    """Merges sorted Parquet files (paths or `store.uri(name)`) into one, and returns its facts.

    - Drops rows outside `region`, as files may also have rows of other partitions.
    - Drops rows that do not meet the expression of their file in `remains`; None keeps all rows of a file.
    - Applies the table's `filter` and `aggregate`, with ages measured from `now_ms` (milliseconds).

    It streams: memory grows with the number of files, not with their size. The larger `row_bytes`, the fewer
    rows are in memory at once. When no rows are left, it writes no file and `row_count` is 0. The inputs must
    be in key order; the row keys of the output are checked.

    Raises `InvalidData` or `ObjectNotFound` with the name of the file, and `JobFailed` for other failures,
    such as a full disk; then nothing is left at `output_path`.
    """
    if not inputs:
        return FileFacts(0)
    properties = properties or TableProperties()
    context = sorted_session(store=store, options=writer_options(), row_bytes=row_bytes)
    files = [table_file(context, schema, file) for file in inputs]
    left = [file if one is None else file.filter(one) for file, one in zip_longest(files, remains)]
    transform = Transform.parse(schema, properties)
    with _named_failures(context, schema, inputs, transform):
        rows = merged_rows(context, left, transform, region=region, now_ms=now_ms)
        shape = FileShape.like(_sample(files[0], schema, properties.row_group_bytes), schema, properties)
        groups = chain.from_iterable(_row_groups(file, store) for file in inputs)
        shape = replace(shape, group_rows=_group_rows(shape, groups, properties.row_group_bytes))
        # the row keys that have a single value in the region
        within = region or Region()
        constant = [key.name for key in schema.row_keys if within.range(key.name).has_one_value(key)]
        return write_sorted(rows, schema, output_path, shape, constant)


def merged_rows(
    context: SessionContext,
    files: Sequence[DataFrame],
    transform: Transform,
    *,
    region: Region | None,
    now_ms: int,
) -> DataFrame:
    """Returns the rows of the files in the region, filtered and aggregated, in key order."""
    schema = transform.schema
    found = transform.of(_inside(files, schema, region), context, now_ms)
    return found.sort(*key_order(schema.key_names))


@contextmanager
def _named_failures(
    context: SessionContext, schema: Schema, inputs: Sequence[str], transform: Transform
) -> Iterator[None]:
    """Converts failures of a merge into errors that name the file or the sum that caused them."""
    try:
        with panics_as_errors():
            yield
    except InvalidData as error:
        raise InvalidData(f"{error} in the merge of {', '.join(map(repr, inputs))}") from None
    except DormouseError:
        raise
    except Exception as error:
        too_large = transform.overflow(str(error))
        raise too_large or query_error(context, schema, inputs, error) from error


def _inside(files: Sequence[DataFrame], schema: Schema, region: Region | None) -> DataFrame:
    """Returns the rows of the files that lie in the region."""
    inside = None if region is None else in_region(schema, region)
    return union(files) if inside is None else union(files).filter(inside)


def _sample(file: DataFrame, schema: Schema, byte_count: int) -> pa.Table:
    """Returns the first rows of a file: at most SAMPLE_ROWS, and about `byte_count` bytes."""
    batches = (batch.to_pyarrow() for batch in file.limit(SAMPLE_ROWS).execute_stream())
    found = next(portions(batches, attrgetter("nbytes"), byte_count), [])
    fields = [pa.field(field.name, arrow_type(field.type)) for field in schema.fields]
    return pa.Table.from_batches(found, None if found else pa.schema(fields)).cast(pa.schema(fields))


def _group_rows(like_first: FileShape, groups: Iterator[tuple[int, int]], byte_count: int) -> int:
    """Returns the number of rows of each row group of the output, so that a group has `byte_count` bytes.

    `groups` has the (rows, bytes) of the inputs' row groups. The widest of them decide, because later rows
    may be wider than the sample from which `like_first` was made. There are at most `ROW_GROUPS_MAX` groups.
    """
    group_rows, total = like_first.group_rows, 0
    for rows, size in groups:
        total += rows
        if rows >= _TELLING_ROWS or size >= min(byte_count, _TELLING_BYTES):
            group_rows = min(group_rows, byte_count * rows // max(size, 1))
    return max(group_rows, -(-total // ROW_GROUPS_MAX), 1)


def _row_groups(file: str, store: ObjectStore | None) -> Iterator[tuple[int, int]]:
    """Yields (rows, uncompressed bytes) of each row group of an input."""
    name = file if store is None else file.removeprefix(f"{store.url}/")
    if store is None or name == file:
        metadata = pq.read_metadata(file)
    else:
        with store.reader(name) as source:
            metadata = pq.read_metadata(source)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        yield group.num_rows, group.total_byte_size


# Merges of keyed tables, which keep each key's newest row, and the marks of deletion that are still needed.


@dataclass(frozen=True, slots=True)
class KeyedMerge:
    """The rules of a merge of a keyed table. Ages are measured from `now_ms`.

    With `forgets_marks`, marks of deletion may be dropped, because no older row of a marked key is in another
    file or can still be loaded. With `newest_by`, a later load can always have an older row; then only marks
    older than `deletion_marks_seconds` are dropped.
    """

    schema: Schema
    properties: TableProperties
    now_ms: int
    forgets_marks: bool

    @property
    def stored(self) -> Schema:
        return stored_schema(self.schema, self.properties)

    def marked(self, frame: DataFrame, remains: Expr | None, unmarked: Expr | None) -> DataFrame:
        """Returns the rows of a file that meet `remains`.

        Of these, turns rows into marks of deletion if they do not meet `unmarked`, or if the table's filter
        hides them by age.
        """
        frame = frame if remains is None else frame.filter(remains)
        gone = None if unmarked is None else ~unmarked
        young = Transform.parse(self.schema, self.properties).young_sql(self.now_ms)
        if young is not None:
            old = ~functions.coalesce(frame.parse_sql_expr(young), literal(False))
            gone = old if gone is None else gone | old
        if gone is None:
            return frame
        now = literal(pa.scalar(self._now, arrow_schema(self.stored).field(DELETED_AT).type))
        at = functions.coalesce(column(DELETED_AT), functions.when(gone, now).end()).alias(DELETED_AT)
        return frame.select(*(at if name == DELETED_AT else column(name) for name in self.stored.names))

    def kept(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the first row of each key. Drops marks of deletion if allowed, and the values of others."""
        for batch in first_of_keys(batches, self.schema.row_key_names):
            deleted_at = batch.column(DELETED_AT)
            if deleted_at.null_count == batch.num_rows:
                yield batch
                continue
            left = batch.filter(self._stays(deleted_at)) if self.forgets_marks else batch
            yield self._without_values(left)

    @property
    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.now_ms / 1_000, UTC)

    def _stays(self, deleted_at: pa.Array) -> pa.Array:
        there = pc.is_null(deleted_at)
        if self.properties.newest_by is None:
            return there
        seconds = self.properties.deletion_marks_seconds
        if seconds is None:
            return pc.or_(there, pc.is_valid(deleted_at))
        since = pa.scalar(self._now - timedelta(seconds=seconds), deleted_at.type)
        return pc.or_(there, pc.fill_null(pc.greater(deleted_at, since), False))

    def _without_values(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        there = pc.is_null(batch.column(DELETED_AT))
        values = {f.name for f in self.schema.values} - {self.properties.newest_by}
        columns = [
            without_values(column, there) if name in values else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def merge_newest(
    inputs: Sequence[str],
    merge: KeyedMerge,
    output_path: Path,
    *,
    region: Region | None = None,
    store: ObjectStore | None = None,
    remains: Sequence[Expr | None] = (),
    unmarked: Sequence[Expr | None] = (),
    row_bytes: float = 0.0,
) -> FileFacts:
    """Merges sorted files of a keyed table into one file with the newest row of each key.

    Each input has each key at most once. `remains` and `unmarked` have one expression, or None, for each
    input; see `KeyedMerge.marked`. See `merge_sorted` for the other parameters.
    """
    if not inputs:
        return FileFacts(0)
    schema, descending = merge.stored, newest_first(merge.properties)
    context = sorted_session(store=store, options=_OPTIONS, row_bytes=row_bytes)
    files = [table_file(context, schema, file, descending) for file in inputs]
    with _named_failures(context, schema, inputs, Transform(merge.schema)):
        left = [merge.marked(*one) for one in zip_longest(files, remains, unmarked)]
        ordered = _inside(left, schema, region).sort(*key_order(schema.row_key_names, descending))
        check_sorted_inputs(ordered)
        batches = (exact(batch.to_pyarrow(), arrow_schema(schema)) for batch in ordered.execute_stream())
        with closing(ahead(merge.kept(batches), BATCHES_AHEAD)) as made:
            filled = (batch for batch in made if batch.num_rows)
            if (first := next(filled, None)) is None:
                return FileFacts(0)
            shape_of = partial(FileShape.like, schema=schema, properties=merge.properties)
            try:
                return write_newest(output_path, chain([first], filled), schema, merge.properties, shape_of)
            except BaseException:
                output_path.unlink(missing_ok=True)
                raise


def check_sorted_inputs(rows: DataFrame) -> None:
    """Raises `JobFailed` if DataFusion's plan sorts the rows again, which would need too much memory."""
    plan = rows.execution_plan().display_indent()
    if "SortExec" in plan.replace("SortPreservingMergeExec", ""):
        raise JobFailed("DataFusion would sort rows that are sorted; nothing was written")
