"""Of rows of equal key the first, which is the newest: vectorised, over a stream in key order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.model.keyed import DELETED_AT


class FirstOfKeys:
    """Batches in key order go in; what comes out are the first rows of their keys. `names` are the key's."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._last: tuple[Any, ...] | None = None

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Those of one batch, which comes after all that came before."""
        if not batch.num_rows:
            return batch
        keys = [batch.column(name) for name in self._names]
        is_new = self._last is None or tuple(key[0].as_py() for key in keys) != self._last
        self._last = tuple(key[-1].as_py() for key in keys)
        differs = reduce(pc.or_, (pc.not_equal(key.slice(1), key.slice(0, len(key) - 1)) for key in keys))
        # most batches stay as they are, which costs little to see
        if is_new and differs.true_count == len(differs):
            return batch
        return batch.filter(pa.concat_arrays([pa.array([is_new]), differs]))


def first_of_keys(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The first row of each key in batches that are in key order."""
    return map(FirstOfKeys(names).of, batches)


def without_values(column: pa.Array, there: pa.Array) -> pa.Array:
    """A column with null where a row is a mark, and not `there`.

    A null is copied, as one that Arrow makes of a struct may have parts that must not be null, and are.
    """
    nothing = pa.array([None], column.type)
    numbers = pa.array(np.arange(len(column)))
    kept = pc.and_(there, pc.is_valid(column))
    return pa.concat_arrays([column, nothing]).take(
        pc.if_else(kept, numbers, pa.scalar(len(column), pa.int64()))
    )


@dataclass(slots=True)
class Marks:
    """How many rows passed, and how many of them are marks of deletion."""

    rows: int = 0
    marks: int = 0

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches, which have the columns of a keyed table's files."""
        for batch in batches:
            self.rows += batch.num_rows
            self.marks += batch.num_rows - batch.column(DELETED_AT).null_count
            yield batch
