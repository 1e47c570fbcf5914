"""The partition tree: finding leaves, and the groups whose rows must be merged."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.errors import InvalidRange, PartitionNotFound
from dormouse.model.partition_tree import (
    ROOT,
    Partition,
    PartitionTree,
    Split,
    split_partition,
    tree_from_split_points,
)
from dormouse.model.region import Range, Region
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG

SCHEMA = Schema([Field("x", LONG), Field("y", LONG)])
GRID = list(itertools.product(range(-1, 7), range(-1, 7)))


@st.composite
def trees(draw: st.DrawFn) -> PartitionTree:
    ids = itertools.count()
    leaves, inner = [Partition(ROOT, None, Region())], []
    for _ in range(draw(st.integers(0, 10))):
        leaf = leaves.pop(draw(st.integers(0, len(leaves) - 1)))
        split = Split(draw(st.sampled_from("xy")), draw(st.integers(0, 5)))
        try:
            parent, *children = split_partition(SCHEMA, leaf, split, f"p{next(ids)}", f"p{next(ids)}")
        except InvalidRange:
            leaves.append(leaf)
            continue
        inner.append(parent)
        leaves += children
    return PartitionTree(SCHEMA, [*leaves, *inner])


def key(x: int, y: int) -> dict[str, Any]:
    return {"x": x, "y": y}


@given(trees())
def test_every_key_lies_in_one_leaf_and_is_found_there(tree: PartitionTree) -> None:
    for x, y in GRID:
        (leaf,) = [p for p in tree.leaves if p.region.contains(key(x, y))]
        assert tree.leaf_of(key(x, y)) == leaf


@given(trees(), st.integers(0, 4), st.integers(0, 4))
def test_the_leaves_of_a_region_are_those_that_overlap_it(tree: PartitionTree, x: int, y: int) -> None:
    region = Region(x=Range(x, x + 2), y=y)
    found = [p.partition_id for p in tree.leaves_in(region)]
    assert found == [p.partition_id for p in tree.leaves if p.region.overlaps(region)]


@settings(max_examples=200)
@given(trees())
def test_groups_are_in_key_order_and_hold_every_leaf_once(tree: PartitionTree) -> None:
    groups = tree.key_order_groups(tree.leaves)
    assert sorted(p.partition_id for g in groups for p in g) == sorted(p.partition_id for p in tree.leaves)
    place = {p.partition_id: n for n, group in enumerate(groups) for p in group}
    places = [place[tree.leaf_of(key(x, y)).partition_id] for x, y in sorted(GRID)]
    assert places == sorted(places)


def test_a_tree_split_on_the_first_key_alone_has_groups_of_one() -> None:
    tree = PartitionTree(
        SCHEMA, tree_from_split_points(SCHEMA, range(1, 50), iter(map(str, range(200))).__next__)
    )
    assert [len(group) for group in tree.key_order_groups(tree.leaves)] == [1] * 50
    assert [leaf.region.range("x").min for leaf in tree.leaves] == [None, *range(1, 50)]


@given(trees())
def test_ancestors_lead_to_the_root(tree: PartitionTree) -> None:
    for leaf in tree.leaves:
        chain = [leaf, *tree.ancestors(leaf.partition_id)]
        assert chain[-1] == tree.root
        assert all(child.partition_id in parent.child_ids for child, parent in itertools.pairwise(chain))


def test_an_unknown_partition_is_an_error() -> None:
    tree = PartitionTree(SCHEMA, [Partition(ROOT, None, Region())])
    with pytest.raises(PartitionNotFound, match="'nope'"):
        tree["nope"]
    assert tree.get("nope") is None
    assert "nope" not in tree
    assert [p.partition_id for p in tree] == [ROOT]
