"""The inner loop of compaction of keyed tables: a streaming merge that keeps the newest row of each key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame, Expr, SessionContext, functions, literal

from dormouse.data.arrow_schema import arrow_schema, arrow_type, exact
from dormouse.data.datafusion_session import (
    column,
    in_region,
    key_order,
    panics_as_errors,
    query_error,
    sorted_session,
    table_file,
    union,
)
from dormouse.data.newest import Marks, first_of_keys, without_values
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError, InvalidData, JobFailed
from dormouse.model.ahead import ahead
from dormouse.model.region import Region
from dormouse.model.schema import Field, Schema
from dormouse.model.table import (
    DELETED_AT,
    HIDDEN_COLUMNS,
    TableProperties,
    given_schema,
    newest_first,
    stored_schema,
)
from dormouse.model.types import TIMESTAMP
from dormouse.objects.store import ObjectStore
from dormouse.sources.source import Source, open_source
from dormouse.writing.parquet_file import FileFacts, FileShape, file_facts, write_groups

if TYPE_CHECKING:
    from dormouse.objects.store import ObjectStore

# What a load brings to a keyed table, as its files have it: with its place, and marks of deletion.

ROW = "__row"
"""The place of a row in its load, until it is written."""

TASKS_MAX = 1 << 20
"""How many places each load has: by so much the database's sequence of loads goes on."""


@dataclass(frozen=True)
class KeyedRows:
    """The rows of one load; `deletes` is the column of the data that marks rows to be deleted.

    All have one `sequence`; what is marked is so since `taken_at`.
    """

    schema: Schema
    properties: TableProperties
    deletes: str | None
    sequence: int
    taken_at: datetime

    def of_task(self, number: int) -> KeyedRows:
        """Those of one of the load's tasks, whose rows come after those of the ones before it."""
        return replace(self, sequence=self.sequence + min(number, TASKS_MAX - 1))

    @property
    def given(self) -> Schema:
        """The columns that the data has."""
        return given_schema(self.schema, self.properties, self.deletes)

    def opened(self, data: Any) -> Source:
        """Data as `open_source` takes it."""
        found = open_source(data, self.given)
        return replace(found, batches=self.stored(found.batches))

    def stored(self, batches: Iterable[pa.RecordBatch], first_row: int = 0) -> Iterator[pa.RecordBatch]:
        """Batches that have the given columns, as they are stored, with the numbers of their rows last."""
        whole = arrow_schema(stored_schema(self.schema, self.properties))
        names = [*(name for name in whole.names if name not in HIDDEN_COLUMNS), *HIDDEN_COLUMNS, ROW]
        for batch in batches:
            yield pa.RecordBatch.from_arrays(self._columns(batch, first_row), names=names)
            first_row += batch.num_rows

    def _columns(self, batch: pa.RecordBatch, first_row: int) -> list[pa.Array]:
        marked = None if self.deletes is None else batch.column(self.deletes)
        there = None if marked is None else pc.invert(marked)
        sequence = pa.repeat(pa.scalar(self.sequence, pa.int64()), batch.num_rows)
        return [
            *(batch.column(field.name) for field in self.schema.row_keys),
            *(self._value(batch.column(f.name), f, there, first_row) for f in self.schema.values),
            sequence,
            self._deleted_at(marked, batch.num_rows),
            pa.array(np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)),
        ]

    def _value(self, column: pa.Array, field: Field, there: pa.Array | None, first_row: int) -> pa.Array:
        if field.name == self.properties.newest_by:
            return _comparable(column, field, first_row) if field.type.is_floating else column
        if there is None:
            return column
        if column.null_count and not field.nullable:
            missing = pc.index(pc.and_(pc.is_null(column), there), True).as_py()
            if missing >= 0:
                raise InvalidData(
                    f"column {field.name!r} must not be null but where a row is to be deleted, and is in row "
                    f"{missing + first_row:,} (counted from 0)"
                )
        return column if there.false_count == 0 else without_values(column, there)

    def _deleted_at(self, marked: pa.Array | None, rows: int) -> pa.Array:
        kind = arrow_type(TIMESTAMP)
        if marked is None:
            return pa.nulls(rows, kind)
        at = pa.repeat(pa.scalar(self.taken_at, kind), rows)
        return pc.if_else(marked, at, pa.scalar(None, kind))


def _comparable(column: pa.Array, field: Field, first_row: int) -> pa.Array:
    """Without -0.0, so that both zeros are equal; `InvalidData` for NaN, which is neither newer nor older."""
    odd = pc.index(pc.is_nan(column), True).as_py()
    if odd >= 0:
        raise InvalidData(
            f"column {field.name!r} tells which row is newer, and is NaN in row {odd + first_row:,} "
            "(counted from 0)"
        )
    return pc.add(column, pa.scalar(0, column.type))


BATCHES_AHEAD = 16
_OPTIONS = {"datafusion.execution.parquet.schema_force_view_types": "false"}


@dataclass(frozen=True, slots=True)
class KeyedMerge:
    """How rows of a keyed table are merged.

    Ages are measured from `now_ms`. `forgets_marks`: no older row of a marked key is elsewhere, or can still
    come. With `newest_by` one can always; marks then go after `deletion_marks_seconds`.
    """

    schema: Schema
    properties: TableProperties
    now_ms: int
    forgets_marks: bool

    @property
    def stored(self) -> Schema:
        return stored_schema(self.schema, self.properties)

    def marked(self, frame: DataFrame, remains: Expr | None, unmarked: Expr | None) -> DataFrame:
        """The rows of a file that meet `remains`, with a mark of deletion where one is not `unmarked`."""
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
        """Of sorted rows those that stay: the first of each key, without values where it is a mark."""
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
    """Merges sorted files of a keyed table into one, as `merge_sorted` does those of other tables.

    Each of the inputs has a key once, and so has the output.
    """
    if not inputs:
        return FileFacts(0)
    schema, descending = merge.stored, newest_first(merge.properties)
    context = sorted_session(store=store, options=_OPTIONS, row_bytes=row_bytes)
    files = [table_file(context, schema, file, descending) for file in inputs]
    counted = Marks()
    try:
        with panics_as_errors():
            left = [merge.marked(*one) for one in zip_longest(files, remains, unmarked)]
            rows = counted.counted(merge.kept(_sorted_rows(context, left, schema, region, descending)))
            with closing(ahead(rows, BATCHES_AHEAD)) as made:
                return _written(output_path, made, merge, counted)
    except InvalidData as error:
        raise InvalidData(f"{error} in the merge of {', '.join(map(repr, inputs))}") from None
    except DormouseError:
        raise
    except Exception as error:
        raise query_error(context, schema, inputs, error) from error


def _sorted_rows(
    context: SessionContext,
    files: list[DataFrame],
    schema: Schema,
    region: Region | None,
    descending: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    inside = None if region is None else in_region(schema, region)
    rows = union(files) if inside is None else union(files).filter(inside)
    whole = arrow_schema(schema)
    merged = rows.sort(*key_order(schema.row_key_names, descending))
    check_sorted_inputs(merged)
    for batch in merged.execute_stream():
        yield exact(batch.to_pyarrow(), whole)


def check_sorted_inputs(rows: DataFrame) -> None:
    """Refuses a plan that sorts what is sorted: it would hold all of it."""
    plan = rows.execution_plan().display_indent()
    if "SortExec" in plan.replace("SortPreservingMergeExec", ""):
        raise JobFailed("DataFusion would sort rows that are sorted; nothing was written")


def _written(
    output_path: Path, batches: Iterator[pa.RecordBatch], merge: KeyedMerge, counted: Marks
) -> FileFacts:
    """The batches as one file; none without rows. Nothing is left there on a failure."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return FileFacts(0)
    schema, properties = merge.stored, merge.properties

    def shape_of(sample: pa.Table) -> FileShape:
        return FileShape.like(sample, schema, properties)

    try:
        write_groups(output_path, _with(first, filled), schema, properties, shape_of)
        facts = file_facts(output_path, schema)
        if facts.row_count != counted.rows:
            raise JobFailed(f"a file was to have {counted.rows:,} rows, but has {facts.row_count:,}")
    except BaseException:
        output_path.unlink(missing_ok=True)
        raise
    return replace(facts, marks=counted.marks)


def _with(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others
