"""What maintenance asks of the partitions: which leaves are full, which references are above the leaves.

Both are found by looks at what has changed (`state/files/watermarks.py`), and are marked until they
are dealt with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from dormouse.model.file_reference import SplitFileReferenceRequest
from dormouse.model.partition_tree import Partition
from dormouse.model.properties import TableProperties
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import rows_of, run_transaction
from dormouse.state.files.layout import OwnTables, reference_from_row
from dormouse.state.files.watermarks import ITS_PARTITION, look
from dormouse.state.partitions.rows import partition_from_row

PAGE_ROWS = 10_000
ONE_KEY_LEAVES_MAX = 1_000
REST_SECONDS = 900.0
"""How long maintenance does not merge leaves that were just made: they may be about to be filled."""

_QUERIES = load(__package__ or "", "leaves")


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


def of_one_key(partition_id: str) -> str:
    """Returns a line about a full leaf that cannot be divided."""
    return f"partition {partition_id} is full and cannot be divided: all its rows have one key"


class Leaves:
    """The leaves of one table, and the references above them."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table
        self._own = OwnTables(supplier, table)

    def leaf_rows(self, row_count_min: int) -> list[LeafRows]:
        """All leaves that have files and at least so many rows: reads all references."""
        return _leaf_rows(self._rows("row_counts", scans=True, row_count_min=row_count_min))

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
        return int(look(self._own, "splits", values, lambda: _QUERIES["look_for_full_leaves"]))

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
        return int(look(self._own, "merges", values, lambda: self._of_pairs("look_for_small_pairs")))

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
        return look(self._own, "pushes", {}, lambda: _QUERIES["look_for_references_above"])

    def _rows(self, name: str, *, scans: bool = False, **values: Any) -> list[Any]:
        """Of a query on the table's own tables."""
        query = _QUERIES[name].including(above=_QUERIES["above"], its_partition=ITS_PARTITION)
        return self._own.rows(query, values, scans=scans, operation=name)


def _leaf_rows(rows: Iterable[tuple[str, Any, Any]]) -> list[LeafRows]:
    """Sums are numeric: those of valid counts may be more than a bigint."""
    return [LeafRows(partition_id, int(count), int(exact)) for partition_id, count, exact in rows]
