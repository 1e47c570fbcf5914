"""The partition tree: regions of the key space, halved again and again; the leaves hold the live data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dormouse.errors import InvalidKey, InvalidRange, PartitionNotFound
from dormouse.model.keys import KeyValue, check_key, encode_value, min_value
from dormouse.model.region import Region, compare
from dormouse.model.schema import Schema

ROOT = "root"


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


class PartitionTree(Collection[Partition]):
    """The partitions of a table at one epoch: `for partition in tree`, or `tree[partition_id]`."""

    def __init__(self, schema: Schema, partitions: Iterable[Partition], epoch: int = 0) -> None:
        self.schema = schema
        self.epoch = epoch
        self._partitions = {p.partition_id: p for p in partitions}

    def __getitem__(self, partition_id: str) -> Partition:
        try:
            return self._partitions[partition_id]
        except KeyError:
            raise PartitionNotFound(f"partition {partition_id!r} does not exist") from None

    def __contains__(self, partition: object) -> bool:
        """Whether it is one of the partitions, or the id of one."""
        if isinstance(partition, Partition):
            return self._partitions.get(partition.partition_id) == partition
        return partition in self._partitions

    def get(self, partition_id: str) -> Partition | None:
        return self._partitions.get(partition_id)

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._partitions.values())

    def __len__(self) -> int:
        return len(self._partitions)

    @cached_property
    def root(self) -> Partition:
        return next(p for p in self._partitions.values() if p.parent_id is None)

    @cached_property
    def leaves(self) -> tuple[Partition, ...]:
        """The leaves in the order of the tree: left before right."""
        return tuple(self._walk(lambda _: True))

    def leaves_in(self, region: Region) -> Iterator[Partition]:
        """The leaves that overlap a region, left before right."""
        return self._walk(lambda p: p.region.overlaps(region))

    def _walk(self, enters: Callable[[Partition], bool]) -> Iterator[Partition]:
        stack = [self.root]
        while stack:
            partition = stack.pop()
            if not enters(partition):
                continue
            if partition.is_leaf:
                yield partition
            stack.extend(self[child] for child in reversed(partition.child_ids))

    def leaf_of(self, key: Mapping[str, KeyValue]) -> Partition:
        """The leaf whose region has the key."""
        partition = self.root
        while partition.split is not None:
            below = compare(key[partition.split.field], partition.split.point) < 0
            partition = self[partition.child_ids[0 if below else 1]]
        return partition

    def ancestors(self, partition_id: str) -> Iterator[Partition]:
        """The parent, its parent, … up to the root."""
        parent = self[partition_id].parent_id
        while parent is not None:
            yield self[parent]
            parent = self[parent].parent_id

    def key_order_groups(self, leaves: Iterable[Partition]) -> list[list[Partition]]:
        """Leaves in groups, such that every key of a group sorts before every key of the next.

        Leaves that were split on a later row key interleave in key order: they share a group, and its rows
        must be merged. A tree split on the first row key alone gives groups of one.
        """
        spans = sorted(((*_key_span(self.schema, leaf), leaf) for leaf in leaves), key=lambda span: span[0])
        groups: list[list[Partition]] = []
        reach: tuple[Any, ...] = ()
        for lower, upper, leaf in spans:
            if groups and lower < reach:
                groups[-1].append(leaf)
                reach = max(reach, upper)
            else:
                groups.append([leaf])
                reach = upper
        return groups


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
    _check_points(schema, points)
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


def _check_points(schema: Schema, points: Sequence[KeyValue]) -> None:
    field, previous = schema.row_keys[0], min_value(schema.row_keys[0].type)
    for point in points:
        try:
            check_key(field, point)
        except InvalidKey as error:
            raise InvalidRange(f"split point: {error}") from None
        if compare(point, previous) <= 0:
            raise InvalidRange(
                f"split points of {field.name!r} must ascend and lie above {min_value(field.type)!r}; "
                f"{point!r} follows {previous!r}"
            )
        previous = point


def _key_span(schema: Schema, leaf: Partition) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Bounds of the leaf's keys in key order: every key lies in [lower, upper)."""
    lower, upper = [], []
    for field in schema.row_keys:
        item = leaf.region.range(field.name)
        lower.append(encode_value(field.type, min_value(field.type) if item.min is None else item.min))
        upper.append((1, b"") if item.max is None else (0, encode_value(field.type, item.max)))
    # only the first field's maximum is exclusive as a bound of the whole key
    return tuple((0, value) for value in lower), (upper[0],)
