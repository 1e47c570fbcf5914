"""The partition store: the tree of one table, and every change of it as an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import psycopg

from dormouse.errors import InvalidKey, InvalidRange, PartitionNotActive, PartitionNotFound, TableNotFound
from dormouse.files.own_tables import dropped_tables
from dormouse.model.keys import KeyValue
from dormouse.model.partition_tree import (
    Partition,
    PartitionTree,
    Split,
    split_partition,
    tree_from_split_points,
)
from dormouse.model.region import Range
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text
from dormouse.model.tree_arrays import PartitionRow, TreeArrays
from dormouse.partitions.leaves import Leaves
from dormouse.partitions.rows import partition_from_row, partition_values
from dormouse.partitions.tree_cache import TreeCache
from dormouse.partitions.trees import CHANGES_MAX, TreeReader
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

WALK_NODES_MAX = 2_000
_QUERIES = load(__package__ or "", "store")


class PartitionStore(Leaves):
    """The partitions of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord, trees: TreeCache | None = None) -> None:
        super().__init__(supplier, table)
        self._schema = table.schema
        self._trees = TreeCache() if trees is None else trees
        self._reader = TreeReader(table)

    def create(self, conn: psycopg.Connection[Any], split_points: Sequence[KeyValue] = ()) -> None:
        """Makes the tree of epoch 0; part of creating the table."""
        numbers = count()
        partitions = tree_from_split_points(self._schema, split_points, lambda: f"0-{next(numbers)}")
        rows = [partition_values(self._table, p, 0, None if p.is_leaf else 0) for p in partitions]
        with conn.cursor() as cursor:
            cursor.executemany(_QUERIES["add_partitions"].on(), rows)
        created = [p.partition_id for p in partitions if p.is_leaf]
        self._execute(conn, "add_epoch", epoch=0, sealed=[], created=created)

    def tree(self) -> PartitionTree:
        """The tree at the current epoch; of one that is known, only what has changed is read."""
        return self._reading(self.tree_in)

    def tree_in(self, conn: psycopg.Connection[Any]) -> PartitionTree:
        """The tree at the epoch that the next statement on a connection sees."""
        epoch, made_at = self._reader.epoch(conn)
        return self.at(epoch, conn, made_at=made_at)

    def cached(self) -> PartitionTree | None:
        """The tree at the newest epoch that is known here, without asking the database."""
        arrays = self._trees.get(self._table.table_id)
        return None if arrays is None else PartitionTree(arrays, arrays.epoch)

    def is_asked_again(self) -> bool:
        """Whether a tree that is not cached was asked for before, and would be kept."""
        return self._trees.is_asked_again(self._table.table_id)

    def at(
        self, epoch: int, conn: psycopg.Connection[Any] | None = None, *, made_at: int | None = None
    ) -> PartitionTree:
        """The tree at an epoch, which the connection sees if it is given one; `TableNotFound`.

        Of a tree that is known only what has changed is read, else all of it. What several threads need at
        once one of them reads. ValueError when the table is not at the epoch yet. With `made_at`, when the
        epoch was made, as the database tells: a known tree that has another past is read anew.
        """
        arrays = self._trees.get(self._table.table_id)
        if arrays is not None and epoch <= arrays.epoch and arrays.agrees(epoch, made_at):
            return PartitionTree(arrays, epoch)
        if conn is not None:
            return self._read(conn, epoch, made_at)
        return self._reading(lambda conn: self._read(conn, epoch, made_at))

    def walk(
        self, conn: psycopg.Connection[Any], ranges: Mapping[str, Range], nodes_max: int = WALK_NODES_MAX
    ) -> PartitionTree | None:
        """A partial tree at the current epoch: the partitions that overlap a range of each key named.

        One statement, which looks up each of them by key. None when there are more than `nodes_max`.
        """
        return self._reader.walk(conn, ranges, nodes_max)

    def _reading(self, work: Callable[[psycopg.Connection[Any]], PartitionTree]) -> PartitionTree:
        return run_transaction(self._supplier, work, read_only=True, operation="tree")

    def _read(self, conn: psycopg.Connection[Any], epoch: int, made_at: int | None) -> PartitionTree:
        table_id = self._table.table_id
        # with a connection in hand, so that the reader never waits for one of those that wait here
        with self._trees.loading(table_id):
            arrays = self._trees.get(table_id)
            if arrays is None or epoch > arrays.epoch + CHANGES_MAX or not arrays.agrees(epoch, made_at):
                arrays = self._reader.whole(conn)
            if epoch > arrays.epoch:
                changes = self._reader.changes(conn, arrays, epoch)
                if changes is None:
                    arrays = self._reader.whole(conn)
                else:
                    self._extend(arrays, changes, epoch)
            if made_at is not None:
                arrays.note(epoch, made_at)
            self._trees.put(table_id, arrays)
        return PartitionTree(arrays, epoch)

    def _extend(self, arrays: TreeArrays, changes: list[PartitionRow], epoch: int) -> None:
        try:
            arrays.extend(changes, epoch)
        except BaseException:  # Ctrl-C, perhaps: no caller may go on with half a change
            self._trees.drop(self._table.table_id)
            raise

    def partition(self, partition_id: str) -> Partition:
        """One partition, looked up by its id without the tree; `PartitionNotFound`."""
        return run_transaction(
            self._supplier,
            lambda conn: self._partition(conn, partition_id),
            read_only=True,
            operation="partition",
        )

    def root(self) -> Partition:
        return self.tree().root

    def leaves(self) -> tuple[Partition, ...]:
        """The leaves, left before right."""
        return self.tree().leaves

    def split(
        self,
        partition_id: str,
        point: KeyValue,
        field: str | None = None,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> tuple[Partition, Partition]:
        """Divides a leaf: keys whose `field` (default: the first row key) is below `point` go left.

        `conn` is inside a transaction that the split becomes part of.
        Raises `PartitionNotFound`, `PartitionNotActive` when it was divided already, and `InvalidRange` when
        the point is not one of the field's values inside the partition, above its minimum.
        """
        split = Split(field or self._schema.row_keys[0].name, point)

        def work(conn: psycopg.Connection[Any]) -> tuple[Partition, Partition]:
            epoch = self._next_epoch(conn)
            parent, left, right = self._divided(conn, partition_id, split, epoch)
            conn.execute(_QUERIES["seal"].on(), partition_values(self._table, parent, None, epoch))
            for child in (left, right):
                conn.execute(
                    _QUERIES["add_partitions"].on(), partition_values(self._table, child, epoch, None)
                )
            created = [left.partition_id, right.partition_id]
            self._execute(conn, "add_epoch", epoch=epoch, sealed=[partition_id], created=created)
            return left, right

        if conn is not None:
            return work(conn)
        return run_transaction(self._supplier, work, operation="split partition")

    def _divided(
        self, conn: psycopg.Connection[Any], partition_id: str, split: Split, epoch: int
    ) -> tuple[Partition, Partition, Partition]:
        partition = self._partition(conn, partition_id)
        if not partition.is_leaf:
            raise PartitionNotActive(
                f"partition {partition_id!r} of table {self._table.name!r} was divided already"
            )
        try:
            return split_partition(self._schema, partition, split, f"{epoch}-0", f"{epoch}-1")
        except InvalidKey as error:
            raise InvalidRange(f"split point: {error}") from None

    def _partition(self, conn: psycopg.Connection[Any], partition_id: str) -> Partition:
        possible = partition_id if is_text(partition_id) else ""
        row = self._execute(conn, "partition", partition_id=possible).fetchone()
        if row is None:
            raise PartitionNotFound(f"table {self._table.name!r} has no partition {partition_id!r}")
        return partition_from_row(self._schema, row)

    def _next_epoch(self, conn: psycopg.Connection[Any]) -> int:
        row = self._execute(conn, "next_epoch").fetchone()
        if row is None:
            raise TableNotFound(f"table {self._table.name!r} does not exist any more")
        return int(row[0])

    def _execute(self, conn: psycopg.Connection[Any], name: str, **values: Any) -> psycopg.Cursor[Any]:
        with dropped_tables(self._table):
            return conn.execute(_QUERIES[name].on(), {**values, "table_id": self._table.table_id})
