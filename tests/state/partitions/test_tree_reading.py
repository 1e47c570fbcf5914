"""Tests of reading a table's tree: all of it, its changes, or the part in some ranges; and shared reads."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from trees import leaf_of, leaves_in, overlap, partitions_of

import dormouse
from dormouse.errors import (
    ConcurrentScale,
    InvalidRange,
    PartitionNotActive,
    PartitionNotFound,
    TableNotFound,
)
from dormouse.state.trees import TreeReader
from tests.standard import OF_KEYS
from tests.stored import CountingSupplier, at_once
from tests.support.model import (
    BYTES,
    INT,
    LONG,
    STRING,
    Field,
    Partition,
    PartitionTree,
    Range,
    Region,
    TreeArrays,
)
from tests.support.state import Catalog, PartitionStore, TableContext, TreeCache

NewTable = Callable[..., TableContext]
KEYS = [Field("i", INT), Field("l", LONG), Field("s", STRING), Field("b", BYTES)]
MINIMA: dict[str, Any] = {"i": -(2**31), "l": -(2**63), "s": "", "b": b""}

VALUES: dict[str, list[Any]] = {
    "i": [-(2**31) + 1, -7, 0, 3, 2**31 - 1],
    "l": [-(2**63) + 1, -1, 0, 5, 2**63 - 1],
    "s": ["\x00", "a", "a\x00", "\uffff", "\U0001f42d"],
    "b": [b"\x00", b"\x7f", b"\x80", b"\xff", b"\xff\xff"],
}


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    return new_table(*KEYS)


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Returns a list that gets (name, number of rows) of each statement that a tree reader executes."""
    seen: list[tuple[str, int]] = []
    execute = TreeReader._execute

    def noted(reader: TreeReader, conn: Any, name: str, **values: Any) -> Any:
        cursor = execute(reader, conn, name, **values)
        seen.append((name, cursor.rowcount))
        return cursor

    monkeypatch.setattr(TreeReader, "_execute", noted)
    return seen


def sharing(table: TableContext, cache: TreeCache) -> PartitionStore:
    return PartitionStore(table.supplier, table.table, cache)


def nodes_of(tree: PartitionTree) -> dict[str, Partition]:
    return {partition.partition_id: partition for partition in partitions_of(tree)}


def test_only_changes_of_a_cached_tree_are_read(
    new_table: NewTable, statements: list[tuple[str, int]]
) -> None:
    table = new_table(split_points=range(1, 200))
    mine, theirs = PartitionStore(table.supplier, table.table), PartitionStore(table.supplier, table.table)
    assert mine.cached() is None
    before = mine.tree()
    assert statements == [
        ("epoch", 1),
        ("epoch", 1),
        *[("partition_columns", 1)] * 2,
        ("epoch", 1),
        ("last_merge", 1),
    ]
    for point in (1_000, 2_000, 3_000):
        theirs.split(theirs.leaves()[-1].partition_id, point)
    statements.clear()
    tree = mine.at(2)
    assert (tree.epoch, statements) == (2, [("changed_partitions", 5)])
    assert len(tree) == len(before) + 4
    assert mine.tree().leaf_count == 203
    assert statements[1:] == [("epoch", 1), ("changed_partitions", 3)]
    known = mine.cached()
    assert known is not None and known.epoch == 3
    fresh = PartitionStore(table.supplier, table.table)
    statements.clear()
    for epoch in range(4):
        assert nodes_of(mine.at(epoch)) == nodes_of(fresh.at(epoch))
    assert [name for name, _ in statements].count("partition_columns") == 2
    assert nodes_of(before) == nodes_of(mine.at(0))


def test_a_tree_that_is_far_behind_is_read_anew(
    table: TableContext, statements: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dormouse.state.partitions.CHANGES_MAX", 2)
    mine, theirs = PartitionStore(table.supplier, table.table), PartitionStore(table.supplier, table.table)
    first = mine.tree()
    for point in (10, 20, 30):
        theirs.split(theirs.leaves()[-1].partition_id, point)
    statements.clear()
    assert mine.tree().leaf_count == 4
    assert "changed_partitions" not in dict(statements)
    assert (len(first), mine.cached().leaf_count) == (1, 4)  # type: ignore[union-attr]


def test_a_tree_of_several_pages_is_whole(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    for point in range(1, 12):
        table.partitions.split(table.partitions.leaves()[-1].partition_id, point)
    monkeypatch.setattr("dormouse.state.trees.PAGE_ROWS", 3)
    for epoch in range(12):
        read = PartitionStore(table.supplier, table.table).at(epoch)
        assert nodes_of(read) == nodes_of(table.partitions.at(epoch))
        assert len(read) == 2 * epoch + 1


def test_a_future_epoch_is_an_error(table: TableContext) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="at epoch 0, not yet at 1"):
            table.partitions.at(1)
    assert table.partitions.tree().epoch == 0


def test_a_table_that_is_dropped_while_its_tree_is_read_is_an_error(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is dropped between two pages, so the second page has no partitions."""
    monkeypatch.setattr("dormouse.state.trees.PAGE_ROWS", 1)
    table.partitions.split("root", 5)
    pages = TreeReader._pages

    def dropping(*given: Any) -> Any:
        for number, page in enumerate(pages(*given)):
            yield page
            if number == 0:
                Catalog(table.supplier, table.attempts).drop(table.table.name)

    monkeypatch.setattr(TreeReader, "_pages", dropping)
    fresh = PartitionStore(table.supplier, table.table)
    with pytest.raises(TableNotFound):
        fresh.tree()
    assert fresh.cached() is None


def test_a_dropped_table_is_an_error_in_every_way_to_read_its_tree(table: TableContext) -> None:
    known = table.partitions.tree()
    Catalog(table.supplier, table.attempts).drop(table.table.name)
    with table.supplier.connection() as conn:
        for ask in (lambda: table.partitions.at(1, conn), lambda: table.partitions.walk(conn, {})):
            with pytest.raises(TableNotFound):
                ask()
    assert table.partitions.at(0).leaf_count == known.leaf_count == 1


def test_threads_that_need_the_same_tree_read_it_once(
    new_table: NewTable, statements: list[tuple[str, int]]
) -> None:
    table, cache = new_table(split_points=range(1, 50)), TreeCache()
    stores = [sharing(table, cache) for _ in range(8)]
    for leaves, name, times in ((50, "partition_columns", 2), (51, "changed_partitions", 1)):
        trees = at_once(*(store.tree for store in stores))
        assert [tree.leaf_count for tree in trees] == [leaves] * 8
        assert len({id(tree.arrays) for tree in trees}) == 1
        assert [seen for seen, _ in statements].count(name) == times
        table.partitions.split(table.partitions.leaves()[-1].partition_id, 2 * leaves)
        statements.clear()


@pytest.mark.slow
def test_readers_that_race_with_splits_see_the_tree_of_an_epoch_exactly(new_table: NewTable) -> None:
    """All readers share a cache, which drops the tree every now and then."""
    table, cache = new_table(split_points=[0]), TreeCache()
    done = threading.Event()

    def split(side: int) -> None:
        rng, store = random.Random(side), PartitionStore(table.supplier, table.table)
        for _ in range(25):
            point = rng.randrange(1, 10**6) * side
            leaf = leaf_of(store.tree(), {"key": point})
            with suppress(InvalidRange, PartitionNotActive, ConcurrentScale):
                store.split(leaf.partition_id, point)

    def read() -> list[PartitionTree]:
        store, seen = sharing(table, cache), []
        while not (done.is_set() and seen):
            seen.append(store.tree())
            if len(seen) % 7 == 0:
                cache.drop(table.table.table_id)
        return seen

    with ThreadPoolExecutor(5) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            list(pool.map(split, (1, -1)))
        finally:
            done.set()
        trees = [tree for reader in readers for tree in reader.result()]
    true = PartitionStore(table.supplier, table.table)
    newest = true.tree().epoch
    assert newest > 30
    assert {0 <= tree.epoch <= newest for tree in trees} == {True}
    expected = {epoch: nodes_of(true.at(epoch)) for epoch in range(newest + 1)}
    for tree in trees[:: len(trees) // 200 + 1]:
        assert nodes_of(tree) == expected[tree.epoch]
        edges = [(leaf.region.range("key").min, leaf.region.range("key").max) for leaf in tree.leaves]
        assert [edges[0][0], edges[-1][1]] == [None, None]
        assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(edges))


def some_range(rng: random.Random, name: str) -> Range:
    low, high = sorted([rng.choice([MINIMA[name], *VALUES[name]]) for _ in range(2)])
    if low == high:
        return Range.exactly(low)
    ends = [None if rng.random() < 0.2 else end for end in (low, high)]
    return Range(*ends, min_inclusive=rng.random() < 0.5, max_inclusive=rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_finds_what_the_tree_has_in_the_ranges_and_no_more(table: TableContext, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        leaf, field = rng.choice(table.partitions.leaves()).partition_id, rng.choice(list(VALUES))
        with suppress(InvalidRange):
            table.partitions.split(leaf, rng.choice(VALUES[field]), field)
    tree = table.partitions.tree()
    assert tree.leaf_count > 15
    for _ in range(60):
        ranges = {name: some_range(rng, name) for name in rng.sample(list(VALUES), rng.randrange(5))}
        region = Region(ranges)
        expected = {p.partition_id: p for p in partitions_of(tree) if overlap(p.region, region)}
        with table.supplier.connection() as conn:
            found = table.partitions.walk(conn, ranges, len(expected))
            assert table.partitions.walk(conn, ranges, len(expected) - 1) is None
        assert found is not None and found.epoch == tree.epoch
        assert nodes_of(found).keys() == expected.keys()
        assert list(found.leaves) == leaves_in(tree, region)
        for partition_id, partition in expected.items():
            node = found.node(partition_id)
            assert node is not None
            children = found.children(node)
            kept = tuple(child if child in expected else "" for child in partition.child_ids)
            assert found[partition_id].child_ids == kept
            assert (children is None) == partition.is_leaf
            assert found.region_of(node) == partition.region


def test_a_walk_is_one_statement_on_the_connection_given(
    table: TableContext, statements: list[tuple[str, int]]
) -> None:
    table.partitions.split("root", 5)
    counting = CountingSupplier(table.supplier)  # type: ignore[arg-type]
    with table.supplier.connection() as conn:
        walked = PartitionStore(counting, table.table).walk(conn, {"i": Range(3, 4)})
    assert walked is not None
    assert ([p.partition_id for p in partitions_of(walked)], walked.epoch) == (["root", "1-0"], 1)
    assert (counting.lent, statements) == (0, [("walk", 2)])


def test_tables_of_an_instance_share_its_trees(dsn: str, tmp_path: Path) -> None:
    schema = OF_KEYS
    with dormouse.connect(dsn, f"file://{tmp_path}/objects") as instance:
        made = instance.create_table("t", schema, split_points=[1, 2, 3])
        instance.create_table("u", schema)
        first, again = (instance.table("t").partitions for _ in range(2))
        assert again.cached() is None
        tree = first.tree()
        known = again.cached()
        assert known is not None and known.arrays is tree.arrays
        assert made.partitions.tree().arrays is tree.arrays
        assert instance.table("u").partitions.tree().leaf_count == 1
        instance.drop_table("t")
        assert first.cached() is None
        assert instance.table("u").partitions.cached() is not None


def test_one_partition_is_looked_up_alone(table: TableContext, statements: list[tuple[str, int]]) -> None:
    left, _ = table.partitions.split("root", 5)
    assert table.partitions.partition(left.partition_id) == left
    assert statements == []
    for unknown in ("nope", "\ud800", ""):
        with pytest.raises(PartitionNotFound):
            table.partitions.partition(unknown)


def test_a_tree_whose_change_was_interrupted_is_read_anew(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, index = table.partitions.tree(), TreeArrays._index
    PartitionStore(table.supplier, table.table).split("root", 5)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TreeArrays, "_index", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.partitions.tree()
    monkeypatch.setattr(TreeArrays, "_index", index)
    tree = table.partitions.tree()
    assert tree.arrays is not before.arrays
    assert (tree.leaf_count, len(before), before.leaf_count) == (2, 1, 1)
