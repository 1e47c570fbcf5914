"""Files cut into parts that tasks read, each in its own Python worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from dormouse.model.schema import Schema
from dormouse.sources.data_files import DataFile
from dormouse.sources.source_files import FilePart, parts_of, prepared, read_file

SPLIT_BYTES = 64 * 1024 * 1024


def file_splits(files: Sequence[DataFile], schema: Schema) -> list[FilePart]:
    """Parts of about `SPLIT_BYTES`; refuses files that cannot be read or have the wrong columns."""
    return list(parts_of([prepared(file, schema) for file in files], SPLIT_BYTES))


def read_splits(
    numbers: Iterable[pa.RecordBatch], splits: Sequence[FilePart], schema: Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of the splits whose numbers come."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            split = splits[number]
            yield from read_file(split.file, schema, split.row_groups)
