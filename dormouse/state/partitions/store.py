"""The partition store: the tree of one table, and every change of it as an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import psycopg

from dormouse.errors import PartitionNotFound
from dormouse.model.partition_tree import Partition, PartitionTree, tree_from_split_points
from dormouse.model.region import KeyValue, Range
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text
from dormouse.model.tree_arrays import PartitionRow, TreeArrays
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction
from dormouse.state.files.layout import dropped_tables
from dormouse.state.partitions.leaves import Leaves
from dormouse.state.partitions.rows import partition_from_row
from dormouse.state.partitions.scaling import Scaling
from dormouse.state.partitions.trees import CHANGES_MAX, TreeCache, TreeReader

WALK_NODES_MAX = 2_000
_QUERIES = load(__package__ or "", "store")


class PartitionStore(Leaves):
    """The partitions of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord, trees: TreeCache | None = None) -> None:
        super().__init__(supplier, table)
        self._schema = table.schema
        self._trees = TreeCache() if trees is None else trees
        self._reader = TreeReader(table)
        self._scaling = Scaling(supplier, self._own)

    def create(self, conn: psycopg.Connection[Any], split_points: Sequence[KeyValue] = ()) -> None:
        """Makes the tree of epoch 0; part of creating the table."""
        numbers = count()
        partitions = tree_from_split_points(self._schema, split_points, lambda: f"0-{next(numbers)}")
        self._scaling.create(conn, partitions)

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
        return None if arrays is None else PartitionTree(arrays, arrays.epoch, self._schema)

    def is_asked_again(self) -> bool:
        """Whether a tree that is not cached was asked for before, and would be kept."""
        return self._trees.is_asked_again(self._table.table_id)

    def at(
        self, epoch: int, conn: psycopg.Connection[Any] | None = None, *, made_at: int | None = None
    ) -> PartitionTree:
        """The tree at an epoch, which the connection sees if it is given one; `TableNotFound`.

        Of a tree that is known only what has changed is read, else all of it; one of before the last merge
        is read for itself. What several threads need at once one of them reads. ValueError when the table is
        not at the epoch yet. With `made_at`, when the epoch was made, as the database tells: a known tree
        that has another past is read anew.
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
        """A partial tree at the current epoch, or an older one: what overlaps a range of each key named.

        One statement, which looks up each of them by key. None when there are more than `nodes_max`.
        """
        return self._reader.walk(conn, ranges, nodes_max, epoch)

    def _reading(self, work: Callable[[psycopg.Connection[Any]], PartitionTree]) -> PartitionTree:
        return run_transaction(self._supplier, work, read_only=True, operation="tree")

    def _read(self, conn: psycopg.Connection[Any], epoch: int, made_at: int | None) -> PartitionTree:
        table_id = self._table.table_id
        # with a connection in hand, so that the reader never waits for one of those that wait here
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
        """The tree of now, or of an epoch that is not older than the one known."""
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
        Raises `PartitionNotFound`, `PartitionNotActive` when it was divided or merged already,
        `ConcurrentScale` when that happened meanwhile, and `InvalidRange` when the point is not one of the
        field's values inside the partition, above its minimum.
        """
        split = field or self._schema.row_keys[0].name, point
        left, right = self._scaling.scale([partition_id], [split], None, conn)
        return left, right

    def merge(self, partition_ids: Iterable[str]) -> Partition:
        """Merges leaves, which must be all that lie below one partition; gives the new leaf in its place.

        Their references move to it. Raises what `scale` does.
        """
        [leaf] = self.scale(partition_ids, [])
        return leaf

    def scale(
        self,
        sealed_ids: Iterable[str],
        splits: Iterable[tuple[str, KeyValue]],
        request_id: str | None = None,
    ) -> list[Partition]:
        """Divides a leaf, or merges leaves and divides what that makes, as one epoch; gives the new leaves.

        `sealed_ids` are one leaf, or all that lie below one partition. `splits` are (field, point), applied
        in order: each divides every new leaf that the point lies strictly inside of. The same request again,
        with its `request_id`, gives the same answer; another with that id is `InvalidRange`. After an error
        nothing is changed.

        Raises `PartitionNotFound`; `PartitionNotActive` when one was divided or merged already,
        `ConcurrentScale` when that happened meanwhile; `InvalidRange` when they are no list of leaves below
        one partition, or a split divides nothing. Of merges: `FileReferenceAssignedToJob` when a job holds
        files of theirs, `NotWhole` when a file also holds other partitions' rows, and `TableBusy`.
        """
        return self._scaling.scale(sealed_ids, splits, request_id)

    def _partition(self, conn: psycopg.Connection[Any], partition_id: str) -> Partition:
        possible = partition_id if is_text(partition_id) else ""
        row = self._execute(conn, "partition", partition_id=possible).fetchone()
        if row is None:
            said = f"table {self._table.name!r} has no partition {partition_id!r}"
            raise PartitionNotFound(said, table=self._table.name, partition_id=partition_id)
        return partition_from_row(self._schema, row)

    def _execute(self, conn: psycopg.Connection[Any], name: str, **values: Any) -> psycopg.Cursor[Any]:
        with dropped_tables(self._table):
            return conn.execute(_QUERIES[name].on(), {**values, "table_id": self._table.table_id})
