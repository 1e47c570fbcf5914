"""Plans of queries: each matching row is read exactly once, and groups are in key order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import holds, tree_of

from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.region import KeyValue, united
from dormouse.reading.planner import (
    Page,
    PlannedReference,
    QueryPlan,
    added_up,
    first_page,
    plan,
    whole_page,
)
from tests.support.model import (
    BYTES,
    LONG,
    STRING,
    Field,
    Partition,
    PartitionTree,
    Range,
    Region,
    Schema,
    Split,
    encode_key,
    split_partition,
)
from tests.support.reading import Deletion, KeyRanges, Reach, may_hold

SCHEMA = Schema([Field("a", LONG), Field("b", STRING), Field("c", BYTES)])
VALUES: dict[str, list[Any]] = {
    "a": [-3, -1, 0, 1, 2, 5],
    "b": ["", "\x00", "a", "a\x00", "b", "é"],
    "c": [b"", b"\x00", b"\x00\x00", b"\xff"],
}
Row = dict[str, KeyValue]


def random_tree(rng: random.Random, splits: int) -> PartitionTree:
    """Returns a tree with random splits on random row keys."""
    partitions = {"root": Partition("root", None, Region())}
    for number in range(splits):
        leaf = rng.choice([p for p in partitions.values() if p.is_leaf])
        name = rng.choice(SCHEMA.row_key_names)
        inside = [v for v in VALUES[name] if leaf.region.range(name).contains(v)][1:]
        if inside:
            made = split_partition(SCHEMA, leaf, Split(name, rng.choice(inside)), f"{number}l", f"{number}r")
            partitions |= {p.partition_id: p for p in made}
    return tree_of(SCHEMA, partitions.values())


def rows_of(rng: random.Random, count: int) -> list[Row]:
    return [{name: rng.choice(values) for name, values in VALUES.items()} for _ in range(count)]


def ranges_of(rng: random.Random) -> KeyRanges:
    """Returns random ranges of random row keys: values, lists of values, open or closed ranges, or none."""
    return KeyRanges(
        {name: [range_of(rng, name) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))] for name in VALUES}
        if rng.random() < 0.1
        else {
            name: [range_of(rng, name) for _ in range(rng.choice([1, 1, 2, 3]))]
            for name in VALUES
            if rng.random() < 0.5
        }
    )


def range_of(rng: random.Random, name: str) -> Range:
    low, high = sorted(rng.choices(VALUES[name], k=2))
    if low == high:
        return Range.exactly(low)
    return Range(
        rng.choice([low, low, None]), rng.choice([high, high, None]), rng.random() < 0.5, rng.random() < 0.5
    )


def references_of(rng: random.Random, tree: PartitionTree) -> list[str]:
    """Returns random partitions, none of which is above another."""
    found, stack = [], [tree.root]
    while stack:
        partition = stack.pop()
        if rng.random() < 0.15:
            continue
        if partition.is_leaf or rng.random() < 0.2:
            found.append(partition.partition_id)
        else:
            stack += [tree[child] for child in partition.child_ids]
    return found


def file_of(
    rng: random.Random, tree: PartitionTree, name: str, known: bool
) -> tuple[FileWithReferences, list[Row]]:
    rows, partitions, only = rows_of(rng, 30), references_of(rng, tree), False
    if partitions and rng.random() < 0.4:
        partitions, only = partitions[:1], True
        rows = [row for row in rows if tree[partitions[0]].region.contains(row)]
    keys = [encode_key(SCHEMA.row_keys, list(row.values())) for row in rows]
    references = tuple(
        FileReference(filename=name, partition_id=p, row_count=1, only_contains_data_for_this_partition=only)
        for p in partitions
    )
    facts = {"min_key": min(keys), "max_key": max(keys)} if keys and known else {}
    return FileWithReferences(filename=name, references=references, byte_count=10, **facts), rows


def within(tree: PartitionTree, file: FileWithReferences, row: Row) -> bool:
    """Returns whether a row lies in one of the partitions that refer to the file."""
    return any(tree[r.partition_id].region.contains(row) for r in file.references)


def references_on(page: Page, files: list[FileWithReferences]) -> list[PlannedReference]:
    """Returns the references of the files to the page's partitions, in place of the database."""
    wanted = set(page.partition_ids)
    return [one for file in files for one in planned(file) if one.partition_id in wanted]


def planned(file: FileWithReferences) -> list[PlannedReference]:
    return [
        PlannedReference(
            r.partition_id,
            r.filename,
            r.only_contains_data_for_this_partition,
            file.byte_count,
            file.min_key,
            file.max_key,
        )
        for r in file.references
    ]


def read(plan_: QueryPlan, rows: Mapping[str, list[Row]]) -> Iterator[list[tuple[str, int]]]:
    """Yields for each group of the plan the rows that it reads, as (file, position in the file)."""
    for group in plan_.groups:
        yield [
            (scan.filename, n)
            for scan in group
            for n, row in enumerate(rows[scan.filename])
            if any(holds(part, row) for part in scan.slices)
        ]


@given(seed=st.integers(0, 2**32), in_key_order=st.booleans(), known=st.booleans())
def test_every_wanted_row_is_read_once(seed: int, in_key_order: bool, known: bool) -> None:
    """Covers random k-d trees, files referenced anywhere in them, and random ranges."""
    rng = random.Random(seed)
    tree, ranges = random_tree(rng, rng.randrange(8)), ranges_of(rng)
    made = [file_of(rng, tree, f"f{n}", known) for n in range(4)]
    files = [file for file, _ in made]
    rows = {file.filename: rows for file, rows in made}
    page = whole_page(tree, ranges, in_key_order=in_key_order)
    made_plan = plan(page, references_on(page, files))
    groups = list(read(made_plan, rows))
    assert sorted(one for group in groups for one in group) == [
        (file.filename, n)
        for file, file_rows in made
        for n, row in enumerate(file_rows)
        if within(tree, file, row) and holds(ranges, row)
    ]
    spans = [[tuple(rows[f][n].values()) for f, n in group] for group in groups if group]
    assert all(max(a) < min(b) for a, b in pairwise(spans))
    assert in_key_order or len(groups) <= 1
    assert made_plan.summary.files == len(made_plan.filenames)
    alone = plan(replace(page, is_only=True), references_on(page, files))
    assert (alone.groups, alone.summary) == (made_plan.groups, made_plan.summary)


@given(seed=st.integers(0, 2**32), leaves_max=st.integers(1, 4))
def test_the_pages_of_a_plan_read_what_the_whole_plan_reads(seed: int, leaves_max: int) -> None:
    """The pages read each row of the whole plan once, in key order. Their counts add up to the plan's."""
    rng = random.Random(seed)
    tree, ranges = random_tree(rng, rng.randrange(10)), ranges_of(rng)
    made = [file_of(rng, tree, f"f{n}", known=rng.random() < 0.5) for n in range(4)]
    files, rows = [file for file, _ in made], {file.filename: rows for file, rows in made}
    pages = []
    rest: KeyRanges | None = ranges
    while rest is not None:
        page = first_page(tree, rest, leaves_max)
        pages.append(plan(page, references_on(page, files)))
        rest = page.rest
    all_of_it = whole_page(tree, ranges)
    whole = plan(all_of_it, references_on(all_of_it, files))
    parts = [[one for group in read(page, rows) for one in group] for page in pages]
    assert sorted(one for part in parts for one in part) == sorted(
        one for group in read(whole, rows) for one in group
    )
    spans = [[tuple(rows[f][n].values()) for f, n in part] for part in parts if part]
    assert all(max(a) < min(b) for a, b in pairwise(spans))
    together = added_up(pages)
    assert together.files == len({name for page in pages for name in page.filenames})
    assert together.byte_count == 10 * together.files
    assert together.partitions_total == whole.summary.partitions_total


def simple(partition_id: str, *, only: bool, **facts: Any) -> FileWithReferences:
    reference = FileReference(
        filename="f", partition_id=partition_id, row_count=1, only_contains_data_for_this_partition=only
    )
    return FileWithReferences(filename="f", references=(reference,), **facts)


def two_leaves() -> PartitionTree:
    made = split_partition(SCHEMA, Partition("root", None, Region()), Split("a", 0), "left", "right")
    return tree_of(SCHEMA, made)


ALL = whole_page(two_leaves(), KeyRanges())


def test_a_partitions_own_file_is_read_without_its_bounds() -> None:
    [[scan]] = plan(ALL, planned(simple("left", only=True))).groups
    assert not all(scan.slices)
    [[scan]] = plan(ALL, planned(simple("left", only=False))).groups
    assert scan.slices == (KeyRanges({"a": [Range(None, 0)]}),)


def test_a_file_above_the_leaves_is_read_once_a_group() -> None:
    groups = plan(ALL, planned(simple("root", only=True))).groups
    assert [[s.slices for s in group] for group in groups] == [
        [(KeyRanges({"a": [Range(None, 0)]}),)],
        [(KeyRanges({"a": [Range(0, None)]}),)],
    ]
    [[scan]] = plan(replace(ALL, in_key_order=False), planned(simple("root", only=True))).groups
    assert not all(scan.slices)


@pytest.mark.parametrize(
    ("ranges", "holds"),
    [
        ({}, True),
        ({"a": [Range(6, None)]}, False),
        ({"a": [Range(None, 2)]}, False),
        ({"a": [Range(5, None)]}, True),
        ({"a": [Range.exactly(2)], "b": [Range(None, "l")]}, False),
        ({"a": [Range.exactly(2)], "b": [Range("m", None)]}, True),
        ({"a": [Range.exactly(5)], "b": [Range("o", None)]}, False),
        ({"a": [Range.exactly(3)], "b": [Range.exactly("zzz")]}, True),
        ({"a": [Range.exactly(0), Range.exactly(9)]}, False),
        ({"a": [Range.exactly(0), Range.exactly(4), Range.exactly(9)]}, True),
        ({"b": [Range.exactly("a")]}, True),
        ({"a": []}, False),
    ],
)
def test_files_are_pruned_by_their_smallest_and_largest_key(
    ranges: dict[str, list[Range]], holds: bool
) -> None:
    smallest, largest = (encode_key(SCHEMA.row_keys, key) for key in ((2, "m", b"x"), (5, "n", b"y")))
    assert may_hold(SCHEMA, smallest, largest, KeyRanges(ranges)) is holds
    assert may_hold(SCHEMA, None, None, KeyRanges(ranges)) is (ranges != {"a": []})


def test_a_later_key_prunes_if_the_earlier_keys_are_constant_in_a_file() -> None:
    smallest, largest = (encode_key(SCHEMA.row_keys, key) for key in ((2, "m", b"x"), (2, "n", b"y")))
    assert not may_hold(SCHEMA, smallest, largest, KeyRanges({"b": [Range("o", None)]}))
    assert not may_hold(SCHEMA, smallest, largest, KeyRanges({"b": [Range.exactly("a"), Range.exactly("z")]}))
    assert may_hold(SCHEMA, smallest, largest, KeyRanges({"b": [Range.exactly("a"), Range.exactly("mm")]}))


@pytest.mark.parametrize(
    "schema", [SCHEMA, Schema([Field("b", STRING), Field("a", LONG), Field("c", BYTES)])]
)
def test_the_deletions_that_reach_a_file_are_those_whose_ranges_it_may_hold(schema: Schema) -> None:
    rng = random.Random(58)
    deletions = [Deletion(number, "", ranges_of(rng), ()) for number in range(200)]
    reach, outcomes = Reach(schema, deletions), set[bool]()
    for _ in range(300):
        keys = [tuple(row[name] for name in schema.row_key_names) for row in rows_of(rng, 2)]
        low, high = sorted(encode_key(schema.row_keys, key) for key in keys)
        held = [one for one in deletions if may_hold(schema, low, high, one.ranges)]
        assert list(reach.of(-1, low, high)) == held
        outcomes |= {one in held for one in deletions}
    assert outcomes == {True, False}


def test_a_plan_has_a_summary_of_what_it_reads() -> None:
    largest = encode_key(SCHEMA.row_keys, (-2, "", b""))
    smallest = encode_key(SCHEMA.row_keys, (-3, "", b""))
    file = simple("left", only=True, byte_count=70, min_key=smallest, max_key=largest)
    summary = plan(whole_page(two_leaves(), KeyRanges({"a": [Range(-2, 0)]})), planned(file)).summary
    assert (summary.partitions, summary.partitions_total) == (1, 2)
    assert (summary.files, summary.files_pruned, summary.byte_count) == (1, 0, 70)
    summary = plan(whole_page(two_leaves(), KeyRanges({"a": [Range(-1, 0)]})), planned(file)).summary
    assert (summary.files, summary.files_pruned, summary.byte_count) == (0, 1, 0)


@given(seed=st.integers(0, 2**32))
def test_ranges_combine_like_sets(seed: int) -> None:
    """A row lies in an intersection if it lies in both ranges. A union has at least all rows of both."""
    rng = random.Random(seed)
    one, other = ranges_of(rng), ranges_of(rng)
    both, either = one.intersect(other), united([one, other])
    for row in rows_of(rng, 50):
        assert holds(both, row) is (holds(one, row) and holds(other, row))
        assert holds(either, row) or not (holds(one, row) or holds(other, row))
        assert not (both.is_empty and holds(both, row))


def test_a_list_of_thousands_of_keys_is_planned_on_thousands_of_leaves_without_their_product() -> None:
    """The planner gives each leaf only its part of the list of keys.

    Comparing each of the 1,024 keys with each of the 2,048 leaves would take too long.
    """
    partitions = [Partition("root", None, Region())]
    todo = [(partitions[0], 0, 2_048)]
    done: list[Partition] = []
    while todo:
        partition, low, high = todo.pop()
        if high - low == 1:
            done.append(partition)
            continue
        middle = (low + high) // 2
        parent, left, right = split_partition(
            SCHEMA, partition, Split("a", middle), f"{low}-{middle}", f"{middle}-{high}"
        )
        done.append(parent)
        todo += [(left, low, middle), (right, middle, high)]
    tree = tree_of(SCHEMA, done)
    ranges = KeyRanges({"a": [Range.exactly(n) for n in range(0, 2_048, 2)]})
    groups = plan(whole_page(tree, ranges), planned(simple("root", only=True))).groups
    assert len(groups) == 1_024
    assert sum(len(one["a"]) for [scan] in groups for one in scan.slices) == 1_024
