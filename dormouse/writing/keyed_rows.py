"""What a load brings to a keyed table, as its files have it: with its place, and marks of deletion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_schema, arrow_type
from dormouse.data.newest import without_values
from dormouse.errors import InvalidData
from dormouse.model.keyed import HIDDEN, given_schema, stored_schema
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Field, Schema
from dormouse.model.types import TIMESTAMP
from dormouse.sources.source import Source, open_source

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
        names = [*(name for name in whole.names if name not in HIDDEN), *HIDDEN, ROW]
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
