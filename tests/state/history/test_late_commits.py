"""Commits that were planned before leaves were merged: each is applied once, to the leaves that have the rows
now.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from histories import age, of
from trees import below, partitions_of

from dormouse.errors import DormouseError, FileAlreadyExists, PartitionForgotten, SplitRequestsFailed
from dormouse.postgres.transaction import run_transaction
from dormouse.state.files import garbage
from dormouse.state.history.retention import truncate
from dormouse.state.scaling import Scaling
from tests.stored import file, live, ref, split
from tests.support.model import PartitionTree
from tests.support.reading import query as rows_of
from tests.support.state import (
    LAYOUTS,
    Commit,
    FileChecks,
    PartitionStore,
    TableContext,
    record_cut,
    tree_problems,
)
from tests.support.writing import ingest
from tests.support.writing import split as split_round

NewTable = Callable[..., TableContext]
SHARED: dict[str, Any] = {"only_contains_data_for_this_partition": False}


@pytest.fixture(
    params=[(layout, level) for layout in LAYOUTS for level in ("read committed", "serializable")]
)
def table(request: Any, new_table: NewTable) -> TableContext:
    """Returns a table, in turn of each layout and isolation level."""
    layout, isolation = request.param
    return new_table(split_points=[10, 20, 30], layout=layout, isolation=isolation)


def leaves(table: TableContext) -> list[str]:
    return [leaf.partition_id for leaf in table.partitions.leaves()]


def references(table: TableContext) -> list[tuple[str, str, int, bool, bool]]:
    return sorted(
        (
            r.partition_id,
            r.filename,
            r.row_count,
            r.count_approximate,
            r.only_contains_data_for_this_partition,
        )
        for r in table.store.file_references()
    )


def test_files_of_merged_partitions_go_to_their_successors(table: TableContext) -> None:
    """Partitions are merged and split repeatedly. If two references become one, their counts are added."""
    a, b, c, d = leaves(table)
    first = table.partitions.merge([a, b])
    table.partitions.split(first.partition_id, 5)
    root = table.partitions.merge(leaves(table)).partition_id
    table.partitions.split(root, 15)
    files = [
        file("whole", ref("whole", a, rows=3)),
        file(
            "shared",
            ref("shared", a, rows=1, **SHARED),
            ref("shared", d, rows=2, count_approximate=True, **SHARED),
        ),
        file("gone, too", ref("gone, too", first.partition_id)),
    ]
    assert table.store.add_files_with_references(files, commit_id="x")
    assert not table.store.add_files_with_references(files, commit_id="x")
    assert references(table) == [
        (root, "gone, too", 100, False, True),
        (root, "shared", 3, True, False),
        (root, "whole", 3, False, True),
    ]
    with pytest.raises(FileAlreadyExists, match="'whole'"):
        table.store.add_files_with_references([file("new", ref("new", c)), files[0]])
    assert FileChecks(table.store.own).problems() == []


def test_each_commit_of_a_batch_succeeds_or_fails_alone(table: TableContext) -> None:
    a, b, c, d = leaves(table)
    table.store.add_files([ref("old", c)])
    new = table.partitions.merge([a, b]).partition_id
    commits = [
        Commit([file("1", ref("1", a))], "1"),
        Commit([file("old", ref("old", b))], "2"),
        Commit([file("3", ref("3", d))], "3"),
        Commit([file("4", ref("4", b))], "4"),
    ]
    results = table.store.apply("add_files", commits)
    assert [result.state for result in results] == ["applied", "refused", "applied", "applied"]
    assert isinstance(results[1].error, FileAlreadyExists)
    assert live(table.store) == sorted(
        [(new, "1", 100, None), (new, "4", 100, None), (c, "old", 100, None), (d, "3", 100, None)]
    )
    assert {result.state for result in table.store.apply("add_files", [commits[0], commits[3]])} == {
        "applied_before"
    }


def test_a_push_down_follows_a_merge_of_its_targets_or_is_refused(table: TableContext) -> None:
    tree = table.partitions.tree()
    left, right = tree.root.child_ids
    table.store.add_files([ref("above", "root", rows=7), ref("inside", left)])
    late = [
        split(ref("above", "root", rows=7), left, right),
        split(ref("inside", left), *tree[left].child_ids),
    ]
    new = table.partitions.merge(below(tree, left)).partition_id
    with pytest.raises(SplitRequestsFailed) as raised:
        table.store.split_file_references(late)
    assert raised.value.succeeded == (late[0],)
    assert "'inside'" in str(raised.value)
    assert live(table.store) == sorted(
        [(new, "above", 3, None), (right, "above", 4, None), (new, "inside", 100, None)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ingests_that_race_with_merges_lose_no_row_and_give_none_twice(
    new_table: NewTable, layout: str
) -> None:
    """Each ingest plans on its own copy of the tree, while other threads split, merge and push files down."""
    table = new_table(split_points=[100, 200, 300], layout=layout)
    done = threading.Event()
    merged = [0]

    def load(number: int) -> list[int]:
        mine = TableContext(table.dsn, table.supplier, table.objects, table.table)
        mine.partitions.tree()
        keys = []
        for n in range(12):
            some = [1_000 * k + number * 20 + n for k in range(-2, 3)] + [number * 20 + n]
            if n % 3:  # plans on a tree that may be outdated
                tree = mine.partitions.cached()
                mine.partitions.tree = lambda tree=tree: tree  # type: ignore[method-assign]
            else:
                mine.partitions.__dict__.pop("tree", None)
            ingest(mine, pa.table({"key": some}), ingest_id=None, engine="local", progress=None)
            keys += some
        return keys

    def scale() -> None:
        rng, store = random.Random(3), PartitionStore(table.supplier, table.table)
        while not done.is_set():
            tree = store.tree()
            inner = [partition for partition in partitions_of(tree) if not partition.is_leaf]
            with suppress(DormouseError):
                if inner and rng.random() < 0.6:
                    store.merge(below(tree, rng.choice(inner).partition_id))
                    merged[0] += 1
                else:
                    store.split(rng.choice(tree.leaves).partition_id, rng.randrange(-2_000, 2_000))
            split_round(table)

    with ThreadPoolExecutor(5) as pool:
        scaler = pool.submit(scale)
        try:
            expected = sorted(key for keys in pool.map(load, range(4)) for key in keys)
        finally:
            done.set()
        scaler.result()
    while split_round(table).references_pushed:
        pass
    assert merged[0] > 0
    assert sorted(rows_of(table).read_all()["key"].to_pylist()) == expected
    assert FileChecks(table.store.own).problems() == []
    assert tree_problems(table.supplier, table.table) == []


def test_a_merge_waits_for_a_transaction_that_adds_files(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge also moves files whose transaction is open when it begins."""
    a, b, *_ = leaves(table)
    tried = threading.Event()
    keep_writers_out = Scaling.keep_writers_out

    def telling(moves: Scaling, conn: Any) -> None:
        tried.set()
        keep_writers_out(moves, conn)

    monkeypatch.setattr(Scaling, "keep_writers_out", telling)
    with ThreadPoolExecutor(1) as pool:

        def add(conn: Any) -> Any:
            table.store.add_files([ref("late", a)], conn=conn)
            merging = pool.submit(PartitionStore(table.supplier, table.table).merge, [a, b])
            while not (tried.is_set() or merging.done()):
                tried.wait(0.01)
            return merging

        new = run_transaction(table.supplier, add).result()
    assert live(table.store) == [(new.partition_id, "late", 100, None)]
    assert FileChecks(table.store.own).problems() == []


def forgotten(table: TableContext) -> tuple[list[str], PartitionTree]:
    """Truncates the table's history, and forgets the earlier epochs.

    Returns the ids of leaves that were forgotten, and the current tree.
    """
    tree = table.partitions.tree()
    old = [leaf.partition_id for leaf in tree.leaves]
    table.partitions.merge(old)
    [root] = table.partitions.leaves()
    table.partitions.split(root.partition_id, 15)
    truncate(table, record_cut(table))
    age(table)
    assert (
        sum(piece.partitions for piece in garbage.forget_epochs(table.supplier, table.table))
        == 2 * len(old) - 1
    )
    return old, table.partitions.tree()


def test_a_commit_to_a_forgotten_partition_is_refused_by_name(table: TableContext) -> None:
    """No part of the refused commit is applied, but the other commits of its batch are.

    The error names the file and the partition. A repetition of an applied commit still succeeds.
    """
    first = table.partitions.leaves()[0].partition_id
    early = [file("early", ref("early", first))]
    assert table.store.add_files_with_references(early, commit_id="early")
    (a, b, *_), tree = forgotten(table)
    left, right = (leaf.partition_id for leaf in tree.leaves)
    with pytest.raises(PartitionForgotten, match=f"plan it again.*file 'late', partition '{b}'"):
        table.store.add_files_with_references([file("late", ref("late", left), ref("late", b))])
    assert not table.store.add_files_with_references(early, commit_id="early")
    commits = [
        Commit([file("1", ref("1", a))], "1"),
        Commit([file("2", ref("2", right))], "2"),
        Commit([file("early", ref("early", right))], "3"),
    ]
    results = table.store.apply("add_files", commits)
    assert [result.state for result in results] == ["refused", "applied", "refused"]
    assert isinstance(results[0].error, PartitionForgotten)
    assert isinstance(results[2].error, FileAlreadyExists)
    above = tree.root.partition_id
    table.store.add_files_with_references([file("above", ref("above", above))])
    late = [split(ref("above", above), a, b), split(ref("early", above), left, right)]
    with pytest.raises(SplitRequestsFailed, match="its successor is no longer known") as raised:
        table.store.split_file_references(late)
    assert raised.value.succeeded == (late[1],)
    names = [(partition, name) for partition, name, _, _ in live(table.store)]
    assert names == sorted([(above, "above"), (right, "2"), (left, "early"), (right, "early")])
    assert FileChecks(table.store.own).problems() == []


@pytest.mark.objects
def test_partitions_of_a_running_writer_are_not_forgotten(
    new_table: NewTable,
) -> None:
    """A running writer keeps the partitions that existed when it began, whatever is truncated."""
    table = new_table(split_points=[10])
    old = TableContext(table.dsn, table.supplier, table.objects, table.table)
    tree = old.partitions.tree()
    old.partitions.tree = lambda: tree  # type: ignore[method-assign]
    began = old.attempts.begin

    def late(record: Any, **how: Any) -> Any:
        attempt = began(record, **how)
        merged = table.partitions.merge([leaf.partition_id for leaf in tree.leaves])
        truncate(table, record_cut(table))
        age(table)
        of(table, "update write_attempt set started_at = started_at - interval '1 hour' where table_id = %s")
        assert list(garbage.forget_epochs(table.supplier, table.table)) == []
        assert merged.partition_id
        return attempt

    old.attempts.begin = late  # type: ignore[method-assign]
    ingest(old, pa.table({"key": [1, 15]}), ingest_id=None, engine="local", progress=None)
    assert {partition for partition, *_ in live(table.store)} == {"1-0"}
    assert sum(piece.partitions for piece in garbage.forget_epochs(table.supplier, table.table)) == 3
