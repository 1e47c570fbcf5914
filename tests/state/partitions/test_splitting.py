"""Tests of splits: leaves are divided by their rows, references follow, and each row stays in one leaf."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from data_files import SKETCHES, add_file, keys_in
from trees import ancestors, partitions_of

from dormouse.writing import splitting
from dormouse.writing.splitting import SplitReport
from tests.stored import assign, at_once
from tests.support.model import LONG, STRING, Field, Partition
from tests.support.state import TableContext
from tests.support.writing import compact, split

NewTable = Callable[..., TableContext]
ROUNDS_MAX = 20


@pytest.fixture
def table(new_table: NewTable) -> TableContext:
    return new_table(split_threshold_rows=100, split_min_rows=2)


@pytest.fixture
def plane(new_table: NewTable) -> TableContext:
    """Returns a table with two row keys, a number and a string."""
    return new_table(Field("x", LONG), Field("y", STRING), split_threshold_rows=40, split_min_rows=2)


def leaf_keys(table: TableContext, leaf: Partition) -> list[Any]:
    """Returns the keys that a query of the leaf reads: its files, restricted to its region if needed."""
    names = table.schema.row_key_names
    found = []
    for reference in table.store.file_references_in([leaf.partition_id]):
        for key in keys_in(table, reference.filename):
            values = key if isinstance(key, tuple) else (key,)
            inside = leaf.region.contains(dict(zip(names, values, strict=True)))
            if inside or reference.only_contains_data_for_this_partition:
                found.append(key)
    return found


def all_keys(table: TableContext) -> Counter[Any]:
    return Counter(key for leaf in table.partitions.leaves() for key in leaf_keys(table, leaf))


def partitions_of_references(table: TableContext) -> set[str]:
    return {reference.partition_id for reference in table.store.file_references()}


def split_until_done(table: TableContext) -> list[SplitReport]:
    reports = []
    while len(reports) < ROUNDS_MAX:
        reports.append(split(table))
        if not (reports[-1].partitions_split or reports[-1].references_pushed):
            return reports
    raise AssertionError(f"still splitting after {ROUNDS_MAX} rounds")


def test_a_full_leaf_is_divided_at_its_median_and_its_references_follow(table: TableContext) -> None:
    add_file(table, "evens", range(0, 100, 2))
    add_file(table, "odds", range(1, 100, 2))
    report = split(table)
    [divided] = report.partitions_split
    left, right = table.partitions.leaves()
    assert (divided.parent, divided.field) == ("root", "key")
    assert (divided.left, divided.right) == (left.partition_id, right.partition_id)
    assert 45 <= int(divided.point) <= 55
    references = list(table.store.file_references())
    assert report.references_pushed == 2
    assert {r.partition_id for r in references} == {left.partition_id, right.partition_id}
    assert all(r.count_approximate and not r.only_contains_data_for_this_partition for r in references)
    assert sum(r.row_count for r in references) == 100
    assert split(table) == SplitReport((), 0)


def test_a_leaf_below_the_threshold_is_left_alone(table: TableContext) -> None:
    add_file(table, "a", range(99))
    assert split(table) == SplitReport((), 0)


def test_a_leaf_below_the_least_rows_is_left_alone(new_table: NewTable) -> None:
    table = new_table(split_threshold_rows=10, split_min_rows=100)
    add_file(table, "a", range(99))
    assert split(table) == SplitReport((), 0)


def test_a_leaf_whose_keys_are_all_equal_is_left_alone(
    table: TableContext, caplog: pytest.LogCaptureFixture
) -> None:
    add_file(table, "a", [7] * 150)
    with caplog.at_level(logging.DEBUG, "dormouse.writing.splitting"):
        assert split(table) == SplitReport((), 0, one_key_partitions=("root",))
    assert "cannot be divided" in caplog.text


def test_a_heavy_key_gets_its_share_of_the_rows(table: TableContext) -> None:
    """One key has 140 of 150 rows. The children's references count 140 and 10 rows, and not half each."""
    add_file(table, "a", [7] * 140 + [8] * 10)
    split(table)
    left, right = (table.store.file_references_in([leaf.partition_id]) for leaf in table.partitions.leaves())
    assert ([r.row_count for r in left], [r.row_count for r in right]) == ([140], [10])


def test_the_first_row_key_that_can_be_divided_is(plane: TableContext) -> None:
    add_file(plane, "a", [(7, f"{n:02}") for n in range(60)])
    [divided] = split(plane).partitions_split
    assert divided.field == "y"
    assert "25" < str(divided.point) < "35"


def test_references_are_pushed_down_one_level_a_round(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "BATCH_REFERENCES", 1)
    table = new_table(split_points=range(10, 80, 10))
    tree = table.partitions.tree()
    # its children, with the references pushed to them in this round, come after it by name
    upper = tree.root.child_ids[0]
    name = add_file(table, "a", range(40), [upper])
    depths = []
    while not depths or split(table).references_pushed:
        partitions = {r.partition_id for r in table.store.file_references()}
        depths.append({len(list(ancestors(tree, partition))) for partition in partitions})
    assert depths == [{1}, {2}, {3}]
    assert {r.filename for r in table.store.file_references()} == {name}
    assert all_keys(table) == Counter(range(40))


def test_references_that_a_job_holds_wait_for_it(table: TableContext) -> None:
    names = [add_file(table, name, range(60)) for name in ("a", "b")]
    table.store.assign_job_ids([assign("job", "root", *names)])
    assert len(split(table).partitions_split) == 1
    assert partitions_of_references(table) == {"root"}
    assert compact(table, engine="local", create=False).jobs_run == 1
    assert split(table).references_pushed == 1
    assert "root" not in partitions_of_references(table)
    assert all_keys(table) == Counter([*range(60), *range(60)])


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_without_sketches_the_keys_are_read(
    table: TableContext, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = add_file(table, "a", range(200))
    table.objects.delete([name + SKETCHES])
    if damage == "corrupt":
        table.objects.put(name + SKETCHES, b"DMSK\x01 nonsense")
    [divided] = split(table).partitions_split
    assert 90 <= int(divided.point) <= 110
    assert name in caplog.text
    assert all_keys(table) == Counter(range(200))


def test_a_file_that_cannot_be_read_holds_up_its_leaf_alone(
    new_table: NewTable, caplog: pytest.LogCaptureFixture
) -> None:
    table = new_table(split_points=[1000], split_threshold_rows=100, split_min_rows=2)
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    bad = add_file(table, "bad", range(200), [left])
    add_file(table, "good", range(1000, 1200), [right])
    table.objects.delete([bad, bad + SKETCHES])
    table.objects.put(bad, b"PAR1 nonsense PAR1")
    assert [divided.parent for divided in split(table).partitions_split] == [right]
    assert bad in caplog.text


def test_rows_of_other_partitions_do_not_fill_a_leaf(new_table: NewTable) -> None:
    """The file has 5 rows in one leaf and 495 in another. Each reference estimates half of the rows.

    The file's sketches show that only the second leaf has enough rows for a split.
    """
    table = new_table(split_points=[1000], split_threshold_rows=100, split_min_rows=2)
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    add_file(table, "a", [*range(5), *range(1000, 1495)], leaves)
    assert [divided.parent for divided in split(table).partitions_split] == [leaves[1]]


def test_the_median_is_computed_from_the_rows_inside_the_leaf(new_table: NewTable) -> None:
    table = new_table(split_points=[1000], split_threshold_rows=100, split_min_rows=2)
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    add_file(table, "wide", range(0, 2000, 4), leaves)
    add_file(table, "low", range(0, 200), leaves[:1])
    points = [int(divided.point) for divided in split(table).partitions_split]
    # of the left leaf's 450 rows, 250 lie below 200: 1.25 a key
    assert abs(points[0] - 180) <= 20
    assert abs(points[1] - 1500) <= 40


def test_a_second_key_is_divided_by_the_rows_inside_alone(new_table: NewTable) -> None:
    """The two keys correlate: the file's sketch of the second key mixes the rows of both leaves."""
    table = new_table(
        Field("x", LONG), Field("y", LONG), split_points=[1], split_threshold_rows=50, split_min_rows=2
    )
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    below, above = [(0, y) for y in range(100)], [(1, y) for y in range(10_000, 10_100)]
    add_file(table, "a", [*below, *above], [left, right])
    points = {divided.parent: divided for divided in split(table).partitions_split}
    assert 40 <= int(points[left].point) <= 60
    assert 10_040 <= int(points[right].point) <= 10_060
    assert points[left].field == points[right].field == "y"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_in_exactly_one_leaf_when_splitting_is_done(plane: TableContext, seed: int) -> None:
    """Splits random, skewed and correlated keys until nothing is left to divide or push down."""
    draw = random.Random(seed)
    expected: Counter[Any] = Counter()
    for number in range(3):
        keys = []
        for _ in range(draw.choice([60, 200])):
            x = draw.choice([0, 1, 1, draw.randrange(-5, 5)])
            y = chr(97 + abs(x)) * draw.randrange(3) if draw.random() < 0.5 else f"{draw.randrange(300)}"
            keys.append((x, y))
        add_file(plane, f"file-{number}", keys)
        expected.update(keys)
        split(plane)
    split_until_done(plane)
    leaves = plane.partitions.leaves()
    assert all_keys(plane) == expected
    assert partitions_of_references(plane) <= {leaf.partition_id for leaf in leaves}
    assert {d.split.field for d in partitions_of(plane.partitions.tree()) if d.split} == {"x", "y"}
    # the estimates come from sketches: near the threshold they may err by a few rows
    for keys in (leaf_keys(plane, leaf) for leaf in leaves):
        assert keys, "a leaf was divided where it has no rows"
        assert len(keys) < 44 or len(set(keys)) == 1


def test_two_concurrent_rounds_divide_each_leaf_once(new_table: NewTable) -> None:
    # so few rows that halves are not full: the later round must find nothing to divide
    table = new_table(split_points=[1000, 2000, 3000], split_threshold_rows=150, split_min_rows=2)
    leaves = table.partitions.leaves()
    for number, leaf in enumerate(leaves):
        add_file(table, leaf.partition_id, range(number * 1000, number * 1000 + 200), [leaf.partition_id])
    reports = at_once(*[lambda: split(table)] * 3)
    divided = Counter(d.parent for report in reports for d in report.partitions_split)
    assert divided == Counter(leaf.partition_id for leaf in leaves)
    split_until_done(table)
    assert all_keys(table) == Counter(n * 1000 + k for n in range(4) for k in range(200))


@pytest.mark.slow
def test_splits_beside_ingests_and_compactions_lose_nothing(new_table: NewTable) -> None:
    table = new_table(
        split_threshold_rows=100, split_min_rows=2, compaction_strategy="basic", compaction_batch_files=2
    )
    leaf = table.partitions.leaves()[0].partition_id

    def ingest() -> None:
        for number in range(12):
            add_file(table, f"file-{number}", range(number, 1200, 12), [leaf])

    def compact_often() -> None:
        for _ in range(6):
            assert compact(table, engine="local").jobs_failed == 0

    def split_often() -> None:
        for _ in range(10):
            split(table)

    assert at_once(ingest, compact_often, split_often) == [None] * 3
    split_until_done(table)
    compact(table, engine="local")
    assert all_keys(table) == Counter(range(1200))
    assert len(table.partitions.leaves()) > 8
