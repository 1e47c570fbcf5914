"""The conversion of rows in memory (Arrow data, DataFrames, dicts and lists) to Arrow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from dormouse.errors import InvalidData, one_line
from dormouse.sources.data_files import Files

Rows: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader
INDEX = "__index_level_"
"""The prefix of the columns that pandas makes for an index without a name."""
_FAILED = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError)


def are_paths(data: Any) -> bool:
    """Returns whether the data is given as paths of files."""
    if isinstance(data, Files):
        return True
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str | os.PathLike)


def as_arrow(data: Any, defaults: Mapping[str, Any] = {}) -> Rows | None:  # noqa: PLR0911 one a kind
    """Returns rows as Arrow, or None for data of an unknown kind.

    Takes Arrow data, a dict of columns, a list of dicts, a DataFrame of pandas or Polars, a dataset, or any
    object with the Arrow C stream interface. A dict in a list gets the default of a column that it lacks. An
    index of pandas becomes a column if it has a name. Raises `InvalidData` if a column mixes types.
    """
    if isinstance(data, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return data
    if isinstance(data, Mapping):
        return _of_columns(data)
    if isinstance(data, list | tuple) and data and all(isinstance(row, Mapping) for row in data):
        return _of_dicts(data, defaults)
    if is_of(data, "pandas") and hasattr(data, "columns"):
        return _of_pandas(data)
    if is_of(data, "polars") and hasattr(data, "collect"):
        data = data.collect()
    if is_of(data, "pyarrow") and hasattr(data, "scanner"):
        return data.scanner().to_reader()
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data)
    return None


def without_index(rows: Rows) -> Rows:
    """Returns the rows without the columns of pandas indexes that have no name. A stream is unchanged."""
    if isinstance(rows, pa.RecordBatchReader) or not any(n.startswith(INDEX) for n in rows.schema.names):
        return rows
    return rows.select([name for name in rows.schema.names if not name.startswith(INDEX)])


def is_of(data: Any, package: str) -> bool:
    """Returns whether the data is an object of a package's class, without importing the package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(data).__mro__)


def _of_columns(columns: Mapping[str, Any]) -> pa.Table:
    arrays = [_array(name, values) for name, values in columns.items()]
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise InvalidData(f"the columns of the dict have different lengths: {sorted(lengths)}")
    return pa.table(dict(zip(map(str, columns), arrays, strict=True)))


def _of_dicts(rows: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> pa.Table:
    """Returns the columns of all rows. A row without a column has its default, or null."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table(
        {str(name): _array(name, [row.get(name, defaults.get(name)) for row in rows]) for name in names}
    )


def _array(name: Any, values: Iterable[Any]) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidData(f"column {name!r} of the dict is {values!r}: give a list of values for each column")
    try:
        if hasattr(values, "__arrow_c_stream__"):
            return pa.chunked_array(values)
        return pa.array(values if hasattr(values, "__len__") else list(values))
    except _FAILED as error:
        raise _mixed(name, error) from None


def _of_pandas(frame: Any) -> pa.Table:
    try:
        return without_index(pa.Table.from_pandas(frame))
    except _FAILED as error:
        failed = error
    for number, name in enumerate(frame.columns):
        try:
            pa.array(frame.iloc[:, number], from_pandas=True)
        except _FAILED as error:
            raise _mixed(name, error) from None
    raise InvalidData(f"the DataFrame cannot be read: {one_line(failed)}")


def _mixed(name: Any, error: Exception) -> InvalidData:
    return InvalidData(
        f"column {name!r} has values of several types ({one_line(error)[:200]}): convert them to one type, "
        "e.g. by .astype(str)"
    )
