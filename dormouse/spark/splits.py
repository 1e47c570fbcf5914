"""Files cut into parts that tasks read, each in its own Python worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dormouse.data.portions import portions
from dormouse.data.source_files import read_file, row_group_bytes
from dormouse.model.schema import Schema

SPLIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileSplit:
    """A file, or some row groups of a Parquet file."""

    file: Path
    row_groups: tuple[int, ...] | None = None


def file_splits(files: Sequence[Path], schema: Schema) -> list[FileSplit]:
    """Parts of about `SPLIT_BYTES`; refuses files that cannot be read or have the wrong columns."""
    return [split for file in files for split in _splits(file, row_group_bytes(file, schema))]


def read_splits(
    numbers: Iterable[pa.RecordBatch], splits: Sequence[FileSplit], schema: Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of the splits whose numbers come."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            split = splits[number]
            yield from read_file(split.file.absolute(), schema, split.row_groups)


def _splits(file: Path, group_bytes: Sequence[int] | None) -> Iterator[FileSplit]:
    if group_bytes is None:
        yield FileSplit(file)
        return
    for groups in portions(range(len(group_bytes)), group_bytes.__getitem__, SPLIT_BYTES):
        yield FileSplit(file, tuple(groups))
