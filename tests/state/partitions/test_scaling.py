"""Splits, merges and scales compared with a naive model, which keeps every epoch's leaves; and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import below, overlap, partitions_of

from dormouse.errors import (
    DormouseError,
    FileReferenceAssignedToJob,
    InvalidRange,
    NotWhole,
    PartitionNotActive,
    PartitionNotFound,
)
from dormouse.model.region import min_value
from dormouse.state.trees import TreeReader
from tests.stored import assign, at_once, file, live, query, ref
from tests.support.model import BYTES, INT, LONG, STRING, Field, Partition, PartitionTree, Range, Region
from tests.support.state import LAYOUTS, FileChecks, PartitionStore, TableContext, tree_problems

NewTable = Callable[..., TableContext]
KEYS = [Field("i", INT), Field("l", LONG), Field("s", STRING), Field("b", BYTES)]
POINTS: dict[str, list[Any]] = {
    "i": [-(2**31) + 1, 0, 2**31 - 1],
    "l": [-(2**63) + 1, 5, 2**63 - 1],
    "s": ["\x00", "a\x00", "\U0001f42d"],
    "b": [b"\x00", b"\x80", b"\xff\xff"],
}
SPLITS = [(name, point) for name, points in POINTS.items() for point in points]


def check_covers(leaves: Iterable[Partition]) -> None:
    """Checks that each key lies in exactly one leaf.

    The bounds of the leaves form a grid. It suffices to test the lowest key of each cell.
    """
    leaves = list(leaves)
    edges = {
        field.name: {min_value(field.type)} | {each.region.range(field.name).min for each in leaves} - {None}
        for field in KEYS
    }
    for corner in itertools.product(*edges.values()):
        key = dict(zip(edges, corner, strict=True))
        assert sum(leaf.region.contains(key) for leaf in leaves) == 1, key


def nodes_of(tree: PartitionTree) -> dict[str, Partition]:
    return {partition.partition_id: partition for partition in partitions_of(tree)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.data())
def test_every_epoch_equals_the_model(new_table: NewTable, data: st.DataObject) -> None:
    """Compares the model with the trees of three stores: the writer's, one that is updated later, a new one.

    Partial trees are compared too.
    """
    table = new_table(*KEYS)
    store, watcher = table.partitions, PartitionStore(table.supplier, table.table)
    model = [nodes_of(watcher.tree())]
    for _ in range(data.draw(st.integers(2, 10), label="epochs")):
        tree = store.tree()
        at = data.draw(st.sampled_from(sorted(nodes_of(tree))), label="at")
        sealed = data.draw(st.permutations(below(tree, at)), label="sealed")
        splits = data.draw(st.lists(st.sampled_from(SPLITS), max_size=3), label="splits")
        before = {leaf.partition_id: leaf for leaf in tree.leaves}
        try:
            made = store.scale(sealed, splits)
        except InvalidRange:
            assert store.tree().epoch == tree.epoch
            continue
        if data.draw(st.booleans(), label="watched"):
            watcher.tree()
        after = {leaf.partition_id: leaf for leaf in store.tree().leaves}
        assert after == {key: value for key, value in before.items() if key not in sealed} | {
            leaf.partition_id: leaf for leaf in made
        }
        check_covers(after.values())
        model.append(nodes_of(store.tree()))
    watcher.tree()
    for epoch, expected in enumerate(model):
        for reader in (store, watcher, PartitionStore(table.supplier, table.table)):
            tree = reader.at(epoch)
            assert nodes_of(tree) == expected
            assert (len(tree), tree.leaf_count) == (len(expected), (len(expected) + 1) // 2)
            gone = {key for other in model for key in other} - expected.keys()
            assert all(tree.node(partition_id) is None for partition_id in gone)
        check_walks(table, epoch, expected, data)
    assert tree_problems(table.supplier, table.table) == []
    assert replayed(table) == [{key for key, one in now.items() if one.is_leaf} for now in model]


def check_walks(table: TableContext, epoch: int, expected: dict[str, Partition], data: st.DataObject) -> None:
    field, point = data.draw(st.sampled_from(SPLITS), label="walk")
    for ranges in ({}, {field: Range(point)}, {field: Range(None, point)}):
        with table.supplier.connection() as conn:
            tree = table.partitions.walk(conn, ranges, epoch=epoch)
        assert tree is not None and tree.epoch == epoch
        leaves = {key for key, one in expected.items() if one.is_leaf and overlap(one.region, Region(ranges))}
        assert {leaf.partition_id for leaf in tree.leaves} == leaves
        assert all(leaf.region == expected[leaf.partition_id].region for leaf in tree.leaves)


def replayed(table: TableContext) -> list[set[str]]:
    """Returns the leaves of each epoch, computed from what the epochs sealed and created."""
    rows = query(
        table.supplier,
        "select sealed, created from epoch where table_id = %s order by epoch",
        table.table.table_id,
    )
    found, leaves = [], set[str]()
    for sealed, created in rows:
        assert leaves >= set(sealed)
        leaves = leaves - set(sealed) | set(created)
        found.append(leaves)
    return found


@pytest.fixture
def halves(new_table: NewTable) -> TableContext:
    """Returns a table with four leaves, divided at 10, 20 and 30; two are below each child of the root."""
    return new_table(split_points=[10, 20, 30])


def ids(table: TableContext) -> list[str]:
    return [leaf.partition_id for leaf in table.partitions.leaves()]


def everything(table: TableContext) -> list[Any]:
    """Returns all rows of the database that a change of partitions could change."""
    queries = (
        "select * from partition where table_id = %s order by partition_id",
        "select * from epoch where table_id = %s order by epoch",
        "select epoch from tables where table_id = %s",
        "select * from removal where table_id = %s",
    )
    return [query(table.supplier, text, table.table.table_id) for text in queries] + [live(table.store)]


def test_leaves_are_merged_and_the_new_one_takes_the_place_of_their_parent(halves: TableContext) -> None:
    a, b, c, d = ids(halves)
    upper = halves.partitions.tree()[c].parent_id
    new = halves.partitions.merge([d, c])
    assert (new.region, new.parent_id, new.is_leaf) == (Region(key=Range(20)), "root", True)
    assert ids(halves) == [a, b, new.partition_id]
    left, right = halves.partitions.split(new.partition_id, 25)
    assert halves.partitions.tree().root.child_ids[1] == new.partition_id
    assert ids(halves) == [a, b, left.partition_id, right.partition_id]
    root = halves.partitions.merge(ids(halves))
    assert (root.region, root.parent_id, halves.partitions.root()) == (Region(), None, root)
    sealed, merged = "sealed_epoch, merged_epoch, merged_id", "where partition_id = %s and table_id = %s"
    [row] = query(halves.supplier, f"select {sealed} from partition {merged}", upper, halves.table.table_id)
    assert row == (0, 1, new.partition_id)
    assert [len(halves.partitions.at(epoch)) for epoch in range(4)] == [7, 5, 7, 1]
    for wrong in (a, upper, "root", new.partition_id):
        with pytest.raises(PartitionNotActive, match=f"partition '{wrong}' of table .* already"):
            halves.partitions.split(wrong or "", 15)


def test_a_scale_is_one_epoch_whose_partitions_in_between_are_no_leaves(halves: TableContext) -> None:
    a, b, _, _ = ids(halves)
    new = halves.partitions.scale([b, a], [("key", 5), ("key", 15), ("key", 0)])
    assert [leaf.region.range("key") for leaf in new] == [
        Range(None, 0),
        Range(0, 5),
        Range(5, 15),
        Range(15, 20),
    ]
    [row] = query(
        halves.supplier,
        "select sealed, created, splits, merges from epoch where table_id = %s and epoch = 1",
        halves.table.table_id,
    )
    # a overlaps three new leaves, b two; one new leaf overlaps both
    assert row == ([b, a], [leaf.partition_id for leaf in new], 2, 1)
    assert halves.partitions.tree().leaf_count == 6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_references_below_a_merged_partition_move_with_their_flags(new_table: NewTable, layout: str) -> None:
    table = new_table(split_points=[10], layout=layout)
    left, right = ids(table)
    whole = {"byte_count": 1_000, "row_count": 100}
    table.store.add_files_with_references(
        [
            file("a", ref("a", left), **whole),
            file("b", ref("b", right, rows=100), **whole),
            file("above", ref("above", "root", only_contains_data_for_this_partition=False), **whole),
        ]
    )
    table.store.totals.bring_forward()
    new = table.partitions.merge([left, right]).partition_id
    assert live(table.store) == [(new, "a", 100, None), (new, "above", 100, None), (new, "b", 100, None)]
    of = {r.filename: r.only_contains_data_for_this_partition for r in table.store.file_references()}
    assert of == {"a": True, "b": True, "above": False}
    [row] = query(
        table.supplier,
        "select sealed_rows, sealed_bytes, merges from epoch where table_id = %s and epoch = 1",
        table.table.table_id,
    )
    assert row == (200, 2_000, 1)
    removed = query(
        table.supplier,
        "select partition_id, unnest(ingested) from removal where table_id = %s order by partition_id",
        table.table.table_id,
    )
    assert removed == sorted([(left, True), (right, True), ("root", True)])
    own = table.store.own.layout.tables(table.table.table_id)["file_reference"]
    of_now = f"select bool_or(ingested) from {own}"
    assert query(table.supplier, f"{of_now} where partition_id <> ''") == [(False,)]
    assert FileChecks(table.store.own).problems() == []
    counted = table.store.totals.read()
    query(table.supplier, "update watermark set whole_at = null where table_id = %s", table.table.table_id)
    assert (counted.partitions, counted.leaves, counted.row_count) == (1, 1, 300)
    assert counted == table.store.totals.read()


BAD: dict[str, tuple[Callable[[list[str]], Any], list[Any], type[DormouseError], str]] = {
    "empty": (lambda p: [], [], InvalidRange, "the list is empty"),
    "not a list": (lambda p: p[0], [], InvalidRange, "must be a list of ids, not '"),
    "no ids": (lambda p: [1, 2], [], InvalidRange, "which are text, not 1"),
    "one alone": (lambda p: p[:1], [], InvalidRange, "alone cannot be merged"),
    "twice": (lambda p: [p[0], p[0]], [], InvalidRange, "is named twice"),
    "touch, but of two parents": (lambda p: p[1:3], [], InvalidRange, "not all leaves below one partition"),
    "a gap": (lambda p: [p[0], p[2]], [], InvalidRange, "not all leaves below one partition"),
    "one is left out": (
        lambda p: p[:3],
        [],
        InvalidRange,
        "not all leaves below 'root'.*; only all of them can",
    ),
    "unknown": (lambda p: [p[0], "nope"], [], PartitionNotFound, "has no partition 'nope'"),
    "no text": (lambda p: [p[0], "\ud800"], [], PartitionNotFound, "has no partition"),
    "not a leaf": (
        lambda p: ["root", p[0]],
        [],
        PartitionNotActive,
        "'root' of table .* was divided already",
    ),
    "no split": (lambda p: p[:1], ["x"], InvalidRange, r"must be \(field, point\), not 'x'"),
    "splits are text": (lambda p: p[:1], "key", InvalidRange, "must be a list"),
    "point outside": (lambda p: p[:2], [("key", 5), ("key", 25)], InvalidRange, "does not lie inside"),
    "point twice": (lambda p: p[:1], [("key", 5), ("key", 5)], InvalidRange, "does not lie inside"),
    "not of the type": (lambda p: p[:1], [("key", "x")], InvalidRange, "split point: .*'key'"),
    "no key": (lambda p: p[:1], [("nope", 1)], InvalidRange, "is not a row key"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_requests_are_refused_in_one_line_and_change_nothing(halves: TableContext, case: str) -> None:
    sealed, splits, error, text = BAD[case]
    before = everything(halves)
    with pytest.raises(error, match=text) as raised:
        halves.partitions.scale(sealed(ids(halves)), splits)
    assert "\n" not in str(raised.value)
    assert everything(halves) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_whose_files_cannot_move_are_refused(new_table: NewTable, layout: str) -> None:
    table = new_table(split_points=[10], layout=layout)
    left, right = ids(table)
    shared = {"only_contains_data_for_this_partition": False}
    table.store.add_files_with_references([file("f", ref("f", left, **shared), ref("f", right, **shared))])
    before = everything(table)
    with pytest.raises(NotWhole, match=f"'{min(left, right)}' .* file 'f'.*compact .* --full' first"):
        table.partitions.merge([left, right])
    table.store.assign_job_ids([assign("j", left, "f")])
    with pytest.raises(FileReferenceAssignedToJob, match=r"'f'.*'j'"):
        table.partitions.merge([left, right])
    table.store.unassign_job("j")
    assert everything(table)[:4] == before[:4]


def test_a_repeated_request_gets_the_same_answer(halves: TableContext) -> None:
    a, b, c, _ = ids(halves)
    first = halves.partitions.scale([a, b], [("key", 7)], "r1")
    halves.partitions.split(first[0].partition_id, 3)
    before = everything(halves)
    assert halves.partitions.scale([b, a], [("key", 7)], "r1") == first
    with pytest.raises(InvalidRange, match=r"request id 'r1' of table .* was used before"):
        halves.partitions.scale([c], [("key", 25)], "r1")
    assert everything(halves) == before


def test_one_of_concurrent_scales_succeeds_and_the_others_change_nothing(halves: TableContext) -> None:
    for n in range(6):
        leaves = ids(halves)
        tree = halves.partitions.tree()
        above = tree[leaves[0]].parent_id
        pair = below(tree, above) if above else leaves
        race: list[Callable[[], Any]] = [
            lambda pair=pair: halves.partitions.merge(pair),
            lambda pair=pair, n=n: halves.partitions.scale(pair, [("key", -100 * n - 150)]),
            lambda leaf=leaves[0], n=n: halves.partitions.split(leaf, -100 * n - 100),
        ]
        if len(pair) == 1:
            race = race[2:] * 3
        outcomes = at_once(*race)
        won = [each for each in outcomes if not isinstance(each, Exception)]
        assert len(won) == 1, outcomes
        others = [each for each in outcomes if isinstance(each, Exception)]
        assert not [e for e in others if not isinstance(e, PartitionNotActive)]
        assert halves.partitions.tree().epoch == n + 1
        assert (
            len(query(halves.supplier, "select epoch from epoch where table_id = %s", halves.table.table_id))
            == n + 2
        )
    assert tree_problems(halves.supplier, halves.table) == []


def test_running_totals_are_stored_every_thousand_epochs(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table also has epochs that a Dormouse without running totals recorded."""
    table = new_table(split_points=[10])
    query(table.supplier, "update tables set epoch = 998 where table_id = %s", table.table.table_id)
    query(
        table.supplier,
        "insert into epoch (table_id, epoch, created_at, sealed, created, splits) select %s, n, "
        "'2020-01-01'::timestamptz + n * interval '1 s', '{}', '{}', 1 from generate_series(1, 998) n",
        table.table.table_id,
    )
    pair = ids(table)
    for _ in range(2):
        new = table.partitions.merge(pair)
        pair = [each.partition_id for each in table.partitions.split(new.partition_id, 10)]
    chunks = query(
        table.supplier,
        "select chunk, splits, merges, sealed_rows from history_chunk where table_id = %s",
        table.table.table_id,
    )
    assert chunks == [(1, 999, 1, 0)]
    query(
        table.supplier,
        "update history_chunk set merges = 7 where table_id = %s",
        table.table.table_id,
    )
    assert any("running totals" in each.detail for each in tree_problems(table.supplier, table.table))


def test_a_tree_from_before_the_last_merge_is_read_once(halves: TableContext) -> None:
    pair = ids(halves)[:2]
    halves.partitions.merge(pair)
    fresh = PartitionStore(halves.supplier, halves.table)
    assert [leaf.partition_id for leaf in fresh.at(0).leaves][:2] == pair
    assert fresh.at(0).arrays is fresh.at(0).arrays
    assert fresh.at(0).arrays is not fresh.tree().arrays
    with pytest.raises(ValueError, match="at epoch 1, not yet at 2"):
        fresh.at(2)


def test_a_merge_between_two_pages_of_the_tree_does_no_harm(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(split_points=[10, 20, 30, 40, 50])
    expected = nodes_of(table.partitions.tree())
    monkeypatch.setattr("dormouse.state.trees.PAGE_ROWS", 3)
    pages = TreeReader._pages

    def merging(*given: Any) -> Iterator[Any]:
        for number, page in enumerate(pages(*given)):
            yield page
            if number == 0:
                with suppress(DormouseError):
                    table.partitions.merge(below(table.partitions.at(0), "root"))

    monkeypatch.setattr(TreeReader, "_pages", merging)
    fresh = PartitionStore(table.supplier, table.table)
    with fresh._supplier.connection() as conn:
        arrays = fresh._reader.whole(conn)
    assert arrays.epoch == 0
    assert nodes_of(PartitionTree(arrays, 0)) == expected
