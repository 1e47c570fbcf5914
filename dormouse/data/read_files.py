"""Many files, or parts of them, as one stream: the next are read while the rows of the last are used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import TypeVar

import pyarrow as pa

from dormouse.ahead import chained_ahead, mapped_ahead
from dormouse.data.portions import portions

F = TypeVar("F")
T = TypeVar("T")
THREADS = 2
BATCHES_EARLY = 2
"""That wait of each file, or part, that is read."""
FILES_TOGETHER = 16
_BYTES_TOGETHER = 1 << 20
_ROWS_TOGETHER = 16_384
"""Few batches cost less than many."""
_WIDE_ROWS_BYTES = 64 << 20
"""Of which fewer rows are together: texts of more than 2 GiB are not in one piece."""


def each_file(function: Callable[[F], T], files: Sequence[F]) -> Iterator[T]:
    """What a function tells of each file, in order; of many files several at once."""

    def told(some: Sequence[F]) -> list[T]:
        return list(map(function, some))

    if len(files) <= FILES_TOGETHER:
        yield from told(files)
        return
    parts = (files[start : start + FILES_TOGETHER] for start in range(0, len(files), FILES_TOGETHER))
    with closing(mapped_ahead(told, parts, THREADS)) as made:
        yield from chain.from_iterable(made)


def read_files(
    files: Iterable[F], read: Callable[[F], Iterator[pa.RecordBatch]], size_of: Callable[[F], int]
) -> Generator[pa.RecordBatch, None, None]:
    """The rows of all files, or parts, in the order of these; `size_of` tells bytes.

    What is wrong with a file is raised when its turn comes, whatever is read at once.
    """
    least = _BYTES_TOGETHER // FILES_TOGETHER
    small_ones_together = portions(files, lambda file: max(size_of(file), least), _BYTES_TOGETHER)
    streams = (_joined(chain.from_iterable(map(read, some))) for some in small_ones_together)
    with closing(chained_ahead(streams, THREADS, BATCHES_EARLY)) as batches:
        yield from batches


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    def share(batch: pa.RecordBatch) -> float:
        return float(max(batch.num_rows / _ROWS_TOGETHER, batch.nbytes / _WIDE_ROWS_BYTES))

    for some in portions(batches, share, 1):
        yield some[0] if len(some) == 1 else pa.concat_batches(some)
