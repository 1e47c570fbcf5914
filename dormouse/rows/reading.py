"""The rows of a row table as of a version, streamed; versions of rows by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.newest import last_of_keys
from dormouse.model.region import Range
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.table import ROW_DELETED, ROW_ID, ROW_VERSION
from dormouse.reading.executor import query
from dormouse.rows.batches import Ints, spans
from dormouse.rows.columns import Column
from dormouse.rows.values import field_of
from dormouse.state.context import TableContext

SPANS_MAX = 500
_KEYS = (ROW_ID, ROW_VERSION, ROW_DELETED)


@dataclass(frozen=True)
class RowReader:
    """Reads the files of one row table; `columns` in what follows are those of some version."""

    context: Callable[[], TableContext]

    def current(self, version: int, columns: Sequence[Column]) -> pa.RecordBatchReader:
        """The rows as of a version, by ids: ROW_ID, ROW_VERSION and the columns."""
        schema = _schema(columns, deleted=False)
        batches = self._versions(None, Range(max=version, max_inclusive=True), columns)
        kept = (_without_deleted(batch, schema) for batch in last_of_keys(batches, [ROW_ID]))
        return pa.RecordBatchReader.from_batches(schema, (batch for batch in kept if batch.num_rows))

    def changed(self, after: int, till: int, columns: Sequence[Column], ranges: Ints) -> pa.RecordBatchReader:
        """Every version of rows after a version and up to another; `ranges` have all rows that changed."""
        schema = _schema(columns, deleted=True)
        wanted = spans(ranges[:, 0], ranges[:, 1], SPANS_MAX)
        between = Range(after, till, min_inclusive=False, max_inclusive=True)
        found = self._versions(_ranges(wanted), between, columns) if wanted and till > after else iter(())
        return pa.RecordBatchReader.from_batches(schema, (batch for batch in found if batch.num_rows))

    def rows(self, ids: Ints, versions: Ints, columns: Sequence[Column]) -> pa.Table:
        """Those versions of rows that there are, by ids, which ascend: also of deleted rows."""
        schema = _schema(columns, deleted=True)
        if not len(ids):
            return schema.empty_table()
        between = Range(int(versions.min()), int(versions.max()), max_inclusive=True)
        # a single row is looked up in its pages, which the engine's plan costs more than
        wanted: Any = int(ids[0]) if len(ids) == 1 else _ranges(spans(ids, ids, SPANS_MAX))
        found = []
        for batch in self._versions(wanted, between if len(ids) > 1 else None, columns):
            at = np.searchsorted(ids, batch.column(0).to_numpy())
            at = np.minimum(at, len(ids) - 1)
            is_it = (ids[at] == batch.column(0).to_numpy()) & (versions[at] == batch.column(1).to_numpy())
            found.append(batch.filter(pa.array(is_it)))
        return pa.Table.from_batches(found, schema)

    def _versions(
        self, wanted: int | list[Range] | None, versions: Range | None, columns: Sequence[Column]
    ) -> Iterator[pa.RecordBatch]:
        """Versions of rows in the order of their ids and versions, called as the columns say."""
        asked = {ROW_ID: wanted, ROW_VERSION: versions}
        where: dict[str, Any] = {name: one for name, one in asked.items() if one is not None}
        schema = _schema(columns, deleted=True)
        # by ids: another may have the name of one that was dropped or retyped
        for batch in query(self.context(), where, partial(_stored_names, columns=columns)):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _ranges(wanted: Sequence[tuple[int, int]]) -> list[Range]:
    return [Range(first, last, max_inclusive=True) for first, last in wanted]


def _stored_names(schema: Schema, columns: Sequence[Column]) -> list[str]:
    """What the columns are called in a schema of the table; `SchemaMoved` when it is of before they were."""
    names = {one.column_id: name for name, one in zip(schema.names, schema.shape.columns, strict=True)}
    try:
        return [*_KEYS, *(names[column.column_id or 0] for column in columns)]
    except KeyError:
        raise SchemaMoved("columns were added to the table") from None


def _schema(columns: Sequence[Column], *, deleted: bool) -> pa.Schema:
    fields = [pa.field(ROW_ID, pa.int64(), nullable=False), pa.field(ROW_VERSION, pa.int64(), nullable=False)]
    if deleted:
        fields.append(pa.field(ROW_DELETED, pa.bool_(), nullable=False))
    return pa.schema([*fields, *(field_of(column.name, column.type) for column in columns)])


def _without_deleted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    lives = pc.invert(batch.column(2))
    columns = [column for number, column in enumerate(batch.columns) if number != 2]
    return pa.RecordBatch.from_arrays(columns, schema=schema).filter(lives)
