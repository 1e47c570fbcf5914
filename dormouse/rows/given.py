"""Rows that a DataFrame or a table holds, as the dicts that a change takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import pyarrow as pa

from dormouse.sources.given_rows import as_arrow, is_of

_ROWS_AT_ONCE = 10_000


def as_dicts(rows: Any) -> Any:
    """Returns the rows of a DataFrame, or of what speaks Arrow, as dicts; all else as it is.

    Rows of a reader can be read once, those of others again. `InvalidData` for a column of several types.
    """
    if rows is None or isinstance(rows, Mapping | str | bytes | list | tuple | Iterator):
        return rows
    found = as_arrow(rows)
    if found is None:
        return rows
    if isinstance(found, pa.RecordBatchReader) and is_of(rows, "polars"):
        found = found.read_all()
    if isinstance(found, pa.RecordBatchReader):
        return (row for batch in found for row in batch.to_pylist())
    return ArrowRows(found if isinstance(found, pa.Table) else pa.Table.from_batches([found]))


class ArrowRows(Sequence[Mapping[str, Any]]):
    """The rows of an Arrow table, each a dict that is made when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._table.slice(numbers, 1).to_pylist()[0]
        return ArrowRows(self._table.take(pa.array(numbers, pa.int64())))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._table.to_batches(_ROWS_AT_ONCE):
            yield from batch.to_pylist()
