"""The partition store: the partition tree of one table. Every change of its leaves begins a new epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import UUID

import psycopg

from dormouse.errors import PartitionNotFound
from dormouse.model.file_reference import SplitFileReferenceRequest
from dormouse.model.partition_tree import (
    Partition,
    PartitionRow,
    PartitionTree,
    TreeArrays,
    tree_from_split_points,
)
from dormouse.model.region import KeyValue, Range
from dormouse.model.table import TableProperties, TableRecord
from dormouse.model.types import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import rows_of, run_transaction
from dormouse.state.files.layout import ITS_PARTITION, OwnTables, reference_from_row
from dormouse.state.scaling import Scaling
from dormouse.state.trees import CHANGES_MAX, TreeCache, TreeReader, partition_from_row

PAGE_ROWS = 10_000
ONE_KEY_LEAVES_MAX = 1_000
REST_SECONDS = 900.0
"""The age of new leaves, in seconds, from which maintenance may merge them.

Younger ones may be about to get rows.
"""
WALK_NODES_MAX = 2_000
_QUERIES = load(__package__ or "", "partitions")


@dataclass(frozen=True, slots=True)
class LeafRows:
    """The number of rows of a leaf, summed over its references.

    `exact_row_count` is the part of it that was counted exactly; the rest is estimated.
    """

    partition_id: str
    row_count: int
    exact_row_count: int


@dataclass(frozen=True, slots=True)
class FullLeaf:
    """A leaf that is marked as full. `row_count` is the sum over its references."""

    partition_id: str
    row_count: int
    marks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SmallPair:
    """Two leaves that are the halves of one partition and have few rows together.

    `row_count` is the sum over the references of all three. `rested_seconds` is the time for which both
    halves have been leaves.
    """

    partition_id: str
    left_id: str
    right_id: str
    row_count: int
    rested_seconds: float
    marks: tuple[int, ...]


def rows_to_split(properties: TableProperties) -> int:
    """Returns the number of rows at which a leaf is split."""
    return max(properties.split_threshold_rows, properties.split_min_rows)


def split_criteria(properties: TableProperties) -> dict[str, Any]:
    """Returns the criteria by which leaves are marked to be split."""
    return {"row_count_min": rows_to_split(properties)}


def merge_criteria(properties: TableProperties) -> dict[str, Any]:
    """Returns the criteria by which pairs of leaves are marked to be merged."""
    return {"row_count_max": rows_to_merge(properties) or 0}


def rows_to_merge(properties: TableProperties) -> int | None:
    """Returns the number of rows below which two leaves are merged, or None if leaves are never merged.

    It is at most three quarters of `rows_to_split`, so that a merged leaf is not soon split again.
    """
    wanted = properties.merge_threshold_rows
    return None if wanted is None else min(wanted, rows_to_split(properties) * 3 // 4)


def _leaf_rows(rows: Iterable[tuple[str, Any, Any]]) -> list[LeafRows]:
    # the sums are numeric, since they may exceed a bigint
    return [LeafRows(partition_id, int(count), int(exact)) for partition_id, count, exact in rows]


class PartitionStore:
    """The partitions of one table: its tree, its leaves, and the references of partitions above leaves."""

    def __init__(self, supplier: Supplier, table: TableRecord, trees: TreeCache | None = None) -> None:
        self._supplier = supplier
        self._table = table
        self._own = OwnTables(supplier, table)
        self._schema = table.schema
        self._trees = TreeCache() if trees is None else trees
        self._reader = TreeReader(table)
        self._scaling = Scaling(self._own)

    def create(self, conn: psycopg.Connection[Any], split_points: Sequence[KeyValue] = ()) -> None:
        """Creates the tree of epoch 0, in the transaction that creates the table."""
        numbers = count()
        partitions = tree_from_split_points(self._schema, split_points, lambda: f"0-{next(numbers)}")
        self._scaling.create(conn, partitions)

    def tree(self) -> PartitionTree:
        """Returns the tree at the current epoch. If a tree is cached, reads only the changes since then."""
        return self._reading(self.tree_in)

    def tree_in(self, conn: psycopg.Connection[Any]) -> PartitionTree:
        """Returns the tree at the epoch that the next statement on the connection sees."""
        epoch, made_at = self._reader.epoch(conn)
        return self.at(epoch, conn, made_at=made_at)

    def cached(self) -> PartitionTree | None:
        """Returns the newest tree in the cache, without a query; None if none is cached."""
        arrays = self._trees.get(self._table.table_id)
        return None if arrays is None else PartitionTree(arrays, arrays.epoch, self._schema)

    def is_requested_again(self) -> bool:
        """Returns True if the tree is worth caching: it was requested before, and would fit into the cache.

        Records the request.
        """
        return self._trees.is_requested_again(self._table.table_id)

    def at(
        self, epoch: int, conn: psycopg.Connection[Any] | None = None, *, made_at: int | None = None
    ) -> PartitionTree:
        """Returns the tree at an epoch.

        If a tree is cached, reads only the changes since then; otherwise reads all of it. A tree from before
        the last merge is read and cached separately. When several threads need a tree, one of them reads it.

        `conn`, if given, must see the epoch. `made_at` is the database's time of the epoch, in microseconds
        since 1970. A cached tree with another time for the epoch is read again. Raises `TableNotFound`,
        `EpochNotFound` when the epoch was forgotten, and ValueError when the table has not reached the epoch
        yet.
        """
        table_id = self._table.table_id
        for key in (table_id, (table_id, epoch)):
            arrays = self._trees.get(key)
            if arrays is not None and arrays.knows(epoch) and arrays.agrees(epoch, made_at):
                return PartitionTree(arrays, epoch, self._schema)
        if conn is not None:
            return self._read(conn, epoch, made_at)
        return self._reading(lambda conn: self._read(conn, epoch, made_at))

    def walk(
        self,
        conn: psycopg.Connection[Any],
        ranges: Mapping[str, Range],
        nodes_max: int = WALK_NODES_MAX,
        *,
        epoch: int | None = None,
    ) -> PartitionTree | None:
        """Returns the part of the tree that overlaps `ranges`, which has ranges by the names of row keys.

        Runs one statement, which looks up each partition by its key. `epoch` defaults to the current epoch.
        Returns None when more than `nodes_max` partitions overlap.
        """
        return self._reader.walk(conn, ranges, nodes_max, epoch)

    def _reading(self, work: Callable[[psycopg.Connection[Any]], PartitionTree]) -> PartitionTree:
        return run_transaction(self._supplier, work, read_only=True, operation="tree")

    def _read(self, conn: psycopg.Connection[Any], epoch: int, made_at: int | None) -> PartitionTree:
        table_id = self._table.table_id
        # the lock is taken with a connection in hand: the thread that reads must never wait for a connection
        # of a thread that waits here
        with self._trees.loading(table_id):
            arrays = self._brought_to(conn, self._trees.get(table_id), epoch, made_at)
            self._trees.put(table_id, arrays)
            if not arrays.knows(epoch):
                older = self._trees.get((table_id, epoch))
                if older is None or not older.agrees(epoch, made_at):
                    older = self._reader.whole_at(conn, epoch)
                    self._trees.put((table_id, epoch), older)
                arrays = older
            if made_at is not None:
                arrays.note(epoch, made_at)
        return PartitionTree(arrays, epoch, self._schema)

    def _brought_to(
        self, conn: psycopg.Connection[Any], arrays: TreeArrays | None, epoch: int, made_at: int | None
    ) -> TreeArrays:
        """Returns the tree at `epoch` or later: `arrays` with the changes since then, or a tree read anew."""
        if (
            arrays is None
            or epoch > arrays.epoch + CHANGES_MAX
            or not arrays.agrees(epoch, made_at)
            or arrays.is_mostly_gone
        ):
            arrays = self._reader.whole(conn)
        if epoch > arrays.epoch:
            changes = self._reader.changes(conn, arrays, epoch)
            if changes is None:
                return self._reader.whole(conn)
            self._extend(arrays, changes, epoch)
        return arrays

    def _extend(self, arrays: TreeArrays, changes: list[PartitionRow], epoch: int) -> None:
        try:
            arrays.extend(changes, epoch)
        except BaseException:  # also KeyboardInterrupt: no caller may use a tree with half of a change
            self._trees.drop(self._table.table_id)
            raise

    def partition(self, partition_id: str) -> Partition:
        """Returns one partition, which is looked up by its id, without the tree.

        Raises `PartitionNotFound`.
        """
        partitions = self.partitions_in([partition_id] if is_text(partition_id) else [])
        if partition_id not in partitions:
            message = f"table {self._table.name!r} has no partition {partition_id!r}"
            raise PartitionNotFound(message, table=self._table.name, partition_id=partition_id)
        return partitions[partition_id]

    def root(self) -> Partition:
        return self.tree().root

    def leaves(self) -> tuple[Partition, ...]:
        """Returns the leaves in the order of the tree, from left to right."""
        return self.tree().leaves

    def split(
        self,
        partition_id: str,
        point: KeyValue,
        field: str | None = None,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> tuple[Partition, Partition]:
        """Divides a leaf into two, and returns these.

        Keys whose `field` is below `point` belong to the left one. `field` defaults to the first row key.
        With `conn`, the split is part of the caller's transaction. Raises:

        - `PartitionNotFound`;
        - `PartitionNotActive` when the partition was already divided or merged;
        - `ConcurrentScale` when another request divided or merged it meanwhile;
        - `InvalidRange` when the point is no value of the field inside the partition, above its minimum.
        """
        split = field or self._schema.row_keys[0].name, point
        left, right = self._scaling.scale([partition_id], [split], None, conn)
        return left, right

    def merge(self, partition_ids: Iterable[str]) -> Partition:
        """Merges leaves into one, and returns the new leaf. They must be all leaves below one partition.

        The new leaf takes that partition's place, and the references move to it. Raises the errors of
        `scale`.
        """
        [leaf] = self.scale(partition_ids, [])
        return leaf

    def scale(
        self,
        sealed_ids: Iterable[str],
        splits: Iterable[tuple[str, KeyValue]],
        request_id: str | None = None,
    ) -> list[Partition]:
        """Divides a leaf, or merges leaves and divides the result, as one epoch; returns the new leaves.

        `sealed_ids` are one leaf, or all leaves below one partition. `splits` are (field, point) pairs, which
        are applied in order. Each divides every new leaf that has the point strictly inside. Repeating a
        request with the same `request_id` returns the same answer. After an error, nothing has changed.
        Raises:

        - `PartitionNotFound`;
        - `PartitionNotActive` when a partition was already divided or merged;
        - `ConcurrentScale` when another request divided or merged one meanwhile;
        - `InvalidRange` when `sealed_ids` are not all leaves below one partition, when a split divides
          nothing, or when another request had the same `request_id`;
        - for merges: `FileReferenceAssignedToJob` when a job holds their files, `NotWhole` when a file also
          has rows of other partitions, and `TableBusy`.
        """
        return self._scaling.scale(sealed_ids, splits, request_id)

    # Work for maintenance: full leaves, small pairs, references above the leaves. `OwnTables.look` finds it
    # among what has changed, and marks it until maintenance has dealt with it.

    def leaf_rows(self) -> list[LeafRows]:
        """Returns the numbers of rows of all leaves that have files; reads all references."""
        return _leaf_rows(self._rows("row_counts", scans=True))

    def leaf_rows_in(self, partition_ids: Iterable[str]) -> list[LeafRows]:
        """Returns the numbers of rows of those of the partitions that have files."""
        return _leaf_rows(self._rows("row_counts_in", partition_ids=list(partition_ids)))

    def page(self, after: str, limit: int, *, leaves: bool = False) -> list[Partition]:
        """Returns at most `limit` partitions whose id is greater than `after`, sorted by id.

        With `leaves`, returns leaves only.
        """
        if not is_text(after):
            return []
        rows = self._rows("partition_page", after=after, limit=limit, leaves=leaves)
        return [partition_from_row(self._table.schema, row) for row in rows]

    def partitions_in(self, partition_ids: Iterable[str]) -> dict[str, Partition]:
        """Returns partitions in their current state, by id, without the tree. Unknown ids are absent."""
        rows = self._rows("partitions_in", partition_ids=list(partition_ids))
        return {row[0]: partition_from_row(self._table.schema, row) for row in rows}

    def look_for_full_leaves(self) -> int:
        """Marks the leaves with enough rows to be split; returns the number of marked leaves.

        Reads the leaves that have changed since the last look or are marked, and once a day all leaves.
        """
        values = split_criteria(self._table.properties)
        return int(self._own.look("splits", values, lambda: _QUERIES["look_for_full_leaves"]))

    def full_leaves(self) -> Iterator[FullLeaf]:
        """Yields the leaves that are marked as full, sorted by id; reads one page at a time."""
        after = ""
        while page := self._rows("full_leaves", after=after, limit=PAGE_ROWS):
            for partition_id, marks, row_count in page:
                if row_count is not None:
                    yield FullLeaf(partition_id, int(row_count), tuple(marks))
            after = page[-1][0]

    def look_for_small_pairs(self) -> int:
        """Marks the partitions whose halves are leaves with few enough rows to be merged.

        Returns the number of marked partitions. Reads the same leaves as `look_for_full_leaves`, and the
        partitions above them.
        """
        values = merge_criteria(self._table.properties)
        return int(self._own.look("merges", values, lambda: self._of_pairs("look_for_small_pairs")))

    def small_pairs(self) -> Iterator[SmallPair]:
        """Yields the pairs of leaves that are marked to be merged, sorted by the partition above them."""
        return self._pairs("small_pairs")

    def all_small_pairs(self) -> Iterator[SmallPair]:
        """Yields all pairs of leaves that should be merged, with or without a mark; reads all references."""
        return self._pairs("all_small_pairs")

    def _pairs(self, name: str) -> Iterator[SmallPair]:
        row_count_max = rows_to_merge(self._table.properties) or 0
        after: str | None = ""
        while after is not None:
            values = {"after": after, "limit": PAGE_ROWS, "row_count_max": row_count_max}
            page = self._own.rows(self._of_pairs(name), values, operation=name)
            for _, partition_id, left_id, right_id, row_count, seconds, marks in page:
                if partition_id is not None:
                    rested = float(seconds)
                    yield SmallPair(partition_id, left_id, right_id, int(row_count), rested, tuple(marks))
            after = page[-1][0] if page else None

    def _of_pairs(self, name: str) -> Query:
        # in this order, since found_pairs contains its_halves
        return _QUERIES[name].including(
            found_pairs=_QUERIES["found_pairs"], its_halves=_QUERIES["its_halves"]
        )

    def settle(self, marks: Iterable[int]) -> None:
        """Deletes marks of work that is done.

        The next look then finds a partition only if the partition has changed, or after a day.
        """
        work = rows_of(_QUERIES["settle"], {"marks": list(marks)})
        run_transaction(self._supplier, work, operation="delete marks of leaves")

    def note_one_key(self, partition_id: str, *, is_one_key: bool) -> None:
        """Records whether all rows of a full leaf have the same key. Such a leaf cannot be divided."""
        key = {"table_id": self._table.table_id, "partition_id": partition_id}
        work = rows_of(_QUERIES["note_one_key"], {**key, "is_one_key": is_one_key})
        run_transaction(self._supplier, work, operation="record a one-key leaf")

    def one_key_leaves(self) -> tuple[str, ...]:
        """Returns the ids of at most `ONE_KEY_LEAVES_MAX` full leaves in which all rows have the same key.

        If rows with other keys were added since, a leaf remains in the result until the next round of splits.
        """
        row_count_min = rows_to_split(self._table.properties)
        found = self._rows("one_key_leaves", row_count_min=row_count_min, limit=ONE_KEY_LEAVES_MAX)
        return tuple(partition_id for (partition_id,) in found)

    def count_above_leaves(self) -> int:
        """Returns the number of requests that `references_above_leaves` would yield now."""
        self._look_above()
        return int(self._rows("count_above")[0][0])

    def references_above_leaves(self) -> Iterator[SplitFileReferenceRequest]:
        """Yields requests that push the unassigned references of divided partitions down by one level.

        They are sorted by partition, and read one page at a time. References that are added meanwhile are
        left out.
        """
        till = self._look_above()
        after: tuple[str, UUID] = ("", UUID(int=0))
        while True:
            page = self._rows(
                "references_above", after_partition=after[0], after_file=after[1], till=till, limit=PAGE_ROWS
            )
            if not page:
                return
            for file_id, left_id, right_id, *columns in page:
                reference = reference_from_row(columns)
                after = (reference.partition_id, file_id)
                yield SplitFileReferenceRequest.split_to_children(reference, left_id, right_id)

    def _look_above(self) -> Any:
        return self._own.look("pushes", {}, lambda: _QUERIES["look_for_references_above"])

    def _rows(self, name: str, *, scans: bool = False, **values: Any) -> list[Any]:
        """Returns the rows of a query on the table's own PostgreSQL tables."""
        query = _QUERIES[name].including(above=_QUERIES["above"], its_partition=ITS_PARTITION)
        return self._own.rows(query, values, scans=scans, operation=name)
