"""The partition tree: regions of the key space, halved again and again. The leaves hold the live data.

The partitions of all epochs are kept in arrays, a few dozen bytes each. A node is the row number of a
partition in these arrays. Rows are only appended; a split only completes the row of its partition. A change
writes its epochs last, so readers of older epochs can continue meanwhile. When leaves are merged, a new node
replaces the node above them, and the replaced node is remembered for readers of older epochs.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from dormouse.errors import InvalidKey, InvalidRange, PartitionNotFound
from dormouse.model.region import (
    KeyValue,
    Range,
    Region,
    check_key,
    compare,
    decoder_of,
    encode_value,
    min_value,
)
from dormouse.model.schema import Schema

NONE = -1
"""A node number or epoch that means: no parent, no known child, or never divided."""

_SLOTS_MIN = 16
_MOMENTS_MAX = 1_000
_GONE_MIN = 10_000

ROOT = "root"
"""The id of a table's first partition. After all leaves are merged into one, the root has another id."""


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition as stored; `split_key` and `split_point` are None if it was never divided."""

    partition_id: str
    created_epoch: int
    parent_id: str | None = None
    is_upper: bool | None = None
    sealed_epoch: int | None = None
    split_key: int | None = None
    split_point: bytes | None = None
    merged_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Many byte strings: all bytes end to end, and the length of each as 4 bytes, big-endian."""

    lengths: bytes
    joined: bytes


@dataclass(frozen=True, slots=True)
class PartitionColumns:
    """Many stored partitions, by column. Numbers are signed and big-endian.

    Epochs have 8 bytes each, `split_keys` have 2 bytes. For a partition without a split, both its sealed
    epoch and its split key are -1, and its split point is empty. The root's parent id is empty. `are_upper`
    has one byte for each partition, 0 or 1.
    """

    ids: Joined
    created_epochs: bytes
    sealed_epochs: bytes
    split_keys: bytes
    split_points: Joined
    parent_ids: Joined
    are_upper: bytes


class TreeArrays:
    """A table's partitions from `first_epoch` to `epoch`, for one writer and any number of readers."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.epoch = NONE
        """The newest known epoch, or NONE."""
        self.first_epoch = 0
        """The oldest known epoch: partitions that were merged before it are missing."""
        self.made_at: dict[int, int] = {}
        """The times when epochs were made, in microseconds since 1970, for epochs that `note` recorded."""
        self.root = NONE
        """The root of the newest epoch. An older epoch may have had another root."""
        self.merged_epoch: dict[int, int] = {}
        """The epoch at which each merged node left the tree, by node."""
        self.replaced: dict[int, int] = {}
        """The old node that each merge replaced, by the new node that took its place."""
        self.parent = array("i")
        self.left = array("i")
        self.right = array("i")
        self.split_key = array("h")
        self.created_epoch = array("q")
        self.sealed_epoch = array("q")
        self.is_upper = bytearray()
        """One byte for each node: 1 if it is the upper half of its parent, else 0."""
        self._ids, self._id_starts = bytearray(), array("Q", [0])
        self._points, self._point_starts = bytearray(), array("Q")
        self._point_lengths = array("I")
        self._slots = array("i", [NONE]) * _SLOTS_MIN
        # rows loaded by columns are in no order; the rows after them ascend by epoch
        self._loaded_rows, self._loaded_epoch = 0, NONE
        self._missing = 0
        self._merged_epochs = array("q")
        self._decoders = [decoder_of(field.type) for field in schema.row_keys]
        self._lock = threading.Lock()

    @property
    def is_partial(self) -> bool:
        """True if a child of some divided partition is missing."""
        return self._missing > 0

    @property
    def byte_size(self) -> int:
        """The memory that the arrays take, in bytes, without the schema."""
        parts = [part for part in vars(self).values() if isinstance(part, array | bytearray)]
        numbers = 32 * 2 * (len(self.merged_epoch) + len(self.replaced))
        return sum(map(sys.getsizeof, (*parts, self.merged_epoch, self.replaced))) + numbers

    @property
    def is_mostly_gone(self) -> bool:
        """True if the arrays hold so many merged partitions that loading them again would save memory."""
        return len(self.merged_epoch) > max(_GONE_MIN, len(self.created_epoch) // 2)

    def knows(self, epoch: int) -> bool:
        """Returns whether these arrays hold the tree of an epoch."""
        return self.first_epoch <= epoch <= self.epoch

    def agrees(self, epoch: int, made_at: int | None) -> bool:
        """Returns false if the known epoch of this number is not the one that was made at `made_at`.

        `made_at` is in microseconds since 1970. After a restore or failover that lost the last commits, the
        server makes other epochs with the same numbers.
        """
        known = self.made_at.get(epoch)
        return known is None or made_at is None or known == made_at

    def note(self, epoch: int, made_at: int) -> None:
        """Records the time when an epoch was made. Only one thread may call it at a time."""
        if len(self.made_at) >= _MOMENTS_MAX:
            self.made_at = {}
        self.made_at[epoch] = made_at

    def find(self, partition_id: str) -> int:
        """Returns the node of a partition, in whatever epoch it exists, or NONE."""
        return self._find(partition_id.encode("utf-8", "surrogatepass"))

    def partition_id(self, node: int) -> str:
        return self._ids[self._id_starts[node] : self._id_starts[node + 1]].decode()

    def split_point(self, node: int) -> KeyValue:
        """Returns the value at which a partition was divided. `split_key[node]` is the row key's number."""
        start = self._point_starts[node]
        point = self._points[start : start + self._point_lengths[node]]
        return self._decoders[self.split_key[node]](bytes(point))

    def count_at(self, epoch: int) -> int:
        """Returns how many partitions were in the tree at an epoch, divided ones included."""
        if epoch < self._loaded_epoch:
            return sum(created <= epoch for created in self.created_epoch)
        return bisect_right(self.created_epoch, epoch, lo=self._loaded_rows) - bisect_right(
            self._merged_epochs, epoch
        )

    def at(self, node: int, epoch: int) -> int:
        """Returns the node in the place of `node` at an older epoch, back along `replaced`, or NONE."""
        created = self.created_epoch
        while node != NONE and created[node] > epoch:
            node = self.replaced.get(node, NONE)
        return node

    def extend(self, rows: Iterable[PartitionRow], epoch: int) -> None:
        """Updates the arrays to an epoch, from the partitions that were added, divided or merged since.

        It ignores rows that are already known or newer than the epoch. A missing child is NONE.
        """
        with self._lock:
            old = {row.partition_id: row for row in rows if row.created_epoch <= epoch}
            for row in _parents_first(old):
                if self.find(row.partition_id) == NONE:
                    self._append(row)
            for row in old.values():
                if row.split_point is not None and row.sealed_epoch is not None and row.sealed_epoch <= epoch:
                    self._seal(row, row.sealed_epoch)
            gone = [
                (row.merged_epoch, row.partition_id) for row in old.values() if row.merged_epoch is not None
            ]
            for merged_epoch, partition_id in sorted(gone):
                if merged_epoch <= epoch:
                    self._merge(partition_id, merged_epoch)
            self._know(epoch)

    def load(self, pages: Iterable[PartitionColumns], epoch: int) -> None:
        """Loads the whole tree of an epoch, before any reader starts; the caller sets `first_epoch`."""
        with self._lock:
            linked = [(self._append_columns(page), page.parent_ids) for page in pages]
            for new, parent_ids in linked:
                self._link(new, parent_ids)
            self._loaded_rows, self._loaded_epoch = len(self.created_epoch), epoch
            divided = sum(sealed != NONE for sealed in self.sealed_epoch)
            self._missing = self.left.count(NONE) + self.right.count(NONE) - 2 * (self._loaded_rows - divided)
            self._know(epoch)

    def _know(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def _append(self, row: PartitionRow) -> None:
        node, encoded = len(self.created_epoch), row.partition_id.encode()
        self._ids += encoded
        self._id_starts.append(len(self._ids))
        for links in (self.parent, self.left, self.right, self.split_key, self.sealed_epoch):
            links.append(NONE)
        self.is_upper.append(bool(row.is_upper))
        self._point_starts.append(0)
        self._point_lengths.append(0)
        self.created_epoch.append(row.created_epoch)
        self._index(node)
        if row.parent_id is None:
            self._put_in_place(node, self.root)
            self.root = node
        elif (above := self.find(row.parent_id)) != NONE:
            self.parent[node] = above
            halves = self.right if row.is_upper else self.left
            self._put_in_place(node, halves[above])
            # written last: until here, readers find the previous child
            halves[above] = node

    def _put_in_place(self, node: int, before: int) -> None:
        if before != NONE:
            self.replaced[node] = before

    def _seal(self, row: PartitionRow, sealed_epoch: int) -> None:
        node, point = self.find(row.partition_id), row.split_point
        if self.sealed_epoch[node] != NONE:
            return
        assert row.split_key is not None and point is not None  # noqa: S101 it was divided
        self._missing += (self.left[node] == NONE) + (self.right[node] == NONE)
        self.split_key[node] = row.split_key
        self._point_starts[node] = len(self._points)
        self._point_lengths[node] = len(point)
        self._points += point
        # written last: from here on, readers of that epoch see the partition as divided
        self.sealed_epoch[node] = sealed_epoch

    def _merge(self, partition_id: str, merged_epoch: int) -> None:
        node = self.find(partition_id)
        if node not in self.merged_epoch:
            self.merged_epoch[node] = merged_epoch
            self._merged_epochs.append(merged_epoch)

    def _append_columns(self, page: PartitionColumns) -> range:
        """Appends a page of partitions and returns their nodes, not yet linked to parents and children."""
        first = len(self.created_epoch)
        unknown = array("i", [NONE]) * (len(page.ids.lengths) // 4)
        for links in (self.parent, self.left, self.right):
            links.extend(unknown)
        self.split_key.extend(_numbers("h", page.split_keys))
        self.sealed_epoch.extend(_numbers("q", page.sealed_epochs))
        self.is_upper += page.are_upper
        lengths = _numbers("I", page.split_points.lengths)
        self._point_starts.extend(accumulate(lengths[:-1], initial=len(self._points)))
        self._point_lengths.extend(lengths)
        self._points += page.split_points.joined
        self._id_starts.extend(accumulate(_numbers("I", page.ids.lengths), initial=self._id_starts.pop()))
        self._ids += page.ids.joined
        self.created_epoch.extend(_numbers("q", page.created_epochs))
        self._index(first)
        return range(first, len(self.created_epoch))

    def _link(self, nodes: Iterable[int], parent_ids: Joined) -> None:
        """Links nodes to their parents, and the parents to their children."""
        find, parent, halves, is_upper = self._find, self.parent, (self.left, self.right), self.is_upper
        joined, start, last, above = parent_ids.joined, 0, b"", NONE
        for node, length in zip(nodes, _numbers("I", parent_ids.lengths), strict=True):
            if not length:
                self.root = node
                continue
            end = start + length
            if (encoded := joined[start:end]) != last:  # two siblings often follow each other
                last, above = encoded, find(encoded)
            if above != NONE:
                parent[node] = above
                halves[is_upper[node]][above] = node
            start = end

    def _index(self, first: int) -> None:
        """Adds the nodes from `first` on to the hash table of partition ids."""
        count = len(self.created_epoch)
        slots = self._slots
        if 3 * count > 2 * len(slots):
            slots, first = array("i", [NONE]) * (1 << (3 * count // 2).bit_length()), 0
        ids, starts, mask = self._ids, self._id_starts, len(slots) - 1
        start = starts[first]
        for node in range(first, count):
            end = starts[node + 1]
            slot = hash(bytes(ids[start:end])) & mask
            while slots[slot] != NONE:
                slot = (slot + 1) & mask
            slots[slot], start = node, end
        # replaced as a whole, because readers still use the old table
        self._slots = slots

    def _find(self, encoded: bytes) -> int:
        slots, ids, starts = self._slots, self._ids, self._id_starts
        mask = len(slots) - 1
        slot = hash(encoded) & mask
        while (node := slots[slot]) != NONE:
            if ids[starts[node] : starts[node + 1]] == encoded:
                return node
            slot = (slot + 1) & mask
        return NONE


def _parents_first(rows: Mapping[str, PartitionRow]) -> Iterator[PartitionRow]:
    """Yields rows by ascending epoch and, within an epoch, each row after its parent's."""
    done: set[str] = set()
    for row in sorted(rows.values(), key=lambda row: row.created_epoch):
        chain = []
        above: PartitionRow | None = row
        while above is not None and above.partition_id not in done:
            done.add(above.partition_id)
            chain.append(above)
            above = rows.get(above.parent_id or "")
        yield from reversed(chain)


def _numbers(typecode: str, encoded: bytes) -> array[int]:
    numbers = array(typecode, encoded)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


@dataclass(frozen=True, slots=True)
class Split:
    """A split of a partition: the left child has the rows whose `field` is below `point`."""

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
    """The partitions of a table at one epoch. `tree[partition_id]` returns a `Partition`.

    The tree is a view of the arrays that all epochs share, and makes `Partition` objects only on request.
    Code that visits many partitions uses their nodes instead: row numbers, which are the same at every epoch.

    A partial tree lacks some partitions. A missing child has node -1 and the id "".
    """

    def __init__(self, arrays: TreeArrays, epoch: int, schema: Schema | None = None) -> None:
        """Makes a view of `arrays`. `schema` gives the present names of row keys that were renamed."""
        self.arrays = arrays
        self.schema = schema or arrays.schema
        self.epoch = epoch

    @property
    def root_node(self) -> int:
        arrays = self.arrays
        root = arrays.root
        return arrays.at(root, self.epoch) if arrays.replaced else root

    def node(self, partition_id: str) -> int | None:
        """Returns the node of a partition, or None if the tree has none at this epoch."""
        arrays = self.arrays
        node = arrays.find(partition_id)
        if node == NONE or arrays.created_epoch[node] > self.epoch:
            return None
        gone = arrays.merged_epoch.get(node) if arrays.merged_epoch else None
        return node if gone is None or gone > self.epoch else None

    def node_id(self, node: int) -> str:
        return self.arrays.partition_id(node)

    def parent(self, node: int) -> int:
        """Returns the parent of a node; -1 for the root."""
        return self.arrays.parent[node]

    def children(self, node: int) -> tuple[int, int] | None:
        """Returns the nodes of both children, -1 for one that a partial tree lacks; None for a leaf."""
        arrays = self.arrays
        if not 0 <= arrays.sealed_epoch[node] <= self.epoch:
            return None
        left, right = arrays.left[node], arrays.right[node]
        if arrays.replaced:  # read after the children: a merge that happens meanwhile is visible by then
            return arrays.at(left, self.epoch), arrays.at(right, self.epoch)
        return left, right

    def split_of(self, node: int) -> Split:
        """Returns the split of a node that has children."""
        return Split(self.schema.row_keys[self.arrays.split_key[node]].name, self.arrays.split_point(node))

    def region_of(self, node: int) -> Region:
        """Returns the node's part of the key space, computed from the splits above it."""
        arrays, mins, maxs = self.arrays, dict[int, int](), dict[int, int]()
        parent, is_upper, split_key = arrays.parent, arrays.is_upper, arrays.split_key
        while (above := parent[node]) != NONE:
            # the nearest split of a key is the narrowest bound
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
        """Yields the nodes of the leaves, left before right."""
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
        """The number of leaves. A partial tree counts only the leaves that it has."""
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
        """The leaves, left before right. It is slow for large trees, because each use makes new objects."""
        return tuple(map(self._partition, self.leaf_nodes()))

    def _partition(self, node: int) -> Partition:
        parent, children, region = self.arrays.parent[node], self.children(node), self.region_of(node)
        parent_id = None if parent == NONE else self.node_id(parent)
        if children is None:
            return Partition(self.node_id(node), parent_id, region)
        left_id, right_id = ("" if child == NONE else self.node_id(child) for child in children)
        return Partition(self.node_id(node), parent_id, region, (left_id, right_id), self.split_of(node))

    def key_order_groups(self, leaves: Iterable[int]) -> list[list[int]]:
        """Returns the nodes of leaves in groups: all keys of a group sort before those of the next group.

        Leaves that were split on a later row key interleave in key order. They share a group, and a reader in
        key order must merge their rows. If all splits are on the first row key, each group has one leaf.
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
    """A line of the drawing of a tree, which shows a partition or, at the end, the number of all leaves."""

    above: int | None
    """The index of its parent among the branches; None for the root."""

    where: str
    """The text of the line: the condition of the split, or the number of all leaves."""

    partition: Partition | None


def outline(tree: PartitionTree, leaves_max: int) -> list[Branch]:
    """Returns the lines of a drawing of a tree: parents before children, and at most `leaves_max` leaves."""
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
    """Returns the divided partition and both its children. Raises `InvalidRange` or `InvalidKey`."""
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
    """Returns a balanced tree, divided at strictly ascending values of the first row key."""
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
    """Returns `lower` and `upper`, sort keys such that every key of the region lies in [lower, upper)."""
    lower, upper = [], []
    for field in schema.row_keys:
        item = region.range(field.name)
        lower.append(encode_value(field.type, min_value(field.type) if item.min is None else item.min))
        upper.append((1, b"") if item.max is None else (0, encode_value(field.type, item.max)))
    # only the first field's maximum is an exclusive bound of the whole key
    return tuple((0, value) for value in lower), (upper[0],)
