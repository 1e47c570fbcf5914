"""Which leaf each row of a batch belongs to, without a Python loop over rows.

The tree's nodes are arrays (split field, rank of the split point, children). A row's key value is ranked once
among all the split points of its field, by binary search; from there the descent compares small integers,
one vectorised step a level. A tree split on one field alone needs no descent: the rank is the leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dormouse.data.ranks import rank
from dormouse.model.partition_tree import PartitionTree

Ints = npt.NDArray[np.int32]


class LeafLookup:
    """The leaves of a tree, and for rows their positions among them. Can be pickled.

    `leaf_ids` are left before right, as two buffers rather than as so many strings.
    """

    def __init__(self, tree: PartitionTree) -> None:
        leaves = list(tree.leaf_nodes())
        self.leaf_ids = pa.array(map(tree.node_id, leaves), pa.large_string())
        self._nodes = _Nodes(tree, leaves)

    def indexes(self, batch: pa.RecordBatch | pa.Table) -> pa.Int32Array:
        """For each row, the position of its leaf in `leaf_ids`.

        The batch needs the row keys that the tree is split on, in their Arrow types (as `conform` gives them,
        or large, view or dictionary forms) and without nulls.
        """
        return pa.array(self._nodes.find({n: batch.column(n) for n in self._nodes.points}, batch.num_rows))


class _Nodes:
    """The tree as arrays; leaves are the numbers ~0, ~1, … so that a child says by its sign what it is."""

    def __init__(self, tree: PartitionTree, leaves: Sequence[int]) -> None:
        arrays = tree.arrays
        # columns as they are now, copied: an array whose memory is shared cannot grow meanwhile
        count = len(arrays.created_epoch)
        sealed, split_key, left, right = (
            np.frombuffer(column[:count], column.typecode)
            for column in (arrays.sealed_epoch, arrays.split_key, arrays.left, arrays.right)
        )
        inner = np.flatnonzero((sealed >= 0) & (sealed <= tree.epoch))
        halves = np.stack([left[inner], right[inner]])
        if arrays.replaced:
            # of another epoch, or not in the tree any more
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
