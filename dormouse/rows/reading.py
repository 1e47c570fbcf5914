"""The reader of a row table's files.

It streams the rows of a version, and looks up versions of rows by ids.
"""

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
    """A reader of the files of one row table. `columns` in its methods are the columns of some version."""

    context: Callable[[], TableContext]

    def current(self, version: int, columns: Sequence[Column]) -> pa.RecordBatchReader:
        """Returns the rows as of a version, sorted by id: ROW_ID, ROW_VERSION and the columns."""
        schema = _schema(columns, deleted=False)
        batches = self._versions(None, Range(max=version, max_inclusive=True), columns)
        kept = (_without_deleted(batch, schema) for batch in last_of_keys(batches, [ROW_ID]))
        return pa.RecordBatchReader.from_batches(schema, (batch for batch in kept if batch.num_rows))

    def changed(self, after: int, till: int, columns: Sequence[Column], ranges: Ints) -> pa.RecordBatchReader:
        """Returns all versions of rows after version `after` and up to `till`, sorted by row id.

        The result includes versions that delete a row. `ranges` is an array of (first id, last id) pairs,
        which must cover all rows that changed in between.
        """
        schema = _schema(columns, deleted=True)
        wanted = spans(ranges[:, 0], ranges[:, 1], SPANS_MAX)
        between = Range(after, till, min_inclusive=False, max_inclusive=True)
        found = self._versions(_ranges(wanted), between, columns) if wanted and till > after else iter(())
        return pa.RecordBatchReader.from_batches(schema, (batch for batch in found if batch.num_rows))

    def rows(self, ids: Ints, versions: Ints, columns: Sequence[Column]) -> pa.Table:
        """Returns the given version of each given row, sorted by row id. Skips versions that do not exist.

        `ids` must ascend. The result includes versions that delete a row.
        """
        schema = _schema(columns, deleted=True)
        if not len(ids):
            return schema.empty_table()
        between = Range(int(versions.min()), int(versions.max()), max_inclusive=True)
        # a single row is looked up in its page of the file: planning a scan would take longer
        wanted: Any = int(ids[0]) if len(ids) == 1 else _ranges(spans(ids, ids, SPANS_MAX))
        matches = []
        for batch in self._versions(wanted, between if len(ids) > 1 else None, columns):
            at = np.searchsorted(ids, batch.column(0).to_numpy())
            at = np.minimum(at, len(ids) - 1)
            is_match = (ids[at] == batch.column(0).to_numpy()) & (versions[at] == batch.column(1).to_numpy())
            matches.append(batch.filter(pa.array(is_match)))
        return pa.Table.from_batches(matches, schema)

    def _versions(
        self, wanted: int | list[Range] | None, versions: Range | None, columns: Sequence[Column]
    ) -> Iterator[pa.RecordBatch]:
        """Yields versions of rows, sorted by id and version, with the names of `columns`."""
        conditions = {ROW_ID: wanted, ROW_VERSION: versions}
        where: dict[str, Any] = {name: keys for name, keys in conditions.items() if keys is not None}
        schema = _schema(columns, deleted=True)
        # finds columns by id, because a new column may have the name of one that was dropped or retyped
        for batch in query(self.context(), where, partial(_stored_names, columns=columns)):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _ranges(wanted: Sequence[tuple[int, int]]) -> list[Range]:
    return [Range(first, last, max_inclusive=True) for first, last in wanted]


def _stored_names(schema: Schema, columns: Sequence[Column]) -> list[str]:
    """Returns the names that columns have in a schema of the table. Finds them by their column ids.

    Raises `SchemaMoved` if the schema lacks some of the columns.
    """
    names = {column.column_id: name for name, column in zip(schema.names, schema.shape.columns, strict=True)}
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
