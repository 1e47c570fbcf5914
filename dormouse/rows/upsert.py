"""Upserts by columns: which rows there are already, what of them differs, and what is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.differing import differ
from dormouse.errors import AmbiguousRows, InvalidColumn, InvalidRow
from dormouse.model.properties import ROW_ID, ROW_VERSION
from dormouse.rows.batches import BLOCK_ROWS_MAX, RowBatch, check_names, checked_rows
from dormouse.rows.columns import Column, column_named
from dormouse.rows.given import as_dicts
from dormouse.rows.ranges import Flags, Ints
from dormouse.rows.values import array_of, row_label, with_default

Locate = Callable[[pa.RecordBatch], pa.Table]
"""For rows of keys `position`, ROW_ID, ROW_VERSION and all columns of the rows that have them."""


def upserts(
    rows: Any, on: Sequence[str], columns: Sequence[Column], locate: Locate
) -> tuple[list[RowBatch], int]:
    """What is to be written, in blocks; and how many rows are as they are wanted already.

    Cells that a row does not bring are left untouched. Raises `InvalidRow`, `InvalidColumn`, and
    `AmbiguousRows` for rows of equal keys, here or there.
    """
    keys = _keys(on, columns)
    if not (listed := checked_rows(as_dicts(rows), "upsert")):
        return [], 0
    for number, row in enumerate(listed):
        if missing := next((name for name in on if name not in row), None):
            raise InvalidRow(f"{row_label(number)}: it has no {missing!r}, by which rows are looked for")
    check_names(listed, columns, row_label, keys=())
    named = [column for column in columns if any(column.name in row for row in listed)]
    cells = {
        column.name: with_default(column, array_of(column, [row.get(column.name) for row in listed]))
        for column in named
    }
    given = {
        column.name: np.fromiter((column.name in row for row in listed), np.bool_, len(listed))
        for column in named
    }
    table = pa.table([cells[key.name] for key in keys], [key.name for key in keys])
    _check_once(table, "rows {} and {}")
    batches, unchanged = [], 0
    for start in range(0, len(listed), BLOCK_ROWS_MAX):
        stop = min(start + BLOCK_ROWS_MAX, len(listed))
        those = slice(start, stop)
        some = {name: array[those] for name, array in cells.items()}
        flags = {name: each[those] for name, each in given.items()}
        found = locate(
            pa.RecordBatch.from_arrays([some[key.name] for key in keys], [key.name for key in keys])
        )
        _check_found(found, keys)
        batch, same = _batch(some, flags, found, stop - start, start)
        unchanged += same
        if len(batch):
            batches.append(batch)
    return batches, unchanged


def _keys(on: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    if isinstance(on, str) or not isinstance(on, Sequence) or not on:
        raise InvalidColumn(f"on is a list of the columns by which rows are looked for, not {on!r}")
    keys = [column_named(columns, name) for name in on]
    if len({key.name for key in keys}) < len(keys):
        raise InvalidColumn(f"on names a column twice: {', '.join(on)}")
    return keys


def _check_once(table: pa.Table, which: str) -> None:
    """Of the rows that are given no two have the same keys."""
    numbered = table.append_column("__row", pa.array(np.arange(table.num_rows)))
    groups = numbered.group_by(table.column_names).aggregate(
        [("__row", "count"), ("__row", "min"), ("__row", "max")]
    )
    twice = groups.filter(pc.greater(groups.column("__row_count"), 1))
    if twice.num_rows:
        first = twice.sort_by("__row_min").slice(0, 1).to_pylist()[0]
        key = _shown({name: first[name] for name in table.column_names})
        named = which.format(first["__row_min"] + 1, first["__row_max"] + 1)
        raise AmbiguousRows(f"{named} of the upsert both have {key}")


def _check_found(found: pa.Table, keys: Sequence[Column]) -> None:
    """No key has two rows of the table."""
    positions = found.column(0).to_numpy()
    again = np.flatnonzero(positions[1:] == positions[:-1])
    if len(again):
        one, other = found.slice(int(again[0]), 2).to_pylist()
        key = _shown({column.name: one[column.name] for column in keys})
        raise AmbiguousRows(
            f"rows of {ROW_ID} {one[ROW_ID]} and {other[ROW_ID]} both have {key}: look by more columns, or "
            "update one by its id"
        )


def _batch(
    cells: Mapping[str, pa.Array], given: Mapping[str, Flags], found: pa.Table, count: int, start: int
) -> tuple[RowBatch, int]:
    """The rows of a block that are new or differ; and how many do not."""
    positions = found.column(0).to_numpy()
    ids, versions = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    ids[positions], versions[positions] = (
        found.column(ROW_ID).to_numpy(),
        found.column(ROW_VERSION).to_numpy(),
    )
    differs = np.zeros(len(positions), np.bool_)
    for name, array in cells.items():
        there = found.column(name).combine_chunks()
        differs |= differ(array.take(pa.array(positions)), there) & given[name][positions]
    kept = ids == 0
    kept[positions] = differs
    at = np.flatnonzero(kept)

    def label(number: int, at: Ints = at) -> str:
        return row_label(start + int(at[number]))

    those = pa.array(at)
    return RowBatch(
        ids[at],
        versions[at],
        {name: array.take(those) for name, array in cells.items()},
        {name: flags[at] for name, flags in given.items()},
        label=label,
    ), int((~differs).sum())


def _shown(key: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value!r}" for name, value in key.items())
