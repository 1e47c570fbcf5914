"""A sorter of rows by leaf and key in bounded memory, which spills sorted runs to disk and merges them.

Keys are sorted as 64-bit numbers. Arrow sorts the rows whose numbers are equal. The number is packed from the
beginning of the key, and has the same order:

- whole numbers and times, less their smallest value,
- repeated texts, as their rank among the distinct ones,
- other texts, as the bytes after their common prefix.

Sorting numbers takes a fraction of the time of comparing rows column by column. Numbers of many rows are
sorted by radix: two passes over 16 bits each order the first 32 bits.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.datafusion_session import (
    column,
    key_order,
    sorted_file,
    sorted_session,
    union,
)
from dormouse.data.sketches import rank, repeats
from dormouse.data.taking import RowsInOrder, at, joined
from dormouse.errors import JobFailed, one_line, panics_as_errors
from dormouse.model.loops import mapped_ahead
from dormouse.model.partition_tree import PartitionTree
from dormouse.model.schema import Schema
from dormouse.objects.staging import temporary_folder

_BITS = 64
_BYTES_OF_TEXT = 8
_ROWS_MIN = 1_000
"""The fewest rows that are sorted as numbers; with fewer rows nothing is gained."""
_RADIX_BITS = 16
"""The width of the numbers that NumPy sorts by radix."""
_RUNS_MAX = 64
"""The most ascending runs of rows for which merging the runs is faster than sorting by radix."""

Words = npt.NDArray[np.uint64]

Ints = npt.NDArray[np.int32]

LEAF = "__leaf"  # no field's name begins with two underscores
MEMORY_BYTES = 256 * 1024 * 1024
MEMORY_BYTES_MAX = (1 << 31) - 1
"""The most bytes that are sorted at once: a larger column of texts could not be one Arrow array."""
MERGED_RUNS_MAX = 32
RUN_ROW_GROUP_BYTES = 4 * 1024 * 1024
STREAM_ROWS = 65_536
TAKEN_ROWS, TAKEN_BYTES = 1 << 19, 64 * 1024 * 1024
"""The most rows and bytes that are put in order at once. With many rows, each column stays in the cache."""
SMALL_ROWS = 10_000
COLUMNS_AT_ONCE = 2
"""The most columns that are concatenated at the same time. Meanwhile each takes twice its memory."""
Key = tuple[Any, ...]


def sort_indices(rows: pa.Table, ascending: Sequence[str], descending: Sequence[str] = ()) -> pa.Array | None:
    """Returns the indices that sort the rows, or None if the rows are sorted already.

    Rows are sorted by the `ascending` columns, which have no nulls, then by the `descending` ones. Rows of
    equal keys keep their order.
    """
    if rows.num_rows <= 1:
        return None
    if rows.num_rows < _ROWS_MIN:
        return _by_arrow(rows, ascending, descending)
    words, is_whole = _packed(rows, ascending)
    is_whole = is_whole and not descending
    runs = int(np.count_nonzero(words[1:] < words[:-1])) + 1
    if runs == 1 and (is_whole or bool(np.all(words[1:] > words[:-1]))):
        return None
    order = _merged_runs(words) if runs <= _RUNS_MAX else _by_radix(words)
    if not is_whole:
        _settle(order, at(words, order), rows, ascending, descending)
    return pa.array(order)


def _merged_runs(words: Words) -> npt.NDArray[np.int64]:
    """Returns the indices that sort the numbers stably; fast for few ascending runs (Timsort)."""
    return np.argsort(words, kind="stable")


def _by_radix(words: Words) -> npt.NDArray[np.int64]:
    """Returns the indices that sort the numbers stably: by the first 32 bits, then ties by the whole."""
    lower = max(0, int(words.max()).bit_length() - 2 * _RADIX_BITS)
    fronts = (words >> np.uint64(lower)).astype(np.uint32)
    order = np.argsort(fronts.astype(np.uint16), kind="stable")
    upper = at((fronts >> np.uint32(_RADIX_BITS)).astype(np.uint16), order)
    order = at(order, np.argsort(upper, kind="stable"))
    if lower and not _ascends(at(words, order)):
        places = _tied(at(fronts, order))
        tied = order[places]
        order[places] = tied[_merged_runs(words[tied])]
    return order


def _ascends(words: Words) -> bool:
    return not bool(np.any(words[1:] < words[:-1]))


def _tied(ordered: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Returns the places of the values that are equal to the value before or after them."""
    equal = ordered[1:] == ordered[:-1]
    return np.flatnonzero(np.append(equal, False) | np.append(False, equal))


def _settle(
    order: npt.NDArray[np.int64],
    words: Words,
    rows: pa.Table,
    ascending: Sequence[str],
    descending: Sequence[str],
) -> None:
    """Completes the sort order `order` in place: compares the rows whose numbers in `words` are equal."""
    places = _tied(words)
    if len(places):
        tied = order[places]
        columns = rows.select([*ascending, *descending]).take(pa.array(tied))
        order[places] = tied[_by_arrow(columns, ascending, descending).to_numpy()]


def _by_arrow(rows: pa.Table, ascending: Sequence[str], descending: Sequence[str]) -> pa.Array:
    keys = [(name, "ascending") for name in ascending]
    return pc.sort_indices(rows, sort_keys=[*keys, *((name, "descending") for name in descending)])


def _packed(rows: pa.Table, names: Sequence[str]) -> tuple[Words, bool]:
    """Returns a number for each row, packed from its key, and whether the numbers contain the whole keys."""
    words, left = np.zeros(rows.num_rows, np.uint64), _BITS
    for name in names:
        numbers, is_whole = _numbers(rows.column(name))
        bits = int(numbers.max()).bit_length()
        taken = min(bits, left)
        if taken:  # a shift by all bits would do nothing
            lower = numbers >> np.uint64(bits - taken)
            words = lower if left == _BITS else words << np.uint64(taken) | lower
        left -= taken
        if taken < bits or not is_whole:
            return words, False
    return words, True


def _numbers(column: pa.ChunkedArray) -> tuple[Words, bool]:
    """Returns a number for each value, in the values' order, and whether each number stands for one value."""
    if pa.types.is_primitive(column.type):
        kind = np.dtype(f"int{column.type.bit_width}")
        whole = joined(column.chunks)
        view = np.frombuffer(whole.buffers()[1], kind, len(whole), whole.offset * kind.itemsize)
        values = view.astype(np.int64, copy=False)
        return values.view(np.uint64) - np.uint64(int(values.min()) % (1 << _BITS)), True
    texts = column.cast(pa.large_binary()).combine_chunks()
    return (_places(texts), True) if repeats(texts) else (_fronts(texts), False)


def _places(texts: pa.LargeBinaryArray) -> Words:
    """Returns the rank of each text among the distinct ones."""
    coded = texts.dictionary_encode()
    order = pc.sort_indices(coded.dictionary).to_numpy()
    places = np.empty(len(order), np.uint64)
    places[order] = np.arange(len(order), dtype=np.uint64)
    found: Words = places[coded.indices.to_numpy()]
    return found


def _fronts(texts: pa.LargeBinaryArray) -> Words:
    """Returns a number for each text: the bytes after the prefix that all share. A missing byte is zero."""
    low, high = pc.min_max(texts).as_py().values()
    shared = next((n for n, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    _, offsets, content = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * np.dtype(np.int64).itemsize)
    if content is None or content.size < _BYTES_OF_TEXT:
        content = (content.to_pybytes() if content is not None else b"") + bytes(_BYTES_OF_TEXT)
    data = np.frombuffer(content, np.uint8)
    last = len(data) - _BYTES_OF_TEXT
    eights: npt.NDArray[Any] = np.ndarray(last + 1, ">u8", data, strides=(1,))
    starts = bounds[:-1] + shared
    at = np.minimum(starts, last)
    missing = _BYTES_OF_TEXT - np.clip(bounds[1:] - starts, 0, _BYTES_OF_TEXT)
    words = eights[at].astype(np.uint64) << _bits(starts - at) >> _bits(missing) << _bits(missing)
    return np.where(missing == _BYTES_OF_TEXT, np.uint64(0), words)


def _bits(byte_counts: npt.NDArray[np.int64]) -> Words:
    """Returns the numbers of bits, less than 64: a shift by more is undefined."""
    return (8 * np.minimum(byte_counts, _BYTES_OF_TEXT - 1)).astype(np.uint64)


class LeafLookup:
    """The leaves of a tree, and a lookup of the leaf of each row; can be pickled.

    `leaf_ids` are in key order, held as two buffers instead of as many strings.
    """

    def __init__(self, tree: PartitionTree) -> None:
        leaves = list(tree.leaf_nodes())
        self.leaf_ids = pa.array(map(tree.node_id, leaves), pa.large_string())
        self._nodes = _Nodes(tree, leaves)

    def indexes(self, batch: pa.RecordBatch | pa.Table) -> pa.Int32Array:
        """Returns, for each row, the position of its leaf in `leaf_ids`.

        The batch needs the row keys that the tree is split on, in their Arrow types (as `conform` returns
        them, or large, view or dictionary types) and without nulls.
        """
        return pa.array(self._nodes.find({n: batch.column(n) for n in self._nodes.points}, batch.num_rows))


class _Nodes:
    """The tree as arrays. Nodes have numbers from 0 on, and leaves have the negative numbers ~0, ~1, …."""

    def __init__(self, tree: PartitionTree, leaves: Sequence[int]) -> None:
        arrays = tree.arrays
        # a copy of today's columns: an array whose memory is shared cannot grow
        count = len(arrays.created_epoch)
        sealed, split_key, left, right = (
            np.frombuffer(column[:count], column.typecode)
            for column in (arrays.sealed_epoch, arrays.split_key, arrays.left, arrays.right)
        )
        inner = np.flatnonzero((sealed >= 0) & (sealed <= tree.epoch))
        halves = np.stack([left[inner], right[inner]])
        if arrays.replaced:
            # nodes of another epoch, or no longer in the tree
            inner = np.array([n for n in inner.tolist() if tree.node(tree.node_id(n)) == n], dtype=np.intp)
            halves = np.array([tree.children(n) for n in inner.tolist()], np.int32).reshape(-1, 2).T
        numbers = np.zeros(count, dtype=np.int32)
        numbers[inner] = np.arange(len(inner))
        numbers[leaves] = ~np.arange(len(leaves))
        self.root = numbers[tree.root_node]
        self.left, self.right = (numbers[half] for half in halves)
        self.points: dict[str, list[Any]] = {}
        self.field = np.zeros(len(inner), dtype=np.int32)
        self.rank = np.zeros(len(inner), dtype=np.int32)
        for key in np.unique(split_key[inner]).tolist():
            of_key = np.flatnonzero(split_key[inner] == key)
            points = [arrays.split_point(node) for node in inner[of_key].tolist()]
            distinct = sorted(set(points))
            ranks = {point: position for position, point in enumerate(distinct)}
            self.field[of_key] = len(self.points)
            self.rank[of_key] = [ranks[point] for point in points]
            self.points[tree.schema.row_keys[key].name] = distinct

    def find(self, columns: dict[str, Any], rows: int) -> Ints:
        if not self.points:
            return np.zeros(rows, dtype=np.int32)
        ranks = [rank(columns[name], points) for name, points in self.points.items()]
        # one field's points divide once each: the leaves have the same numbers as the ranks
        if self.is_line:
            return ranks[0]
        return self._descend(np.stack(ranks, axis=1))

    @cached_property
    def is_line(self) -> bool:
        return len(self.points) == 1 and len(next(iter(self.points.values()))) == len(self.rank)

    def _descend(self, ranks: Ints) -> Ints:
        node = np.full(len(ranks), self.root, dtype=np.int32)
        rows = np.arange(len(ranks))
        while len(rows):
            at = node[rows]
            # a rank counts the points at or below a value: point n is above it if the rank is at most n
            below = ranks[rows, self.field[at]] <= self.rank[at]
            node[rows] = np.where(below, self.left[at], self.right[at])
            rows = rows[node[rows] >= 0]  # the others have reached a leaf
        return ~node


class LeafSorter:
    """A sorter that takes rows with the numbers of their leaves, and returns the rows by leaf, then by key.

    With `by_leaf=False` it sorts by key alone. Among rows with equal keys, the largest values of the
    `descending` columns come first. Those of these columns that the schema lacks are not returned.

    It holds about twice `memory_bytes` at once: a thread sorts and spills a run while the next run comes in.
    It is a context manager, which deletes its temporary files at the end. Raises `JobFailed` if the temporary
    disk is full.
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
        self._bounds: list[tuple[Key, Key]] = []
        """The first and the last key of each run."""
        self._thread: ThreadPoolExecutor | None = None
        self._spilling: Future[None] | None = None
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self.counts: npt.NDArray[np.int64] = np.zeros(leaf_count, dtype=np.int64)

    def __enter__(self) -> LeafSorter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, batch: pa.RecordBatch, leaves: pa.Int32Array) -> None:
        """Adds rows, as `conform` returns them, with the position of each row's leaf."""
        self.counts += np.bincount(leaves.to_numpy(), minlength=len(self.counts))
        if self._by_leaf:
            batch = batch.append_column(LEAF, leaves)
        batch = batch.select(self._columns)
        if self._held and self._held_bytes + batch.nbytes > self._run_bytes:
            self._spill()
        self._held.append(batch)
        self._held_bytes += batch.nbytes

    def sorted_batches(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows in order, without the leaf; can be called once."""
        if self._spilling is None:
            if self._held:
                yield from self._sorted(self._take_held(), self._names)
            return
        if self._held:
            self._spill()
        self._spilling.result()
        if self._runs_follow_each_other():
            yield from self._chained()
            return
        while len(self._runs) > MERGED_RUNS_MAX:
            first, self._runs = self._runs[:MERGED_RUNS_MAX], self._runs[MERGED_RUNS_MAX:]
            self._write_run(self._merged(first, self._columns))
            for run in first:
                run.unlink()
        yield from self._merged(self._runs, self._names)

    @property
    def is_small(self) -> bool:
        """True if the rows are sorted at once, so that a thread would cost more than it saves."""
        return self._spilling is None and self.counts.sum() <= SMALL_ROWS

    @property
    def _run_bytes(self) -> int:
        """The size of a run in bytes.

        The first run may use all memory. Later runs use half, since the other half is being spilled.
        """
        return self._memory_bytes if self._spilling is None else self._memory_bytes // 2

    def _runs_follow_each_other(self) -> bool:
        """Returns whether each run begins after the end of the run before it, so that no merge is needed."""
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
        """Returns the rows in memory, each column in one piece; the caller then owns their memory."""
        held, self._held, self._held_bytes = self._held, [], 0
        if len(held) == 1:
            return pa.Table.from_batches(held)
        schema = held[0].schema
        columns = [batch.columns for batch in held]
        held.clear()
        pieces = [list(column) for column in zip(*columns, strict=True)]
        columns.clear()
        with closing(mapped_ahead(_whole, _taken(pieces), COLUMNS_AT_ONCE)) as made:
            return pa.Table.from_arrays(list(made), schema=schema)

    def _sorted(self, rows: pa.Table, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        order = sort_indices(rows, self._order, self._descending)
        rows = rows.select(names)
        if order is None:
            yield from rows.to_batches(STREAM_ROWS)
            return
        at_once = max(1, min(TAKEN_ROWS, TAKEN_BYTES * len(rows) // max(1, rows.nbytes)))
        ordered = RowsInOrder(rows, order, self._memory_bytes // 4)
        for start in range(0, len(rows), at_once):
            yield from _divided(ordered.piece(start, at_once))

    def _spill(self) -> None:
        """Sorts the held rows and writes them to disk in a thread, once the run before has been written."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dormouse-spill")
        if self._spilling is not None:
            self._spilling.result()
        self._spilling = self._thread.submit(self._spill_run, self._take_held())

    def _spill_run(self, rows: pa.Table) -> None:
        bounds: list[Key] = []

        def bounded() -> Iterator[pa.RecordBatch]:
            for batch in self._sorted(rows, self._columns):
                for row in (0, batch.num_rows - 1):
                    bounds.append(tuple(batch.column(name)[row].as_py() for name in self._order))
                yield batch

        self._write_run(bounded())
        self._bounds.append((bounds[0], bounds[-1]))

    def _write_run(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._made += 1
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp("-ingest", dir=temporary_folder()))
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
        """Yields the merged rows of some runs, streamed by DataFusion."""
        options = {"datafusion.execution.parquet.schema_force_view_types": "false"}
        try:
            context = sorted_session(options=options, row_bytes=max(map(_row_bytes, runs)))
            with panics_as_errors():
                rows = union([sorted_file(context, run, self._order, self._descending) for run in runs])
                order = key_order(self._order, self._descending)
                merged = rows.sort(*order).select(*map(column, names))
                for batch in merged.execute_stream():
                    yield batch.to_pyarrow()
        except Exception as error:
            raise JobFailed(f"cannot merge sorted runs: {one_line(error)}") from error


def _divided(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    return (rows.slice(start, STREAM_ROWS) for start in range(0, rows.num_rows, STREAM_ROWS))


def _taken(pieces: list[list[pa.Array]]) -> Iterator[list[pa.Array]]:
    """Yields each item and drops it from the list, so that only the receiver holds it."""
    pieces.reverse()
    while pieces:
        yield pieces.pop()


def _row_bytes(run: Path) -> float:
    groups = pq.read_metadata(run)
    total = sum(groups.row_group(number).total_byte_size for number in range(groups.num_row_groups))
    return float(total / max(1, groups.num_rows))


def _whole(pieces: list[pa.Array]) -> pa.Array:
    whole = joined(pieces)
    pieces.clear()
    return whole
