"""Sorted rows as the Parquet files of leaves, each with its sketches beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_schema, with_ids
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.data.newest import Marks, first_of_keys
from dormouse.data.sketches import KeySampler
from dormouse.errors import JobFailed
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.loops import ahead
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed, newest_first
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore
from dormouse.writing.keyed_merge import ROW
from dormouse.writing.parquet_file import SAMPLE_ROWS, FileFacts, FileShape, file_facts, write_groups

WRITTEN_ROWS = 65_536
BATCHES_AHEAD = 4
"""Of sorted rows, made while those before them are encoded."""


class LeafFiles:
    """Writes one writer's files, for leaves by their position; of a keyed table the last row of each key.

    `schema` is that of the files; `name_of` gives the object name of a partition's file, or of the one file
    of all "leaves".
    """

    def __init__(
        self,
        objects: ObjectStore,
        schema: Schema,
        properties: TableProperties,
        partition_ids: pa.StringArray,
        name_of: Callable[[str], str],
    ) -> None:
        self._objects = objects
        self._schema = schema
        self._arrow = with_ids(arrow_schema(schema), schema)
        self._properties = properties
        self._ids = partition_ids
        self._name_of = name_of
        self._shape: FileShape | None = None
        self._shape_rows = 0

    def sorter(self, memory_bytes: int) -> LeafSorter:
        """What sorts rows in the order in which `write` needs them."""
        return LeafSorter(
            self._schema,
            len(self._ids),
            by_leaf=self._one_file_per_leaf,
            memory_bytes=memory_bytes,
            descending=[*newest_first(self._properties)[:-1], ROW] if is_keyed(self._properties) else (),
        )

    def write(self, sorter: LeafSorter) -> Iterator[FileWithReferences]:
        """The files of all the sorter's rows, written one after the other; none when there are no rows."""
        with closing(ahead(sorter.sorted_batches(), BATCHES_AHEAD)) as batches:
            yield from self._written(_Stream(batches), sorter.counts)

    def write_in_order(
        self, batches: Iterator[pa.RecordBatch], counts: npt.NDArray[np.int64]
    ) -> Iterator[FileWithReferences]:
        """The files of rows that come in order, so many of each leaf; not of a keyed table."""
        yield from self._written(_Stream(batches), counts)

    def _written(self, stream: _Stream, counts: npt.NDArray[np.int64]) -> Iterator[FileWithReferences]:
        filled = np.flatnonzero(counts)
        if self._one_file_per_leaf:
            for leaf in filled:
                yield self._write(stream, counts, [int(leaf)])
        elif len(filled):
            yield self._write(stream, counts, filled.tolist())
        stream.check_end()

    @property
    def _one_file_per_leaf(self) -> bool:
        return self._properties.ingest_file_writing == "one_file_per_leaf"

    def _write(
        self, stream: _Stream, counts: npt.NDArray[np.int64], leaves: Sequence[int]
    ) -> FileWithReferences:
        name = self._name_of(str(self._ids[leaves[0]]) if self._one_file_per_leaf else "leaves")
        rows = {str(self._ids[leaf]): int(counts[leaf]) for leaf in leaves}
        total = sum(rows.values())
        with self._objects.staged(name) as path:
            taken = stream.take(total)
            write = self._write_newest if is_keyed(self._properties) else self._write_all
            facts = write(path, taken, total)
        # of rows of equal key one is left, and it is not known in which leaf there were several
        exact = not facts.marks and (self._one_file_per_leaf or facts.row_count == total)
        if len(leaves) == 1:
            rows = dict.fromkeys(rows, facts.row_count)
        self._objects.put(name + SKETCHES_SUFFIX, facts.sketches)
        references = (
            FileReference(
                filename=name,
                partition_id=partition_id,
                row_count=count,
                count_approximate=not exact,
                only_contains_data_for_this_partition=len(leaves) == 1,
            )
            for partition_id, count in rows.items()
        )
        return facts.file(name, references)

    def _write_all(self, path: Path, batches: Iterator[pa.RecordBatch], total: int) -> FileFacts:
        sampler = KeySampler(self._schema, total)

        def sampled(batch: pa.RecordBatch) -> pa.RecordBatch:
            sampler.add(batch)
            return batch

        self._write_rows(path, map(sampled, batches))
        _check_footer(path, total)
        return FileFacts.of(path, self._schema, sampler)

    def _write_newest(self, path: Path, batches: Iterator[pa.RecordBatch], total: int) -> FileFacts:
        """The last row of each key."""
        marks = Marks()
        self._write_rows(path, marks.counted(first_of_keys(batches, self._schema.row_key_names)))
        facts = file_facts(path, self._schema)
        if facts.row_count != marks.rows or facts.row_count > total:
            raise JobFailed(f"a file was to have {marks.rows:,} rows, but has {facts.row_count:,}")
        return replace(facts, marks=marks.marks)

    def _write_rows(self, path: Path, batches: Iterator[pa.RecordBatch]) -> None:
        exact = (pa.RecordBatch.from_arrays(batch.columns, schema=self._arrow) for batch in batches)
        write_groups(path, exact, self._schema, self._properties, self._shape_of)

    def _shape_of(self, first: pa.Table) -> FileShape:
        if self._shape is None or self._shape_rows < min(first.num_rows, SAMPLE_ROWS):
            self._shape = FileShape.like(first, self._schema, self._properties)
            self._shape_rows = first.num_rows
        return self._shape


def _check_footer(path: Path, rows: int) -> None:
    found = pq.read_metadata(path).num_rows
    if found != rows:
        raise JobFailed(f"a file was to have {rows:,} rows, but has {found:,}")


class _Stream:
    """Batches that are taken so many rows at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise JobFailed(f"{rows:,} rows were lost while they were sorted; nothing was added")
            piece = batch.slice(0, min(rows, WRITTEN_ROWS))
            self._rest = batch.slice(piece.num_rows) if piece.num_rows < batch.num_rows else None
            rows -= piece.num_rows
            yield piece

    def check_end(self) -> None:
        """`JobFailed` when rows are left."""
        if self._rest is not None or any(batch.num_rows for batch in self._batches):
            raise JobFailed("more rows came out of sorting than went in; nothing was added")
