"""How many rows of a Parquet file are read at once, where some are so wide that a whole batch is too much.

A dictionary has a long value once, however many rows have it: a file of 13 kB may ask for 4.5 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

_BYTES_MAX = 256 * 1024 * 1024


def batch_rows(path: Path, parquet: pq.ParquetFile, row_groups: Sequence[int], rows_max: int) -> int:
    """At most `rows_max`, at least 1: so many that a batch of them has about 256 MiB, or less."""
    there = parquet.metadata.num_row_groups  # a file that was changed meanwhile is refused when it is read
    known = (number for number in row_groups if number < there)
    return min((_rows(path, parquet, number, rows_max) for number in known), default=rows_max)


def _rows(path: Path, parquet: pq.ParquetFile, number: int, rows_max: int) -> int:
    group = parquet.metadata.row_group(number)
    rows = max(1, min(rows_max, group.num_rows))
    # what is written as it is takes in memory what it takes in the file
    width = group.total_byte_size / max(1, group.num_rows) if group.total_byte_size > _BYTES_MAX else 0
    if suspects := [*_may_be_long(group, rows)]:
        lookup = pq.ParquetFile(path, metadata=parquet.metadata, memory_map=True, read_dictionary=suspects)
        with lookup as dictionaries:
            for batch in dictionaries.iter_batches(1, [number], suspects, use_threads=False):
                width += sum(pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in batch)
                break
    return max(1, min(rows_max, int(_BYTES_MAX / width))) if width else rows_max


def _may_be_long(group: pq.RowGroupMetaData, rows: int) -> Iterator[str]:
    """Columns with dictionaries that are large enough for a value that is too long so many times."""
    for index in range(group.num_columns):
        chunk = group.column(index)
        if (
            chunk.physical_type == "BYTE_ARRAY"
            and "." not in chunk.path_in_schema
            and any("DICTIONARY" in encoding for encoding in chunk.encodings)
            and chunk.total_uncompressed_size * rows > _BYTES_MAX
        ):
            yield chunk.path_in_schema
