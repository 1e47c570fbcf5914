"""The partition tree: regions of the key space, halved again and again; the leaves hold the live data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dormouse.errors import InvalidKey, InvalidRange, PartitionNotFound
from dormouse.model.region import KeyValue, Range, Region, check_key, compare, encode_value, min_value
from dormouse.model.schema import Schema
from dormouse.model.tree_arrays import NONE, TreeArrays

ROOT = "root"
"""A table's first partition; once its leaves are merged, the root is another."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a partition was divided: rows whose `field` is below `point` went left."""

    field: str
    point: KeyValue


@dataclass(frozen=True, slots=True)
class Partition:
    """A node of the tree. `child_ids` is (left, right), or empty for a leaf."""

    partition_id: str
    parent_id: str | None
    region: Region
    child_ids: tuple[str, ...] = ()
    split: Split | None = None

    @property
    def is_leaf(self) -> bool:
        return not self.child_ids


class PartitionTree:
    """The partitions of a table at one epoch, which the arrays know: `tree[partition_id]`.

    A light view of arrays that all epochs share: partitions are made when asked for. What walks far does it
    by node, which is a partition's row number in the arrays, the same at every epoch.

    A partial tree lacks some partitions: as a child, one of these is the node -1, and has the id "".
    """

    def __init__(self, arrays: TreeArrays, epoch: int, schema: Schema | None = None) -> None:
        """`schema` names the row keys, which may have been called differently when the arrays were read."""
        self.arrays = arrays
        self.schema = schema or arrays.schema
        self.epoch = epoch

    @property
    def root_node(self) -> int:
        arrays = self.arrays
        root = arrays.root
        return arrays.at(root, self.epoch) if arrays.replaced else root

    def node(self, partition_id: str) -> int | None:
        """The node of a partition; None when there is none at this epoch."""
        arrays = self.arrays
        node = arrays.find(partition_id)
        if node == NONE or arrays.created_epoch[node] > self.epoch:
            return None
        gone = arrays.merged_epoch.get(node) if arrays.merged_epoch else None
        return node if gone is None or gone > self.epoch else None

    def node_id(self, node: int) -> str:
        return self.arrays.partition_id(node)

    def parent(self, node: int) -> int:
        """-1 for the root."""
        return self.arrays.parent[node]

    def children(self, node: int) -> tuple[int, int] | None:
        """The left and the right child, -1 for one that a partial tree lacks; None for a leaf."""
        arrays = self.arrays
        if not 0 <= arrays.sealed_epoch[node] <= self.epoch:
            return None
        left, right = arrays.left[node], arrays.right[node]
        if arrays.replaced:  # looked at last: what was merged meanwhile is there by now
            return arrays.at(left, self.epoch), arrays.at(right, self.epoch)
        return left, right

    def split_of(self, node: int) -> Split:
        """How a node was divided that has children."""
        return Split(self.schema.row_keys[self.arrays.split_key[node]].name, self.arrays.split_point(node))

    def region_of(self, node: int) -> Region:
        """The node's part of the key space, from the splits above it."""
        arrays, mins, maxs = self.arrays, dict[int, int](), dict[int, int]()
        parent, is_upper, split_key = arrays.parent, arrays.is_upper, arrays.split_key
        while (above := parent[node]) != NONE:
            # the nearest split of a key is the narrowest
            (mins if is_upper[node] else maxs).setdefault(split_key[above], above)
            node = above
        names, point = self.schema.row_key_names, arrays.split_point
        return Region(
            {
                names[key]: Range(
                    point(mins[key]) if key in mins else None, point(maxs[key]) if key in maxs else None
                )
                for key in sorted(mins | maxs)
            }
        )

    def leaf_nodes(self) -> Iterator[int]:
        """The leaves, left before right."""
        stack = [self.root_node]
        while stack:
            node = stack.pop()
            children = self.children(node)
            if children is None:
                yield node
            else:
                stack += [child for child in reversed(children) if child != NONE]

    @property
    def leaf_count(self) -> int:
        """How many leaves there are; of a partial tree, how many it has."""
        if self.arrays.is_partial:
            return sum(1 for _ in self.leaf_nodes())
        return (len(self) + 1) // 2

    def __getitem__(self, partition_id: str) -> Partition:
        node = self.node(partition_id)
        if node is None:
            raise PartitionNotFound(f"partition {partition_id!r} does not exist")
        return self._partition(node)

    def __len__(self) -> int:
        return self.arrays.count_at(self.epoch)

    @property
    def root(self) -> Partition:
        return self._partition(self.root_node)

    @property
    def leaves(self) -> tuple[Partition, ...]:
        """The leaves in the order of the tree: left before right. Made anew each time: mind large trees."""
        return tuple(map(self._partition, self.leaf_nodes()))

    def _partition(self, node: int) -> Partition:
        parent, children, region = self.arrays.parent[node], self.children(node), self.region_of(node)
        parent_id = None if parent == NONE else self.node_id(parent)
        if children is None:
            return Partition(self.node_id(node), parent_id, region)
        left_id, right_id = ("" if child == NONE else self.node_id(child) for child in children)
        return Partition(self.node_id(node), parent_id, region, (left_id, right_id), self.split_of(node))

    def key_order_groups(self, leaves: Iterable[int]) -> list[list[int]]:
        """Leaves, by node, in groups such that every key of a group sorts before every key of the next.

        Leaves that were split on a later row key interleave in key order: they share a group, and its rows
        must be merged. A tree split on the first row key alone gives groups of one.
        """
        spans = sorted((*_key_span(self.schema, self.region_of(leaf)), leaf) for leaf in leaves)
        groups: list[list[int]] = []
        reach: tuple[Any, ...] = ()
        for lower, upper, leaf in spans:
            if groups and lower < reach:
                groups[-1].append(leaf)
                reach = max(reach, upper)
            else:
                groups.append([leaf])
                reach = upper
        return groups


class Branch(NamedTuple):
    """A line of the picture of a tree."""

    above: int | None
    """The place of its parent among the branches; None for the root."""

    where: str
    """How it was divided off, or how many leaves there are where no more of them are shown."""

    partition: Partition | None


def outline(tree: PartitionTree, leaves_max: int) -> list[Branch]:
    """How a tree was divided, as a person reads it: parents before children, up to so many leaves."""
    branches = [Branch(None, "everything", tree.root)]
    todo, shown = [(tree.root, 0)], 0
    while todo:
        partition, above = todo.pop()
        for child_id, sign in zip(partition.child_ids, "<≥", strict=False):
            child = tree[child_id]
            shown += child.is_leaf
            if shown > leaves_max:
                return [*branches, Branch(above, f"… {tree.leaf_count} leaves in all", None)]
            assert partition.split is not None  # noqa: S101 it has children
            where = f"{partition.split.field} {sign} {partition.split.point!r}"
            branches.append(Branch(above, where, child))
            todo.append((child, len(branches) - 1))
    return branches


def split_partition(
    schema: Schema, partition: Partition, split: Split, left_id: str, right_id: str
) -> tuple[Partition, Partition, Partition]:
    """The partition with its split and its two children; `InvalidRange` or `InvalidKey` when it cannot be."""
    if split.field not in schema.row_key_names:
        keys = ", ".join(schema.row_key_names)
        raise InvalidRange(f"{split.field!r} is not a row key; partitions split on {keys}")
    field = schema.field(split.field)
    split = Split(split.field, check_key(field, split.point))
    left, right = partition.region.split(field, split.point)
    parent = Partition(
        partition.partition_id, partition.parent_id, partition.region, (left_id, right_id), split
    )
    children = (Partition(i, partition.partition_id, r) for i, r in ((left_id, left), (right_id, right)))
    return (parent, *children)  # type: ignore[return-value]


def tree_from_split_points(
    schema: Schema, points: Sequence[KeyValue], new_id: Callable[[], str]
) -> list[Partition]:
    """A balanced tree whose leaves are divided at the points of the first row key, strictly ascending."""
    field = schema.row_keys[0]
    if isinstance(points, str | bytes) or not isinstance(points, Sequence):
        raise InvalidRange(f"split points must be a list, not {points!r}")
    points = _checked_points(schema, points)
    done: list[Partition] = []
    todo = [(Partition(ROOT, None, Region()), 0, len(points))]
    while todo:
        partition, start, end = todo.pop()
        if start == end:
            done.append(partition)
            continue
        middle = (start + end) // 2
        split = Split(field.name, points[middle])
        parent, left, right = split_partition(schema, partition, split, new_id(), new_id())
        done.append(parent)
        todo += [(right, middle + 1, end), (left, start, middle)]
    return done


def _checked_points(schema: Schema, points: Sequence[KeyValue]) -> list[KeyValue]:
    field, previous = schema.row_keys[0], min_value(schema.row_keys[0].type)
    checked = []
    for given in points:
        try:
            point = check_key(field, given)
        except InvalidKey as error:
            raise InvalidRange(f"split point: {error}") from None
        if compare(point, previous) <= 0:
            raise InvalidRange(
                f"split points of {field.name!r} must ascend and lie above {min_value(field.type)!r}; "
                f"{point!r} follows {previous!r}"
            )
        previous = point
        checked.append(point)
    return checked


def _key_span(schema: Schema, region: Region) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Bounds of a leaf's keys in key order: every key lies in [lower, upper)."""
    lower, upper = [], []
    for field in schema.row_keys:
        item = region.range(field.name)
        lower.append(encode_value(field.type, min_value(field.type) if item.min is None else item.min))
        upper.append((1, b"") if item.max is None else (0, encode_value(field.type, item.max)))
    # only the first field's maximum is exclusive as a bound of the whole key
    return tuple((0, value) for value in lower), (upper[0],)
