"""Functions on partition trees and sketches that only tests need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dormouse.data.sketches import FileSketches, KeyQuantiles, merge
from dormouse.errors import PartitionNotFound
from dormouse.model.partition_tree import NONE, Partition, PartitionRow, PartitionTree, Split, TreeArrays
from dormouse.model.region import KeyRanges, KeyValue, Range, Region, compare, decode_value, encode_value
from dormouse.model.schema import Schema

EVERYTHING = Range()


def tree_of(schema: Schema, partitions: Iterable[Partition]) -> PartitionTree:
    """Returns a tree of these partitions, at epoch 0."""
    arrays = TreeArrays(schema)
    listed = list(partitions)
    uppers = {partition.child_ids[1] for partition in listed if partition.child_ids}
    arrays.extend((_row(schema, each, each.partition_id in uppers) for each in listed), 0)
    return PartitionTree(arrays, 0)


def _row(schema: Schema, partition: Partition, is_upper: bool) -> PartitionRow:
    at = (partition.partition_id, 0, partition.parent_id, is_upper)
    return (
        PartitionRow(*at)
        if partition.split is None
        else PartitionRow(*at, 0, *stored_split(schema, partition.split))
    )


def stored_split(schema: Schema, split: Split) -> tuple[int, bytes]:
    """Returns the number of the row key, and the split point as bytes."""
    return schema.row_key_names.index(split.field), encode_value(schema.field(split.field).type, split.point)


def partitions_of(tree: PartitionTree) -> list[Partition]:
    """Returns all partitions, parents before children, and left before right."""
    found, stack = [], [tree.root_node]
    while stack:
        node = stack.pop()
        found.append(tree[tree.node_id(node)])
        stack += [child for child in reversed(tree.children(node) or ()) if child != NONE]
    return found


def below(tree: PartitionTree, partition_id: str) -> list[str]:
    """Returns the leaves below a partition, or the partition itself if it is a leaf."""
    partition = tree[partition_id]
    return [partition_id] if partition.is_leaf else [x for c in partition.child_ids for x in below(tree, c)]


def leaves_in(tree: PartitionTree, region: Region) -> list[Partition]:
    """Returns the leaves that overlap a region, left before right."""
    return [leaf for leaf in tree.leaves if overlap(leaf.region, region)]


def overlap(left: Region, right: Region) -> bool:
    """Returns whether two regions have keys in common."""
    return all(left.range(name).intersect(item) is not None for name, item in right.items())


def holds(ranges: KeyRanges, key: Mapping[str, KeyValue]) -> bool:
    """Returns whether a row of these keys is in the ranges."""
    return all(any(item.contains(key[name]) for item in items) for name, items in ranges.items())


def leaf_of(tree: PartitionTree, key: Mapping[str, KeyValue]) -> Partition:
    """Returns the leaf whose region has the key; raises `PartitionNotFound` if a partial tree lacks it."""
    node = tree.root_node
    while (children := tree.children(node)) is not None:
        split = tree.split_of(node)
        node = children[0 if compare(key[split.field], split.point) < 0 else 1]
        if node == NONE:
            raise PartitionNotFound(f"a partial tree has no leaf of the key {key!r}")
    return tree[tree.node_id(node)]


def ancestors(tree: PartitionTree, partition_id: str) -> Iterator[Partition]:
    """Yields the parent, its parent, … up to the root."""
    node = tree.node(partition_id)
    if node is None:
        raise PartitionNotFound(f"partition {partition_id!r} does not exist")
    while (node := tree.parent(node)) != NONE:
        yield tree[tree.node_id(node)]


class Quantiles:
    """The merged quantiles of the row keys of several files."""

    def __init__(self, schema: Schema, files: Sequence[FileSketches]) -> None:
        self._keys: dict[str, KeyQuantiles] = {field.name: merge(field, files) for field in schema.row_keys}

    def row_count(self, field: str, within: Range = EVERYTHING) -> int:
        return self._keys[field].row_count(within)

    def rank(self, field: str, value: KeyValue, within: Range = EVERYTHING) -> float:
        return self._keys[field].rank(value, within)

    def split_point(self, field: str, within: Range = EVERYTHING) -> KeyValue | None:
        return self._keys[field].split_point(within)

    def ends(self, field: str) -> list[KeyValue]:
        """Returns the smallest and the largest value; an empty list if there are no rows."""
        found = self._keys[field]
        return [decode_value(found._type, key) for key in found._ends]


def quantile(
    quantiles: Quantiles, field: str, fraction: float, within: Range = EVERYTHING
) -> KeyValue | None:
    """Returns a value of `field` that is greater than about this fraction of the rows in the range."""
    found = quantiles._keys[field]
    start, end = found._span(within)
    return None if start == end else decode_value(found._type, found._keys[found._at(fraction, start, end)])
