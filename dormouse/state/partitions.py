"""The partition store: the tree of one table, and every change of it as an epoch."""

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
"""How long maintenance does not merge leaves that were just made: they may be about to be filled."""
WALK_NODES_MAX = 2_000
_QUERIES = load(__package__ or "", "partitions")


@dataclass(frozen=True, slots=True)
class LeafRows:
    """A leaf's rows as its references tell: in all, and those counted exactly."""

    partition_id: str
    row_count: int
    exact_row_count: int


@dataclass(frozen=True, slots=True)
class FullLeaf:
    """A leaf that is marked as full; `row_count` as its references tell."""

    partition_id: str
    row_count: int
    marks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SmallPair:
    """Two leaves, the halves of a partition, that have few rows together, as their references tell.

    `rested_seconds` is how long both have been leaves.
    """

    partition_id: str
    left_id: str
    right_id: str
    row_count: int
    rested_seconds: float
    marks: tuple[int, ...]


def rows_to_split(properties: TableProperties) -> int:
    """How many rows a leaf has that is to be split."""
    return max(properties.split_threshold_rows, properties.split_min_rows)


def rows_to_merge(properties: TableProperties) -> int | None:
    """Leaves with fewer rows together are merged: so few that they are not soon split again. None: never."""
    wanted = properties.merge_threshold_rows
    return None if wanted is None else min(wanted, rows_to_split(properties) * 3 // 4)


def _leaf_rows(rows: Iterable[tuple[str, Any, Any]]) -> list[LeafRows]:
    """Sums are numeric: those of valid counts may be more than a bigint."""
    return [LeafRows(partition_id, int(count), int(exact)) for partition_id, count, exact in rows]


class PartitionStore:
    """The partitions of one table: its tree, its leaves, and the references above them."""

    def __init__(self, supplier: Supplier, table: TableRecord, trees: TreeCache | None = None) -> None:
        self._supplier = supplier
        self._table = table
        self._own = OwnTables(supplier, table)
        self._schema = table.schema
        self._trees = TreeCache() if trees is None else trees
        self._reader = TreeReader(table)
        self._scaling = Scaling(self._own)

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
        found = self.partitions_in([partition_id] if is_text(partition_id) else [])
        if partition_id not in found:
            said = f"table {self._table.name!r} has no partition {partition_id!r}"
            raise PartitionNotFound(said, table=self._table.name, partition_id=partition_id)
        return found[partition_id]

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

    # What maintenance needs: full leaves, small pairs, references above the leaves. They are found by looks
    # at what has changed (`OwnTables.look`), and are marked until they are dealt with.

    def leaf_rows(self) -> list[LeafRows]:
        """All leaves that have files: reads all references."""
        return _leaf_rows(self._rows("row_counts", scans=True))

    def leaf_rows_in(self, partition_ids: Iterable[str]) -> list[LeafRows]:
        """Those of some leaves that have files."""
        return _leaf_rows(self._rows("row_counts_in", partition_ids=list(partition_ids)))

    def page(self, after: str, limit: int, *, leaves: bool = False) -> list[Partition]:
        """At most `limit` partitions, by id, whose id is greater than `after`; all, or the leaves."""
        if not is_text(after):
            return []
        rows = self._rows("partition_page", after=after, limit=limit, leaves=leaves)
        return [partition_from_row(self._table.schema, row) for row in rows]

    def partitions_in(self, partition_ids: Iterable[str]) -> dict[str, Partition]:
        """Some partitions by id, as they are now, whatever the size of the tree; unknown ones are absent."""
        rows = self._rows("partitions_in", partition_ids=list(partition_ids))
        return {row[0]: partition_from_row(self._table.schema, row) for row in rows}

    def look_for_full_leaves(self) -> int:
        """Marks the leaves that have so many rows that they are to be split; gives how many.

        Looks at those that have changed since the last time, or are marked; once a day at all.
        """
        values = {"row_count_min": rows_to_split(self._table.properties)}
        return int(self._own.look("splits", values, lambda: _QUERIES["look_for_full_leaves"]))

    def full_leaves(self) -> Iterator[FullLeaf]:
        """The leaves that are marked as full, by id; streamed."""
        after = ""
        while page := self._rows("full_leaves", after=after, limit=PAGE_ROWS):
            for partition_id, marks, row_count in page:
                if row_count is not None:
                    yield FullLeaf(partition_id, int(row_count), tuple(marks))
            after = page[-1][0]

    def look_for_small_pairs(self) -> int:
        """Marks the partitions of which both halves are leaves, to be merged; gives how many.

        Looks as `look_for_full_leaves` does.
        """
        values = {"row_count_max": rows_to_merge(self._table.properties) or 0}
        return int(self._own.look("merges", values, lambda: self._of_pairs("look_for_small_pairs")))

    def small_pairs(self) -> Iterator[SmallPair]:
        """The pairs of leaves that are marked to be merged, by the partition above; streamed."""
        return self._pairs("small_pairs")

    def all_small_pairs(self) -> Iterator[SmallPair]:
        """Likewise, whether they are marked or not: reads all partitions and references."""
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
        # in this order: one is a part of the other
        return _QUERIES[name].including(
            found_pairs=_QUERIES["found_pairs"], its_halves=_QUERIES["its_halves"]
        )

    def settle(self, marks: Iterable[int]) -> None:
        """What has these marks is dealt with: it is due again only when it changes, or after a day."""
        work = rows_of(_QUERIES["settle"], {"marks": list(marks)})
        run_transaction(self._supplier, work, operation="settle a leaf")

    def note_one_key(self, partition_id: str, *, is_one_key: bool) -> None:
        """Notes whether all rows of a full leaf have one key, so that it cannot be divided."""
        key = {"table_id": self._table.table_id, "partition_id": partition_id}
        work = rows_of(_QUERIES["note_one_key"], {**key, "is_one_key": is_one_key})
        run_transaction(self._supplier, work, operation="note a leaf")

    def one_key_leaves(self) -> tuple[str, ...]:
        """Returns the ids of full leaves of which all rows have one key, at most `ONE_KEY_LEAVES_MAX`.

        A leaf to which rows of other keys were added since is among them until a round of splits looks at it.
        """
        row_count_min = rows_to_split(self._table.properties)
        found = self._rows("one_key_leaves", row_count_min=row_count_min, limit=ONE_KEY_LEAVES_MAX)
        return tuple(partition_id for (partition_id,) in found)

    def count_above_leaves(self) -> int:
        """How many references `references_above_leaves` would give now."""
        self._look_above()
        return int(self._rows("count_above")[0][0])

    def references_above_leaves(self) -> Iterator[SplitFileReferenceRequest]:
        """How to push down, by one level, the unassigned references of partitions that were divided.

        Streamed, by partition. What is pushed meanwhile to partitions that were divided is not among them.
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
        """Of a query on the table's own tables."""
        query = _QUERIES[name].including(above=_QUERIES["above"], its_partition=ITS_PARTITION)
        return self._own.rows(query, values, scans=scans, operation=name)
