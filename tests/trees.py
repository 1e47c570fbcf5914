"""What tests ask of a partition tree, and of sketches, that the package has no use for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dormouse.data.quantiles import KeyQuantiles
from dormouse.errors import PartitionNotFound
from dormouse.model.keys import KeyValue
from dormouse.model.partition_tree import Partition, PartitionTree
from dormouse.model.region import Range, compare
from dormouse.model.tree_arrays import NONE


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


def quantile(
    found: KeyQuantiles, field: str, fraction: float, within: Range | None = None
) -> KeyValue | None:
    """A value of `field` that about this fraction of the rows within the range lie below."""
    start, end = found._span(field, within or Range())
    if start == end:
        return None
    return found._decoded(field, found._keys[field].keys[found._at(field, fraction, start, end)])
