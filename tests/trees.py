"""What tests ask of a partition tree, and of sketches, that the package has no use for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dormouse.data.sketches import FileSketches, KeyQuantiles, merge
from dormouse.errors import PartitionNotFound
from dormouse.model.partition_tree import NONE, Partition, PartitionRow, PartitionTree, Split, TreeArrays
from dormouse.model.region import KeyRanges, KeyValue, Range, Region, compare, decode_value, encode_value
from dormouse.model.schema import Schema

EVERYTHING = Range()


def tree_of(schema: Schema, partitions: Iterable[Partition]) -> PartitionTree:
    """A tree of these partitions, at epoch 0."""
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
    """The number of the row key, and the point as bytes."""
    return schema.row_key_names.index(split.field), encode_value(schema.field(split.field).type, split.point)


def partitions_of(tree: PartitionTree) -> list[Partition]:
    """All partitions, parents before children, and left before right."""
    found, stack = [], [tree.root_node]
    while stack:
        node = stack.pop()
        found.append(tree[tree.node_id(node)])
        stack += [child for child in reversed(tree.children(node) or ()) if child != NONE]
    return found


def below(tree: PartitionTree, partition_id: str) -> list[str]:
    """The leaves below a partition, or itself."""
    partition = tree[partition_id]
    return [partition_id] if partition.is_leaf else [x for c in partition.child_ids for x in below(tree, c)]


def leaves_in(tree: PartitionTree, region: Region) -> list[Partition]:
    """The leaves that overlap a region, left before right."""
    return [leaf for leaf in tree.leaves if overlap(leaf.region, region)]


def overlap(one: Region, other: Region) -> bool:
    """Whether two regions have keys in common."""
    return all(one.range(name).intersect(item) is not None for name, item in other.items())


def holds(ranges: KeyRanges, key: Mapping[str, KeyValue]) -> bool:
    """Whether a row of these keys is in the ranges."""
    return all(any(item.contains(key[name]) for item in items) for name, items in ranges.items())


def leaf_of(tree: PartitionTree, key: Mapping[str, KeyValue]) -> Partition:
    """The leaf whose region has the key; `PartitionNotFound` when a partial tree lacks it."""
    node = tree.root_node
    while (children := tree.children(node)) is not None:
        split = tree.split_of(node)
        node = children[0 if compare(key[split.field], split.point) < 0 else 1]
        if node == NONE:
            raise PartitionNotFound(f"a partial tree has no leaf of the key {key!r}")
    return tree[tree.node_id(node)]


def ancestors(tree: PartitionTree, partition_id: str) -> Iterator[Partition]:
    """The parent, its parent, … up to the root."""
    node = tree.node(partition_id)
    if node is None:
        raise PartitionNotFound(f"partition {partition_id!r} does not exist")
    while (node := tree.parent(node)) != NONE:
        yield tree[tree.node_id(node)]


class Quantiles:
    """The row keys of several files together, and what is asked of one of them."""

    def __init__(self, schema: Schema, files: Sequence[FileSketches]) -> None:
        self._keys: dict[str, KeyQuantiles] = {field.name: merge(field, files) for field in schema.row_keys}

    def row_count(self, field: str, within: Range = EVERYTHING) -> int:
        return self._keys[field].row_count(within)

    def rank(self, field: str, value: KeyValue, within: Range = EVERYTHING) -> float:
        return self._keys[field].rank(value, within)

    def split_point(self, field: str, within: Range = EVERYTHING) -> KeyValue | None:
        return self._keys[field].split_point(within)

    def ends(self, field: str) -> list[KeyValue]:
        """The smallest and the largest value; none when there are no rows."""
        found = self._keys[field]
        return [decode_value(found._type, key) for key in found._ends]


def quantile(
    quantiles: Quantiles, field: str, fraction: float, within: Range = EVERYTHING
) -> KeyValue | None:
    """A value of `field` that about this fraction of the rows within the range lie below."""
    found = quantiles._keys[field]
    start, end = found._span(within)
    return None if start == end else decode_value(found._type, found._keys[found._at(fraction, start, end)])
