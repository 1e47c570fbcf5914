"""Deletions of rows that no condition describes: each lists distinct rows, in a file in the database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import conform
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.errors import InvalidQuery
from dormouse.model.json_values import json_value
from dormouse.model.region import Range
from dormouse.model.schema import Schema
from dormouse.model.stored_conditions import ListedRows
from dormouse.model.table import is_keyed
from dormouse.reading.row_search import comparable
from dormouse.reading.row_sets import content_name
from dormouse.reading.table_view import key_bounds
from dormouse.reading.where import condition_of, question
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import NewDeletion, RowsContent
from dormouse.writing.deleting import asked_to_delete

ROWS_MAX = 1_000_000
"""The most rows that one deletion lists."""
BYTES_MAX = 32 * 1024 * 1024
"""The bytes of rows in memory from which a deletion lists no further ones."""
SORTED_BYTES = 64 * 1024 * 1024
FEW_BYTES_MAX = 1_024
"""The most bytes of rows that stand in the condition itself, which comes with each plan."""
GROUP_ROWS = 32_768
"""The rows of a group of the file, of which DuckDB reads those near the keys of a query."""
_PIECE_ROWS = 65_536
_NUMBER = "number"


def deletions_of_rows(context: TableContext, batches: Iterable[pa.RecordBatch]) -> list[NewDeletion]:
    """Returns deletions of the rows whose columns have, together, the values of a row of `batches`.

    The batches have the same columns of the table, in any order of rows: all row keys and sort keys, and any
    others. Values are equal as by SQL's IS NOT DISTINCT FROM. Sorts the rows in bounded memory. Each deletion
    lists at most `ROWS_MAX` of them, with near keys. Returns no deletion without rows. Raises:

    - `InvalidQuery` for a table that keeps one row of each key, and for batches that lack a key;
    - `InvalidData` for values that do not fit the columns.
    """
    if is_keyed(context.properties):
        raise InvalidQuery(
            f"table {context.table.name!r} keeps one row of each key: delete its rows by keys or by marks"
        )
    return [_deletion(context, rows) for rows in _portions(_sorted(context, batches))]


def _sorted(context: TableContext, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yields the rows in the order of their keys."""
    given = iter(batches)
    first = next(given, None)
    if first is None:
        return
    part = _part(context, first.schema.names)
    with LeafSorter(part, 1, by_leaf=False, memory_bytes=SORTED_BYTES) as sorter:
        for batch in (first, *given):
            rows = conform(batch, part)
            sorter.add(rows, pa.array(np.zeros(rows.num_rows, np.int32)))
        for batch in sorter.sorted_batches():
            yield pa.Table.from_batches([batch])


def _part(context: TableContext, names: list[str]) -> Schema:
    """Returns the columns of a table that have one of the names, in the table's order."""
    schema = context.schema
    if lacking := [name for name in schema.key_names if name not in names]:
        raise InvalidQuery(f"rows to delete from table {context.table.name!r} lack the key {lacking[0]!r}")
    if unknown := [name for name in names if name not in schema]:
        raise InvalidQuery(f"table {context.table.name!r} has no column {unknown[0]!r}")
    values = [field for field in schema.fields if field.name in names and field not in schema.key_fields]
    return Schema(schema.row_keys, schema.sort_keys, values)


def _portions(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yields distinct rows, in their order, as many together as one deletion lists."""
    held: list[pa.Table] = []
    for table in tables:
        for start in range(0, table.num_rows, _PIECE_ROWS):
            held.append(table.slice(start, _PIECE_ROWS))
            if _is_full(held):
                held = [_distinct(held)]
                if _is_full(held, of=2):
                    yield held.pop()
    if held:
        yield _distinct(held)


def _is_full(held: Sequence[pa.Table], of: int = 1) -> bool:
    rows, byte_count = sum(one.num_rows for one in held), sum(int(one.nbytes) for one in held)
    return of * rows >= ROWS_MAX or of * byte_count >= BYTES_MAX


def _distinct(tables: Sequence[pa.Table]) -> pa.Table:
    """Returns the first of each equal rows, in their order."""
    rows = pa.concat_tables(tables).combine_chunks()
    compared = [comparable(one.chunk(0), one.type) for one in rows.itercolumns()]
    names = list(map(str, range(len(compared))))
    numbered = pa.table([*compared, np.arange(rows.num_rows)], names=[*names, _NUMBER])
    first = numbered.group_by(names, use_threads=False).aggregate([(_NUMBER, "min")])
    return rows.take(pa.array(np.sort(first[f"{_NUMBER}_min"].to_numpy())))


def _deletion(context: TableContext, rows: pa.Table) -> NewDeletion:
    """Returns the deletion of the rows that are equal to one of some distinct rows in key order."""
    if (where := _plain_condition(rows)) is not None:
        return asked_to_delete(context, where)[1]
    schema, names = context.schema, tuple(rows.column_names)
    content: RowsContent | None = None
    listed = ListedRows(names, names, rows.num_rows, schema.version, values=_few(rows))
    if listed.values is None:
        data = _encoded(rows)
        content = RowsContent(content_name(context.table.object_prefix, data), data)
        listed = replace(listed, content=content.name)
    asked = question(schema, {key: _hull(rows[key]) for key in schema.row_key_names}, None, None)
    try:
        condition = condition_of(schema, asked, listed)
    except InvalidQuery:  # of very long keys
        asked = question(schema, None, None, None)
        condition = condition_of(schema, asked, listed)
    by_values = not {*names} <= {*schema.key_names}
    return NewDeletion(condition, key_bounds(schema, asked.ranges), by_values, content)


def _plain_condition(rows: pa.Table) -> dict[str, Any] | None:
    """Returns an ordinary condition for the same rows, or None. Readers test many of these together.

    It is for one row, or for the values of one column.
    """
    is_plain = not any(pa.types.is_nested(one.type) for one in rows.itercolumns())
    if not is_plain or (rows.num_rows > 1 and rows.num_columns > 1):
        return None
    columns = _values(rows)
    return None if columns is None else dict(zip(rows.column_names, columns, strict=True))


def _few(rows: pa.Table) -> list[list[Any]] | None:
    """Returns a few rows as JSON for the condition, which readers test together with others, or None."""
    is_exact = not any(
        one.null_count or pa.types.is_floating(one.type) or pa.types.is_nested(one.type)
        for one in rows.itercolumns()
    )
    columns = _values(rows) if is_exact else None
    return columns and [list(map(json_value, row)) for row in zip(*columns, strict=True)]


def _values(rows: pa.Table) -> list[list[Any]] | None:
    """Returns the values of each column, or None if they are large, or times of years that Python lacks."""
    if rows.nbytes > FEW_BYTES_MAX:
        return None
    try:
        return [column.to_pylist() for column in rows.itercolumns()]
    except (ValueError, OverflowError):
        return None


def _encoded(rows: pa.Table) -> bytes:
    sink = BytesIO()
    pq.write_table(rows, sink, compression="zstd", row_group_size=GROUP_ROWS)
    return sink.getvalue()


def _hull(column: pa.ChunkedArray) -> Range:
    ends = pc.min_max(column)
    return Range(ends["min"].as_py(), ends["max"].as_py(), max_inclusive=True)
