"""Which leaf each row of a batch belongs to, without a Python loop over rows.

The tree's nodes are arrays (split field, rank of the split point, children). A row's key value is ranked once
among all the split points of its field, by binary search; from there the descent compares small integers,
one vectorised step a level. A tree split on one field alone needs no descent: the rank is the leaf.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dormouse.data.ranks import rank
from dormouse.model.keys import KeyValue
from dormouse.model.partition_tree import Partition, PartitionTree

Ints = npt.NDArray[np.int32]


class LeafLookup:
    """The leaves of a tree, and for rows their positions among them. Can be pickled."""

    def __init__(self, tree: PartitionTree) -> None:
        self.leaves: tuple[Partition, ...] = tree.leaves
        self._nodes = _Nodes(tree)

    def indexes(self, batch: pa.RecordBatch | pa.Table) -> pa.Int32Array:
        """For each row, the position of its leaf in `leaves`.

        The batch needs the row keys that the tree is split on, in their Arrow types (as `conform` gives them,
        or large, view or dictionary forms) and without nulls.
        """
        return pa.array(self._nodes.find({n: batch.column(n) for n in self._nodes.points}, batch.num_rows))


class _Nodes:
    """The tree as arrays; leaves are the numbers ~0, ~1, … so that a child says by its sign what it is."""

    def __init__(self, tree: PartitionTree) -> None:
        inner = [p for p in tree if p.split is not None]
        numbers = {p.partition_id: number for number, p in enumerate(inner)}
        numbers |= {p.partition_id: ~position for position, p in enumerate(tree.leaves)}
        self.root = numbers[tree.root.partition_id]
        self.points = _points_by_field(inner)
        fields = list(self.points)
        ranks = {name: {v: i for i, v in enumerate(points)} for name, points in self.points.items()}
        splits = [p.split for p in inner if p.split is not None]
        self.field = np.array([fields.index(s.field) for s in splits], dtype=np.int32)
        self.rank = np.array([ranks[s.field][s.point] for s in splits], dtype=np.int32)
        self.left = np.array([numbers[p.child_ids[0]] for p in inner], dtype=np.int32)
        self.right = np.array([numbers[p.child_ids[1]] for p in inner], dtype=np.int32)

    def find(self, columns: dict[str, Any], rows: int) -> Ints:
        if not self.points:
            return np.zeros(rows, dtype=np.int32)
        ranks = [rank(columns[name], points) for name, points in self.points.items()]
        # each point of the one field divides once: as many leaves as ranks, in the same order
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
            below = ranks[rows, self.field[at]] <= self.rank[at]
            node[rows] = np.where(below, self.left[at], self.right[at])
            rows = rows[node[rows] >= 0]
        return ~node


def _points_by_field(inner: list[Partition]) -> dict[str, list[KeyValue]]:
    points: dict[str, set[Any]] = {}
    for partition in inner:
        if partition.split is not None:
            points.setdefault(partition.split.field, set()).add(partition.split.point)
    return {name: sorted(values) for name, values in points.items()}
