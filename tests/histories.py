"""Partition histories written directly to the database, without rows, and a naive model of them.

A change replaces any run of neighbours by any other partitions, as in PDP-32. The row key is one LONG.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from trees import below, partitions_of

from dormouse.model.partition_tree import PartitionTree
from dormouse.model.region import Range, Region, encode_value
from dormouse.model.types import LONG
from dormouse.state.context import TableContext
from dormouse.state.partitions import PartitionStore
from tests.stored import query

BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
Bounds = tuple[int | None, int | None]


@dataclass
class Lived:
    """A partition of the model: the epochs during which it was a leaf, and its size when it was sealed."""

    bounds: Bounds
    created: int
    sealed: int | None = None
    merged_id: str | None = None
    row_count: int | None = None
    byte_count: int | None = None

    def was_leaf(self, first: int, last: int) -> bool:
        """Returns whether the partition was a leaf at some epoch from `first` to `last`."""
        return self.created <= last and (self.sealed is None or self.sealed > max(first, self.created))

    def overlaps(self, other: Lived) -> bool:
        (a, b), (c, d) = self.bounds, other.bounds
        return (b is None or c is None or c < b) and (d is None or a is None or a < d)


@dataclass(frozen=True)
class Change:
    """The change of leaves that begins an epoch."""

    at: datetime
    sealed: tuple[str, ...]
    created: tuple[str, ...]
    splits: int = 0
    merges: int = 0


@dataclass
class Story:
    """A history of partitions that grows by changes. At first, its partitions cover the key space."""

    points: Sequence[int] = ()
    partitions: dict[str, Lived] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self._add((), self._made((None, *self.points, None)), BEGAN)

    @property
    def epoch(self) -> int:
        return len(self.changes) - 1

    def leaves(self, epoch: int | None = None) -> list[str]:
        """Returns the leaves at an epoch, in the order of their keys. They are computed from the changes
        alone.
        """
        found = set[str]()
        for change in self.changes[: self.epoch + 1 if epoch is None else epoch + 1]:
            found = (found - {*change.sealed}) | {*change.created}
        return sorted(found, key=self._lower)

    def scale(self, sealed: Sequence[str], points: Sequence[int] = (), seconds: float = 1) -> list[str]:
        """Replaces neighbouring leaves by new ones with boundaries at the points; returns the new ids."""
        whole = [self.partitions[one] for one in sealed]
        edges = (whole[0].bounds[0], *points, whole[-1].bounds[1])
        created = self._made(edges)
        for number, one in enumerate(whole):
            one.sealed, one.merged_id = self.epoch + 1, created[0]
            one.row_count, one.byte_count = 10 * self.epoch + number, 1_000 * self.epoch + number
        self._add(sealed, created, self.changes[-1].at + timedelta(seconds=seconds))
        return created

    def _lower(self, partition_id: str) -> tuple[bool, int]:
        low = self.partitions[partition_id].bounds[0]
        return low is not None, low or 0

    def _made(self, edges: Sequence[int | None]) -> list[str]:
        ids = []
        for low, high in itertools.pairwise(edges):
            ids.append(f"p{self.number}")
            self.partitions[ids[-1]] = Lived((low, high), len(self.changes))
            self.number += 1
        return ids

    def _add(self, sealed: Sequence[str], created: Sequence[str], at: datetime) -> None:
        both = (len(created) > 1, len(sealed) > 1) if sealed else (False, False)
        self.changes.append(Change(at, tuple(sealed), tuple(created), *map(int, both)))


def write(table: TableContext, story: Story) -> None:
    """Writes a history to the database, in place of the table's own."""
    table_id = table.table.table_id
    partitions = [
        (
            table_id, partition_id, one.created, one.sealed, *([_key(bound)] for bound in one.bounds),
            one.sealed, one.merged_id, one.row_count, one.byte_count,
        )
        for partition_id, one in story.partitions.items()
    ]  # fmt: skip
    epochs = []
    for epoch, change in enumerate(story.changes):
        ended = [story.partitions[one] for one in change.sealed]
        sizes = sum(one.row_count or 0 for one in ended), sum(one.byte_count or 0 for one in ended)
        ids = list(change.sealed), list(change.created)
        epochs.append((table_id, epoch, change.at, *ids, change.splits, change.merges, *sizes))
    with table.supplier.connection() as conn, conn.transaction(), conn.cursor() as cursor:
        for name in ("partition", "epoch", "history_chunk", "truncation"):
            cursor.execute(f"delete from {name} where table_id = %s", [table_id])
        _copy(cursor, "partition (table_id, partition_id, created_epoch, sealed_epoch, min_keys, max_keys,"
              " merged_epoch, merged_id, sealed_rows, sealed_bytes)", partitions)  # fmt: skip
        _copy(cursor, "epoch (table_id, epoch, created_at, sealed, created, splits, merges, sealed_rows,"
              " sealed_bytes)", epochs)  # fmt: skip
        cursor.execute("update tables set epoch = %s where table_id = %s", [story.epoch, table_id])


def region(story: Story, partition_id: str) -> Region:
    low, high = story.partitions[partition_id].bounds
    return Region() if low is None and high is None else Region(key=Range(low, high))


def _copy(cursor: Any, columns: str, rows: Sequence[tuple[Any, ...]]) -> None:
    with cursor.copy(f"copy {columns} from stdin") as copy:
        for row in rows:
            copy.write_row(row)


def _key(bound: int | None) -> bytes | None:
    return None if bound is None else encode_value(LONG, bound)


def of(table: TableContext, text: str, *values: Any) -> list[Any]:
    return query(table.supplier, text, *values, table.table.table_id)


def age(table: TableContext, hours: float = 1) -> None:
    """Makes the whole history older by some hours."""
    text = "update {} set {} = {} - make_interval(hours => %s) where table_id = %s"
    for name, column in (("epoch", "created_at"), ("cut", "recorded_at"), ("truncation", "recorded_at")):
        of(table, text.format(name, column, column), hours)
    of(table, "update tables set history_since = history_since - make_interval(hours => %s), created_at = "
       "created_at - make_interval(hours => %s) where table_id = %s", hours, hours)  # fmt: skip
    of(table, text.format("hold", "since", "since"), hours)


def rows(table: TableContext) -> tuple[set[str], set[int]]:
    """Returns the partitions and the epochs that have rows in the database."""
    partitions = of(table, "select partition_id from partition where table_id = %s")
    epochs = of(table, "select epoch from epoch where table_id = %s")
    return {one for (one,) in partitions}, {one for (one,) in epochs}


def scaled(table: TableContext, epochs: int, seed: int = 1) -> dict[int, PartitionTree]:
    """Splits and merges partitions of a table at random; returns the tree after each epoch."""
    chosen, trees, points = random.Random(seed), dict[int, PartitionTree](), iter(range(1_000_000))
    while True:
        store = PartitionStore(table.supplier, table.table)
        tree = store.tree()
        trees[tree.epoch] = tree
        if len(trees) == epochs:
            return trees
        inner = [one for one in partitions_of(tree) if not one.is_leaf]
        if inner and chosen.random() < 0.5:
            store.merge(below(tree, chosen.choice(inner).partition_id))
        else:
            # the last leaf has room above every earlier point
            leaf = tree.leaves[-1] if chosen.random() < 0.5 else chosen.choice(tree.leaves)
            key = leaf.region.range("key")
            low, high = key.min, key.max
            middle = next(points) if high is None else int(high) - 1 if low is None else (low + high) // 2  # type: ignore[operator, call-overload]
            if low is None or middle > low:  # type: ignore[operator]
                store.split(leaf.partition_id, middle)


def leaves_of(tree: PartitionTree) -> list[tuple[str, Any]]:
    return [(leaf.partition_id, leaf.region) for leaf in tree.leaves]
