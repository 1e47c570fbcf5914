"""Sketches of what a file holds within a region, read from its row keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.object_access import parquet_object
from dormouse.data.ranks import rank
from dormouse.data.sketches import FileSketches
from dormouse.data.written import written_schema
from dormouse.model.region import Range, Region
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore
from dormouse.objects.names import SKETCHES_SUFFIX

_READ_ROWS = 65_536


def load_sketches(store: ObjectStore, filename: str, schema: Schema) -> FileSketches:
    """The sketches kept beside a file; `ObjectNotFound`, or `InvalidData` when they are corrupt.

    By the schema's row keys, whatever they were called when the file was written: later, too, by others.
    """
    name = filename + SKETCHES_SUFFIX
    return FileSketches.from_bytes(store.get(name), name).renamed(schema)


def read_sketches(store: ObjectStore, filename: str, schema: Schema, region: Region) -> FileSketches | None:
    """Sketches of the file's rows in the region, from its row keys; None when it has none there.

    Streams the row groups that can have such rows, twice: to count them, and to sketch them. Raises
    `ObjectNotFound`, or `InvalidData` when the file cannot be read.
    """
    written = written_schema(schema, filename)
    called = dict(zip(schema.row_key_names, written.row_key_names, strict=True))
    there = Region({called[name]: item for name, item in region.items()})
    with parquet_object(store, filename) as file:
        inside = partial(_inside, file, written, there)
        rows = sum(batch.num_rows for batch in inside())
        return FileSketches.from_sorted(written, inside(), rows).renamed(schema) if rows else None


def _inside(file: pq.ParquetFile, schema: Schema, region: Region) -> Iterator[pa.RecordBatch]:
    groups = [
        group for group in range(file.num_row_groups) if _may_have(file.metadata.row_group(group), region)
    ]
    columns = list(schema.row_key_names)
    for batch in file.iter_batches(_READ_ROWS, row_groups=groups, columns=columns) if groups else ():
        mask = np.ones(batch.num_rows, dtype=bool)
        for name, item in region.items():
            mask &= _within(batch.column(name), item)
        yield batch.filter(pa.array(mask))


def _within(column: Any, item: Range) -> npt.NDArray[np.bool_]:
    """Which values lie in a partition's range: its minimum is part of it, its maximum is not."""
    points = [end for end in (item.min, item.max) if end is not None]
    if not points:
        return np.ones(len(column), dtype=bool)
    inside: npt.NDArray[np.bool_] = rank(column, points) == (item.min is not None)
    return inside


def _may_have(group: pq.RowGroupMetaData, region: Region) -> bool:
    """Whether a row group's statistics allow rows in the region."""
    for position in range(group.num_columns):
        column = group.column(position)
        item, known = region.get(column.path_in_schema), column.statistics
        if item is None or known is None or not known.has_min_max:
            continue
        if (item.min is not None and known.max < item.min) or (
            item.max is not None and known.min >= item.max
        ):
            return False
    return True
