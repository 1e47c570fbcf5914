"""Tests of the partition tree: finding leaves, and groups whose rows must be merged."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import ancestors, leaf_of, leaves_in, overlap, partitions_of, stored_split, tree_of

from dormouse.errors import InvalidRange, PartitionNotFound
from dormouse.model.partition_tree import PartitionRow, outline
from tests.large_tree import balanced_arrays, columns_of
from tests.support.model import (
    LONG,
    ROOT,
    Field,
    Partition,
    PartitionTree,
    Range,
    Region,
    Schema,
    Split,
    TreeArrays,
    encode_value,
    split_partition,
    tree_from_split_points,
)

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
    return tree_of(SCHEMA, [*leaves, *inner])


def key(x: int, y: int) -> dict[str, Any]:
    return {"x": x, "y": y}


@given(trees())
def test_every_key_lies_in_one_leaf_and_is_found_there(tree: PartitionTree) -> None:
    for x, y in GRID:
        (leaf,) = [p for p in tree.leaves if p.region.contains(key(x, y))]
        assert leaf_of(tree, key(x, y)) == leaf


@given(trees())
def test_groups_are_in_key_order_and_hold_every_leaf_once(tree: PartitionTree) -> None:
    groups = tree.key_order_groups(tree.leaf_nodes())
    assert sorted(node for group in groups for node in group) == sorted(tree.leaf_nodes())
    place = {tree.node_id(node): n for n, group in enumerate(groups) for node in group}
    places = [place[leaf_of(tree, key(x, y)).partition_id] for x, y in sorted(GRID)]
    assert places == sorted(places)


def test_a_tree_split_on_the_first_key_alone_has_groups_of_one() -> None:
    tree = tree_of(SCHEMA, tree_from_split_points(SCHEMA, range(1, 50), iter(map(str, range(200))).__next__))
    assert [len(group) for group in tree.key_order_groups(tree.leaf_nodes())] == [1] * 50
    assert [leaf.region.range("x").min for leaf in tree.leaves] == [None, *range(1, 50)]


@given(trees())
def test_ancestors_lead_to_the_root(tree: PartitionTree) -> None:
    for leaf in tree.leaves:
        chain = [leaf, *ancestors(tree, leaf.partition_id)]
        assert chain[-1] == tree.root
        assert all(child.partition_id in parent.child_ids for child, parent in itertools.pairwise(chain))


def test_an_unknown_partition_is_an_error() -> None:
    tree = tree_of(SCHEMA, [Partition(ROOT, None, Region())])
    with pytest.raises(PartitionNotFound, match="'nope'"):
        tree["nope"]
    assert tree.node("nope") is None
    assert [p.partition_id for p in partitions_of(tree)] == [ROOT]


@dataclass(frozen=True)
class History:
    """A table's partitions at every epoch, and all its partitions as they are stored."""

    epochs: list[dict[str, Partition]]
    rows: list[PartitionRow]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draws a random history. Each epoch divides a leaf, or merges all leaves below a partition.

    The merged leaf may be divided again in the same epoch.
    """
    epochs = [{ROOT: Partition(ROOT, None, Region())}]
    rows = {ROOT: PartitionRow(ROOT, 0)}
    for epoch in range(1, draw(st.integers(1, 12))):
        now = dict(epochs[-1])
        new_id = (f"{epoch}-{n}" for n in itertools.count()).__next__
        at = now[draw(st.sampled_from(sorted(now)))]
        if not at.is_leaf:
            at = merged(now, rows, at, new_id(), epoch)
        for _ in range(draw(st.integers(0, 2))):
            at = divided(draw, now, rows, at, new_id, epoch)
        epochs.append(now)
    return History(epochs, draw(st.permutations(list(rows.values()))))


def merged(
    now: dict[str, Partition], rows: dict[str, PartitionRow], at: Partition, new_id: str, epoch: int
) -> Partition:
    """Replaces a partition, and all partitions below it, by one new leaf; returns the leaf.

    Changes `now` and `rows`.
    """
    todo = [at.partition_id]
    while todo:
        gone = now.pop(todo.pop())
        todo += gone.child_ids
        row = replace(rows[gone.partition_id], merged_epoch=epoch)
        rows[gone.partition_id] = replace(row, sealed_epoch=epoch) if row.sealed_epoch is None else row
    now[new_id] = new = Partition(new_id, at.parent_id, at.region)
    rows[new_id] = PartitionRow(new_id, epoch, at.parent_id, rows[at.partition_id].is_upper)
    if at.parent_id is not None:
        above = now[at.parent_id]
        halves = [new_id if half == at.partition_id else half for half in above.child_ids]
        now[at.parent_id] = replace(above, child_ids=tuple(halves))
    return new


def divided(
    draw: st.DrawFn,
    now: dict[str, Partition],
    rows: dict[str, PartitionRow],
    at: Partition,
    new_id: Callable[[], str],
    epoch: int,
) -> Partition:
    """Divides a leaf at a random point; returns one half, or the leaf if it has no such point.

    Changes `now` and `rows`.
    """
    split = Split(draw(st.sampled_from("xy")), draw(st.integers(0, 5)))
    try:
        parent, left, right = split_partition(SCHEMA, at, split, new_id(), new_id())
    except InvalidRange:
        return at
    now |= {partition.partition_id: partition for partition in (parent, left, right)}
    key, point = stored_split(SCHEMA, split)
    rows[at.partition_id] = replace(
        rows[at.partition_id], sealed_epoch=epoch, split_key=key, split_point=point
    )
    for half, is_upper in ((left, False), (right, True)):
        rows[half.partition_id] = PartitionRow(half.partition_id, epoch, at.partition_id, is_upper)
    return draw(st.sampled_from([left, right]))


def loaded(history: History, epoch: int) -> TreeArrays:
    """Returns the tree of an epoch, loaded from all rows that the database would return for that epoch."""
    rows = [row for row in history.rows if row.created_epoch <= epoch and (row.merged_epoch or 99) > epoch]
    arrays = TreeArrays(SCHEMA)
    middle = len(rows) // 2
    arrays.load((columns_of(part, epoch) for part in (rows[:middle], rows[middle:]) if part), epoch)
    arrays.first_epoch = max(
        (r.merged_epoch or 0 for r in history.rows if (r.merged_epoch or 99) <= epoch), default=0
    )
    return arrays


def check_is(tree: PartitionTree, partitions: dict[str, Partition]) -> None:
    """Checks that the tree equals the naive model: the same partitions, in the order of the model."""
    leaves = [p for p in partitions.values() if p.is_leaf]
    assert {p.partition_id: p for p in partitions_of(tree)} == partitions
    assert (len(tree), tree.leaf_count) == (len(partitions), len(leaves))
    root = next(p for p in partitions.values() if p.parent_id is None)
    assert (tree.root, set(tree.leaves)) == (root, set(leaves))
    for partition in partitions.values():
        node = tree.node(partition.partition_id)
        assert node is not None and tree.node_id(node) == partition.partition_id
        assert tree[partition.partition_id] == partition
        assert tree.region_of(node) == partition.region
        children = tree.children(node)
        assert (children is None) == partition.is_leaf
        if children is not None:
            assert tuple(map(tree.node_id, children)) == partition.child_ids
            assert tree.split_of(node) == partition.split
            assert [tree.parent(child) for child in children] == [node, node]
    for x, y in GRID:
        assert leaf_of(tree, key(x, y)) == next(p for p in leaves if p.region.contains(key(x, y)))


@settings(deadline=None)
@given(histories(), st.data())
def test_the_tree_at_every_epoch_equals_the_model(history: History, data: st.DataObject) -> None:
    """A tree is loaded at one epoch, and updated with the changes, in steps or all at once, in any order."""
    newest = len(history.epochs) - 1
    base = data.draw(st.integers(0, newest))
    arrays = loaded(history, base)
    first = arrays.first_epoch
    views = [PartitionTree(arrays, epoch) for epoch in range(first, base + 1)]
    while arrays.epoch < newest:
        after, epoch = arrays.epoch, data.draw(st.integers(arrays.epoch + 1, newest))
        changed = [
            r for r in history.rows if max(r.created_epoch, r.sealed_epoch or 0, r.merged_epoch or 0) > after
        ]
        arrays.extend(changed, epoch)
        views += [PartitionTree(arrays, e) for e in range(after + 1, epoch + 1)]
    everything = {row.partition_id for row in history.rows}
    for view, partitions in zip(views, history.epochs[first:], strict=True):
        check_is(view, partitions)
        assert all(view.node(partition_id) is None for partition_id in everything - partitions.keys())


@settings(deadline=None)
@given(histories(), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_a_partial_tree_answers_like_the_whole_one_within_its_ranges(
    history: History, x: int, y: int, width: int
) -> None:
    epoch, whole = len(history.epochs) - 1, history.epochs[-1]
    regions = {p.partition_id: p.region for now in history.epochs for p in now.values()}
    region = Region(x=Range(x, x + width, max_inclusive=True), y=Range(y))
    arrays = TreeArrays(SCHEMA)
    arrays.extend(
        [r for r in history.rows if r.merged_epoch is None and overlap(regions[r.partition_id], region)],
        epoch,
    )
    tree, model = PartitionTree(arrays, epoch), tree_of(SCHEMA, whole.values())
    assert list(tree.leaves) == leaves_in(model, region)
    assert tree.leaf_count == len(leaves_in(model, region))
    for at in GRID:
        if region.contains(key(*at)):
            assert leaf_of(tree, key(*at)) == leaf_of(model, key(*at))
        elif not overlap(leaf_of(model, key(*at)).region, region):
            with pytest.raises(PartitionNotFound, match="partial"):
                leaf_of(tree, key(*at))
    missing = [
        n for p in partitions_of(tree) for n in tree.children(tree.node(p.partition_id) or 0) or () if n == -1
    ]
    assert bool(missing) == arrays.is_partial == (len(tree) < len(model))


def test_readers_of_an_epoch_do_not_see_what_is_added_meanwhile() -> None:
    arrays = TreeArrays(SCHEMA)
    arrays.extend([PartitionRow(ROOT, 0)], 0)
    done = threading.Event()

    def read() -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            tree = PartitionTree(arrays, arrays.epoch)
            assert (len(tree), tree.leaf_count) == (2 * tree.epoch + 1, tree.epoch + 1)
            # each epoch divides the last leaf: y is halved again and again at 1, 2, 3, …
            last = leaf_of(tree, key(0, 1 << 40))
            assert last.region.range("y").min == (tree.epoch or None)
            assert last.partition_id == (f"{tree.epoch}-1" if tree.epoch else ROOT)
            assert tree.node(f"{tree.epoch + 1}-0") is None
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for epoch in range(1, 600):
                parent = f"{epoch - 1}-1" if epoch > 1 else ROOT
                sealed = PartitionRow(parent, epoch - 1, None, None, epoch, 1, encode_value(LONG, epoch))
                halves = [PartitionRow(f"{epoch}-{n}", epoch, parent, bool(n)) for n in (0, 1)]
                arrays.extend([sealed, *halves], epoch)
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)


def test_readers_of_an_epoch_do_not_see_what_is_merged_meanwhile() -> None:
    """The upper half is repeatedly divided and merged; readers of each epoch see the tree of that epoch."""
    arrays = TreeArrays(SCHEMA)
    point = encode_value(LONG, 3)
    root = PartitionRow(ROOT, 0, None, None, 0, 0, point)
    arrays.extend([root, PartitionRow("0-0", 0, ROOT, False), PartitionRow("0-1", 0, ROOT, True)], 0)
    done = threading.Event()

    def read() -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            tree = PartitionTree(arrays, arrays.epoch)
            last = tree.epoch // 2 * 2
            halves = [f"{tree.epoch}-0", f"{tree.epoch}-1"] if tree.epoch % 2 else [f"{last}-{int(not last)}"]
            for _ in range(3):
                assert [leaf.partition_id for leaf in tree.leaves] == ["0-0", *halves]
                assert (len(tree), tree.leaf_count) == (2 * len(halves) + 1, len(halves) + 1)
                assert leaf_of(tree, key(5, 9)).partition_id == halves[-1]
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            upper = PartitionRow("0-1", 0, ROOT, True)
            for epoch in range(1, 600, 2):
                upper = replace(upper, sealed_epoch=epoch, split_key=1, split_point=point)
                below = [PartitionRow(f"{epoch}-{n}", epoch, upper.partition_id, bool(n)) for n in (0, 1)]
                arrays.extend([upper, *below], epoch)
                gone = [replace(row, merged_epoch=epoch + 1) for row in (upper, *below)]
                upper = PartitionRow(f"{epoch + 1}-0", epoch + 1, ROOT, True)
                arrays.extend([*gone, upper], epoch + 1)
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)


@pytest.mark.parametrize("name", ["", "nope", "\ud800", "root\x00"])
def test_an_unknown_id_is_not_in_the_tree(name: str) -> None:
    assert tree_of(SCHEMA, [Partition(ROOT, None, Region())]).node(name) is None


def test_a_picture_of_a_large_tree_is_cut_and_has_the_number_of_leaves() -> None:
    tree = PartitionTree(balanced_arrays(1_000), 0)
    branches = outline(tree, 10)
    assert [one.where for one in branches if one.partition is None] == ["… 1000 leaves in all"]
    assert sum(one.partition is not None and one.partition.is_leaf for one in branches) == 10
