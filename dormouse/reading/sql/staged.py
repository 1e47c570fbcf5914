"""Rows of this process that statements read beside tables: in memory if they are few, else in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import finalize

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.errors import ObjectStoreError, one_line
from dormouse.objects.inlined import claimed_folder
from dormouse.objects.staging import Slot
from dormouse.objects.store import ObjectStore
from dormouse.reading.sql.conditions import text

MEMORY_BYTES_MAX = 16 * 1024 * 1024
"""The most bytes of rows that are held in memory."""
GROUP_ROWS_MAX = 65_536
BATCH_ROWS = 8_192


class Staged:
    """A list of rows, which is written once and read any number of times. One thread uses it.

    Its file ends with the object, with `close`, or with the process.
    """

    def __init__(self, objects: ObjectStore, schema: pa.Schema) -> None:
        self.schema = schema
        self.row_count = 0
        self._objects = objects
        self._held: list[pa.RecordBatch] = []
        self._byte_count = 0
        self._writer: pq.ParquetWriter | None = None
        self._path: Path | None = None
        self._end: finalize[..., object] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_in_memory(self) -> bool:
        return self._path is None

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows; not after the first call of `select`."""
        if not batch.num_rows:
            return
        self.row_count += batch.num_rows
        self._byte_count += batch.nbytes
        self._held.append(batch)
        if self._byte_count > MEMORY_BYTES_MAX:
            self._write()

    def add_all(self, batches: Iterable[pa.RecordBatch]) -> Self:
        for batch in batches:
            self.add(batch)
        return self

    def table(self) -> pa.Table:
        """Returns all rows, if they are in memory."""
        return pa.Table.from_batches(self._held, self.schema)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows in the order in which they were added."""
        if self._path is None:
            yield from self._held
            return
        self._finish()
        with pq.ParquetFile(self._path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)

    def select(self) -> str:
        """Returns a SELECT of the rows, for the view of a statement. Afterwards, no row can be added."""
        self._write()
        self._finish()
        return f"SELECT * FROM read_parquet({text(str(self._path))}, hive_partitioning = false)"

    def close(self) -> None:
        """Deletes the rows."""
        self._held.clear()
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):  # of a full disk
                self._writer.close()
            self._writer = None
        if self._end is not None:
            self._end()

    def _write(self) -> None:
        """Moves the rows from memory to the file."""
        if self._path is not None and self._writer is None:
            return
        try:
            if self._writer is None:
                slot = claimed_folder(self._objects)
                self._end = finalize(self, _close, slot)
                self._path = slot.path("rows.parquet")
                self._writer = pq.ParquetWriter(self._path, self.schema, compression="lz4")
            rows = pa.Table.from_batches(self._held, self.schema)
            self._writer.write_table(rows, row_group_size=GROUP_ROWS_MAX)
        except (OSError, pa.ArrowException) as error:
            raise _not_written(error) from error
        self._held.clear()
        self._byte_count = 0

    def _finish(self) -> None:
        if self._writer is not None:
            if self._held:
                self._write()
            try:
                self._writer.close()
            except (OSError, pa.ArrowException) as error:
                raise _not_written(error) from error
            self._writer = None


def _not_written(error: Exception) -> ObjectStoreError:
    return ObjectStoreError(f"rows cannot be written to a temporary file: {one_line(error)}")


def _close(slot: Slot) -> None:
    with suppress(OSError):
        slot.close()
