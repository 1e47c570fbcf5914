"""Tests of the partition store: the tree of one table, and every change of it as an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from trees import ancestors

from dormouse.errors import (
    ConcurrentScale,
    InvalidRange,
    PartitionNotActive,
    PartitionNotFound,
    TableNotFound,
)
from tests.stored import CountingSupplier, at_once, query
from tests.support.model import BYTES, INT, LONG, STRING, Field, Range, Region
from tests.support.state import Catalog, PartitionStore, TableContext

NewTable = Callable[..., TableContext]
KEYS = [Field("i", INT), Field("l", LONG), Field("s", STRING), Field("b", BYTES)]
MINIMA: dict[str, Any] = {"i": -(2**31), "l": -(2**63), "s": "", "b": b""}


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    return new_table(*KEYS)


def regions(table: TableContext) -> list[dict[str, Range]]:
    """Returns the regions of the leaves, as another process reads them."""
    return [dict(leaf.region) for leaf in PartitionStore(table.supplier, table.table).leaves()]


def epochs(table: TableContext) -> list[tuple[Any, ...]]:
    text = "select epoch, sealed, created, created_at from epoch where table_id = %s order by epoch"
    return query(table.supplier, text, table.table.table_id)


def test_a_table_begins_with_its_root(table: TableContext) -> None:
    root = table.partitions.root()
    assert (root.partition_id, root.parent_id, root.child_ids, root.region) == ("root", None, (), Region())
    assert table.partitions.leaves() == (root,)
    assert table.partitions.tree().epoch == 0


@pytest.mark.parametrize(
    ("field", "points"),
    [
        ("i", [0, -(2**31) + 1, 2**31 - 1]),
        ("l", [-1, 2**63 - 1]),
        ("s", ["\x00", "\uffff", "\U0001f42d", "a\x00", "x" * 5_000]),
        ("b", [b"\x00", b"\xff\xff", b"\x7f"]),
    ],
)
def test_splits_on_any_row_key(table: TableContext, field: str, points: list[Any]) -> None:
    for point in points:
        leaf = next(p for p in table.partitions.leaves() if p.region.range(field).contains(point))
        left, right = table.partitions.split(leaf.partition_id, point, field)
        assert left.region.range(field).max == right.region.range(field).min == point
        parent = table.partitions.tree()[leaf.partition_id]
        assert parent.child_ids == (left.partition_id, right.partition_id)
        assert not parent.is_leaf
    edges = [None, *sorted(points), None]
    assert regions(table) == [{field: Range(a, b)} for a, b in itertools.pairwise(edges)]


def test_the_first_row_key_is_split_unless_another_is_named(table: TableContext) -> None:
    left, _ = table.partitions.split("root", 5)
    left_left, _ = table.partitions.split(left.partition_id, "m", "s")
    assert left_left.region == Region(i=Range(None, 5), s=Range(None, "m"))


def test_a_split_point_of_bytes_may_be_a_bytearray(table: TableContext) -> None:
    left, _ = table.partitions.split("root", bytearray(b"m"), "b")  # type: ignore[arg-type]
    assert left.region == Region(b=Range(None, b"m"))
    assert regions(table)[0] == {"b": Range(None, b"m")}


def test_epochs_count_up_and_strictly_increase_in_time(table: TableContext) -> None:
    """Times increase even when the clock stands still or goes back."""
    ahead = "update epoch set created_at = now() + interval '1 hour' where table_id = %s and epoch = 0"
    query(table.supplier, ahead, table.table.table_id)
    for n in range(1, 5):
        table.partitions.split(table.partitions.leaves()[-1].partition_id, n)
        assert table.partitions.tree().epoch == n
    found = epochs(table)
    assert [row[0] for row in found] == list(range(5))
    times = [row[3] for row in found]
    assert times == sorted(set(times))
    assert [row[1:3] for row in found[:3]] == [
        ([], ["root"]),
        (["root"], ["1-0", "1-1"]),
        (["1-1"], ["2-0", "2-1"]),
    ]


def test_the_tree_is_read_again_only_when_the_epoch_changed(table: TableContext) -> None:
    mine, theirs = (PartitionStore(table.supplier, table.table) for _ in range(2))
    first = mine.tree()
    assert mine.tree().arrays is first.arrays
    theirs.split("root", 0)
    assert (len(mine.tree()), mine.tree().epoch) == (3, 1)
    assert (len(first), first.root.is_leaf) == (1, True)


@pytest.mark.parametrize("field", MINIMA)
def test_a_point_equal_to_the_minimum_is_refused(table: TableContext, field: str) -> None:
    with pytest.raises(InvalidRange, match=f"'{field}'"):
        table.partitions.split("root", MINIMA[field], field)
    assert len(epochs(table)) == 1


@pytest.mark.parametrize("point", [0, 10, 9, 20, 21, -5, 2**31 - 1])
def test_a_point_outside_the_partition_is_refused(table: TableContext, point: int) -> None:
    _, right = table.partitions.split("root", 10)
    middle, _ = table.partitions.split(right.partition_id, 20)
    with pytest.raises(InvalidRange, match="does not lie inside 10 to 20"):
        table.partitions.split(middle.partition_id, point)
    assert table.partitions.tree().epoch == 2


@pytest.mark.parametrize(
    ("field", "point"),
    [
        ("i", "x"),
        ("i", 2**31),
        ("i", 1.0),
        ("i", True),
        ("i", None),
        ("s", 5),
        ("s", b"x"),
        ("s", "\ud800"),
        ("b", "x"),
        ("l", 2**63),
    ],
)
def test_a_point_of_the_wrong_type_is_refused(table: TableContext, field: str, point: Any) -> None:
    with pytest.raises(InvalidRange, match=f"'{field}'"):
        table.partitions.split("root", point, field)
    assert len(epochs(table)) == 1


def test_a_field_that_is_no_row_key_is_refused(table: TableContext) -> None:
    with pytest.raises(InvalidRange, match="'nope' is not a row key; partitions split on i, l, s, b"):
        table.partitions.split("root", 5, "nope")


@pytest.mark.parametrize("partition_id", ["nope", "", "'; --", "a\x00", "\ud800", "x" * 10_000])
def test_an_unknown_partition_is_an_error(table: TableContext, partition_id: str) -> None:
    with pytest.raises(PartitionNotFound):
        table.partitions.split(partition_id, 5)
    assert len(epochs(table)) == 1


def test_a_partition_that_was_divided_already_is_an_error(table: TableContext) -> None:
    table.partitions.split("root", 5)
    with pytest.raises(PartitionNotActive, match="'root'"):
        table.partitions.split("root", 6)
    assert table.partitions.tree().epoch == 1


def test_exactly_one_of_concurrent_splits_of_a_leaf_succeeds(table: TableContext) -> None:
    for n in range(1, 6):
        leaf = table.partitions.leaves()[-1].partition_id
        outcomes = at_once(*[lambda leaf=leaf, n=n: table.partitions.split(leaf, n)] * 3)
        assert sum(isinstance(o, tuple) for o in outcomes) == 1
        assert sum(isinstance(o, PartitionNotActive | ConcurrentScale) for o in outcomes) == 2
    assert [row[0] for row in epochs(table)] == list(range(6))


def test_splits_of_different_leaves_at_once_all_succeed_with_ids_of_their_own(new_table: NewTable) -> None:
    table = new_table(split_points=[10, 20, 30])
    points = {
        leaf.partition_id: (leaf.region.range("key").max or 40) - 5 for leaf in table.partitions.leaves()
    }
    outcomes = at_once(*(lambda p=p, at=at: table.partitions.split(p, at) for p, at in points.items()))
    ids = [child.partition_id for children in outcomes for child in children]
    assert len(set(ids)) == 8
    assert [leaf.region.range("key").min for leaf in table.partitions.leaves()] == [
        None,
        5,
        10,
        15,
        20,
        25,
        30,
        35,
    ]


@pytest.mark.parametrize("points", [[5], [1, 2, 3], list(range(-50, 50))])
def test_a_table_can_begin_with_leaves(new_table: NewTable, points: list[int]) -> None:
    table = new_table(split_points=points)
    tree = table.partitions.tree()
    edges = [None, *points, None]
    spans = [(leaf.region.range("key").min, leaf.region.range("key").max) for leaf in tree.leaves]
    assert spans == list(itertools.pairwise(edges))
    assert len(tree) == 2 * len(points) + 1
    assert max(sum(1 for _ in ancestors(tree, leaf.partition_id)) for leaf in tree.leaves) <= 7
    assert epochs(table)[0][2] == [leaf.partition_id for leaf in tree.leaves] or len(points) > 1
    assert sorted(epochs(table)[0][2]) == sorted(leaf.partition_id for leaf in tree.leaves)


@pytest.mark.parametrize(
    "points", [[2, 1], [1, 1], [1, 2, 2, 3], ["1"], [1.5], [None], [-(2**63)], [2**63], [True], "DL"]
)
def test_invalid_initial_split_points_are_refused_and_no_table_is_made(
    new_table: NewTable, shared_supplier: Any, points: Any
) -> None:
    before = query(shared_supplier[1], "select count(*) from tables")
    with pytest.raises(InvalidRange, match="split point"):
        new_table(split_points=points)
    assert query(shared_supplier[1], "select count(*) from tables") == before


def test_a_string_is_not_a_list_of_split_points(new_table: NewTable) -> None:
    with pytest.raises(InvalidRange, match="list"):
        new_table(Field("s", STRING), split_points="DL")


def test_a_dropped_table_has_no_partitions(table: TableContext) -> None:
    Catalog(table.supplier, table.attempts).drop(table.table.name)
    for use in (table.partitions.tree, lambda: table.partitions.split("root", 5)):
        with pytest.raises(TableNotFound):
            use()
    assert query(table.supplier, "select from partition where table_id = %s", table.table.table_id) == []


def test_two_tables_have_trees_of_their_own(new_table: NewTable) -> None:
    one, two = new_table(), new_table()
    one.partitions.split("root", 5)
    assert (len(one.partitions.tree()), len(two.partitions.tree())) == (3, 1)
    two.partitions.split("root", 9)
    assert [leaf.region.range("key").max for leaf in one.partitions.leaves()] == [5, None]


def test_reading_the_tree_takes_one_connection(table: TableContext) -> None:
    counting = CountingSupplier(table.supplier)  # type: ignore[arg-type]
    PartitionStore(counting, table.table).leaves()
    assert counting.lent == 1
