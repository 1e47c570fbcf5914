"""What the footer of a keyed table's file tells of its rows' places."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow.parquet as pq

from dormouse.data.object_access import parquet_object
from dormouse.model.keyed import DELETED_AT, SEQUENCE
from dormouse.objects import ObjectStore


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


def _bounds(column: pq.ColumnChunkMetaData) -> tuple[int, int] | None:
    statistics = column.statistics
    return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


def _has_values(column: pq.ColumnChunkMetaData) -> bool:
    statistics = column.statistics
    return statistics is None or not statistics.has_null_count or statistics.null_count < column.num_values
