"""Whether an answer is DuckDB's, row for row and in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

HELD_ROWS_MAX = 5_000_000
BATCH_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it: our rows, the seconds that they took, and the first difference, if any."""

    rows: int
    seconds: float
    difference: str | None

    @property
    def matches(self) -> bool:
        return self.difference is None


def compare(
    ask: Callable[[], pa.RecordBatchReader], db: duckdb.DuckDBPyConnection, statement: str
) -> Comparison:
    """Asks, and then DuckDB, and goes through both answers; the time is that of the first alone."""
    started = time.monotonic()
    reader = ask()
    ours = _Timed(reader, time.monotonic() - started)
    held, rows = [], 0
    while rows < HELD_ROWS_MAX and (batch := next(ours, None)) is not None:
        held.append(batch)
        rows += batch.num_rows
    theirs = db.execute(statement).to_arrow_reader(BATCH_ROWS)
    difference = _names_differ(reader.schema, theirs.schema) or _first_difference(
        chain(held, ours), iter(theirs), reader.schema
    )
    return Comparison(ours.rows, ours.seconds, difference)


class _Timed:
    """Batches, the rows in them, and how long they were waited for."""

    def __init__(self, batches: Iterator[pa.RecordBatch], seconds: float) -> None:
        self._batches = iter(batches)
        self.rows = 0
        self.seconds = seconds

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        started = time.monotonic()
        try:
            batch = next(self._batches)
        finally:
            self.seconds += time.monotonic() - started
        self.rows += batch.num_rows
        return batch


def _names_differ(ours: pa.Schema, theirs: pa.Schema) -> str | None:
    return None if ours.names == theirs.names else f"columns {ours.names}, DuckDB has {theirs.names}"


def _first_difference(
    ours: Iterator[pa.RecordBatch], theirs: Iterator[pa.RecordBatch], schema: pa.Schema
) -> str | None:
    position = 0
    left = right = None
    while True:
        left, right = _more(left, ours), _more(right, theirs)
        if left is None or right is None:
            break
        count = min(left.num_rows, right.num_rows)
        if not left.slice(0, count).equals(right.slice(0, count).cast(schema)):
            return _describe(left, right.cast(schema), count, position)
        left, right, position = left.slice(count), right.slice(count), position + count
    if left is None and right is None:
        return None
    return f"{'more' if right is None else 'fewer'} rows than DuckDB, which has {position:,} of ours"


def _more(batch: pa.RecordBatch | None, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """The batch, or the next one that has rows; None at the end."""
    while batch is None or batch.num_rows == 0:
        batch = next(batches, None)
        if batch is None:
            return None
    return batch


def _describe(left: pa.RecordBatch, right: pa.RecordBatch, count: int, position: int) -> str:
    for row in range(count):
        mine, other = left.slice(row, 1).to_pylist(), right.slice(row, 1).to_pylist()
        if mine != other:
            return f"row {position + row:,} is {mine[0]}, DuckDB has {other[0]}"
    return f"rows {position:,} to {position + count:,} differ"
