"""Rows sorted by leaf and key in bounded memory: what does not fit is spilled as sorted runs, then merged."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.datafusion_session import panics_as_errors, sorted_file, sorted_session
from dormouse.data.expressions import column, key_order, union
from dormouse.errors import JobFailed, one_line
from dormouse.model.schema import Schema

LEAF = "__leaf"  # no field's name begins with two underscores
MEMORY_BYTES = 256 * 1024 * 1024
MERGED_RUNS_MAX = 32
RUN_ROW_GROUP_BYTES = 4 * 1024 * 1024
STREAM_ROWS = 65_536


class LeafSorter:
    """Takes rows with the numbers of their leaves; gives them sorted by leaf, then by key.

    With `by_leaf=False` they come in key order alone. Of rows of equal key those come first that are the
    largest by the columns `descending`; of these what the schema has not is not given. About twice
    `memory_bytes` are held at once. A context manager: its temporary files go at the end. A temporary disk
    that is full is `JobFailed`.
    """

    def __init__(
        self,
        schema: Schema,
        leaf_count: int,
        *,
        by_leaf: bool = True,
        memory_bytes: int = MEMORY_BYTES,
        descending: Sequence[str] = (),
    ) -> None:
        self._order = [LEAF, *schema.key_names] if by_leaf else list(schema.key_names)
        self._descending = list(descending)
        self._columns = [LEAF] if by_leaf else []
        self._columns += dict.fromkeys([*schema.names, *descending])
        self._by_leaf = by_leaf
        self._names = list(schema.names)
        self._memory_bytes = memory_bytes
        self._folder: Path | None = None
        self._made = 0
        self._runs: list[Path] = []
        self._bounds: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        """The first and the last key of each run."""
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self.counts: npt.NDArray[np.int64] = np.zeros(leaf_count, dtype=np.int64)

    def __enter__(self) -> LeafSorter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, batch: pa.RecordBatch, leaves: pa.Int32Array) -> None:
        """Rows, as `conform` gives them, and for each the position of its leaf."""
        self.counts += np.bincount(leaves.to_numpy(), minlength=len(self.counts))
        if self._by_leaf:
            batch = batch.append_column(LEAF, leaves).select(self._columns)
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._memory_bytes:
            self._spill()

    def sorted_batches(self) -> Iterator[pa.RecordBatch]:
        """All rows in order, without the leaf; once."""
        if not self._runs:
            if self._held:
                yield from self._take_held().select(self._names).to_batches(STREAM_ROWS)
            return
        if self._held:
            self._spill()
        if self._runs_follow_each_other():
            yield from self._chained()
            return
        while len(self._runs) > MERGED_RUNS_MAX:
            first, self._runs = self._runs[:MERGED_RUNS_MAX], self._runs[MERGED_RUNS_MAX:]
            self._write_run(self._merged(first, self._columns))
            for run in first:
                run.unlink()
        yield from self._merged(self._runs, self._names)

    def _runs_follow_each_other(self) -> bool:
        """Whether each begins after the last has ended: rows came in their order."""
        pairs = zip(self._bounds, self._bounds[1:], strict=False)
        return not self._descending and all(before[1] < after[0] for before, after in pairs)

    def _chained(self) -> Iterator[pa.RecordBatch]:
        try:
            for run in self._runs:
                with pq.ParquetFile(run) as file:
                    for batch in file.iter_batches(STREAM_ROWS, use_threads=False):
                        yield batch.select(self._names)
        except (OSError, pa.ArrowException) as error:
            raise JobFailed(f"cannot merge sorted runs: {one_line(error)}") from error

    def _take_held(self) -> pa.Table:
        """What is in memory, sorted; the memory is the caller's from here on."""
        table = pa.Table.from_batches(self._held).combine_chunks()
        self._held, self._held_bytes = [], 0
        keys = [(name, "ascending") for name in self._order]
        keys += [(name, "descending") for name in self._descending]
        order = pc.sort_indices(table, sort_keys=keys)
        return table.take(order)

    def _spill(self) -> None:
        table = self._take_held()
        keys = table.select(self._order)
        first, last = (tuple(keys.slice(row, 1).to_pylist()[0].values()) for row in (0, len(keys) - 1))
        self._bounds.append((first, last))
        self._write_run(iter(table.to_batches(STREAM_ROWS)))

    def _write_run(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._made += 1
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="dormouse-ingest-"))
            path = self._folder / f"run-{self._made}.parquet"
            self._write(path, batches)
        except OSError as error:
            raise JobFailed(f"cannot write temporary files in {tempfile.gettempdir()}: {error}") from error
        self._runs.append(path)

    @staticmethod
    def _write(path: Path, batches: Iterator[pa.RecordBatch]) -> None:
        first = next(batches)
        rows = max(1, RUN_ROW_GROUP_BYTES * first.num_rows // max(1, first.nbytes))
        options: dict[str, Any] = {"compression": "lz4", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(path, first.schema, store_schema=False, **options) as writer:
            writer.write_batch(first, row_group_size=rows)
            for batch in batches:
                writer.write_batch(batch, row_group_size=rows)

    def _merged(self, runs: Sequence[Path], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """A streaming merge of runs, by DataFusion."""
        context = sorted_session(options={"datafusion.execution.parquet.schema_force_view_types": "false"})
        try:
            with panics_as_errors():
                rows = union([sorted_file(context, run, self._order, self._descending) for run in runs])
                order = key_order(self._order, self._descending)
                merged = rows.sort(*order).select(*map(column, names))
                for batch in merged.execute_stream():
                    yield batch.to_pyarrow()
        except Exception as error:
            raise JobFailed(f"cannot merge sorted runs: {one_line(error)}") from error
