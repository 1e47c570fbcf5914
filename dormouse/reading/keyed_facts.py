"""What the footer of a keyed table's file tells of its rows' places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow.parquet as pq

from dormouse.data.object_access import parquet_object
from dormouse.errors import InvalidData, ObjectStoreError
from dormouse.model.table import DELETED_AT, SEQUENCE
from dormouse.model.types import DATE, INT, LONG, TIMESTAMP
from dormouse.objects import ObjectStore
from dormouse.reading.known_files import KEPT

WHOLE_NUMBERS = (INT, LONG, TIMESTAMP, DATE)
"""Types whose smallest and largest values are exact in a footer, as integers."""


class NewestBounds(NamedTuple):
    """How new the rows of a file are: no row comes before `first` or after `last`.

    Both have a number for each column that tells which row of a key is the newest.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]


class Places(NamedTuple):
    """The smallest and largest place of a file's rows, None where not known; whether some are marks."""

    first: int | None
    last: int | None
    has_marks: bool


def places_of(store: ObjectStore, name: str) -> Places:
    """Reads a footer; `ObjectNotFound` or `InvalidData`."""
    with parquet_object(store, name) as file:
        metadata = file.metadata
    names = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    sequence, deleted_at = names.index(SEQUENCE), names.index(DELETED_AT)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    told = [_bounds(group.column(sequence)) for group in groups]
    known = [one for one in told if one is not None]
    is_known = bool(known) and len(known) == len(told)
    return Places(
        min(low for low, _ in known) if is_known else None,
        max(high for _, high in known) if is_known else None,
        any(_has_values(group.column(deleted_at)) for group in groups),
    )


def newest_bounds(store: ObjectStore, name: str, columns: Sequence[str | None]) -> NewestBounds | None:
    """Returns how new the rows of a file are by columns of `WHOLE_NUMBERS`, as the file calls them.

    Reads a footer once a process. Returns None where a column or its statistics are missing, or the file is.
    """
    key = (store.url, name, "newest", *columns)
    found: NewestBounds | None = KEPT.get(key)
    if found is None:
        try:
            found = _read_bounds(store, name, columns)
        except (InvalidData, ObjectStoreError):
            return None
        if found is not None:
            KEPT.put(key, found, len(name))
    return found


def _read_bounds(store: ObjectStore, name: str, columns: Sequence[str | None]) -> NewestBounds | None:
    with parquet_object(store, name) as file:
        metadata = file.metadata
    names = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    if not all(column in names for column in columns) or not metadata.num_row_groups:
        return None
    lows, highs = [], []
    for column in map(names.index, columns):
        groups = [metadata.row_group(number).column(column) for number in range(metadata.num_row_groups)]
        told = [one.statistics for one in groups]
        if any(one is None or not one.has_min_max for one in told):
            return None
        lows.append(min(one.min_raw for one in told))
        highs.append(max(one.max_raw for one in told))
    return NewestBounds(tuple(lows), tuple(highs))


def _bounds(column: pq.ColumnChunkMetaData) -> tuple[int, int] | None:
    statistics = column.statistics
    return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


def _has_values(column: pq.ColumnChunkMetaData) -> bool:
    statistics = column.statistics
    return statistics is None or not statistics.has_null_count or statistics.null_count < column.num_values
