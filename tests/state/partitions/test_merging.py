"""Tests of rounds of merges: small leaves become one, and a split is not undone at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from dormouse.errors import InvalidProperties
from dormouse.writing.splitting import merge, mergeable
from tests.stored import query
from tests.support.reading import query as rows_of
from tests.support.state import LAYOUTS, FileChecks, TableContext, tree_problems
from tests.support.writing import ingest, split

NewTable = Callable[..., TableContext]


def load(table: TableContext, keys: range) -> None:
    ingest(table, pa.table({"key": list(keys)}), ingest_id=None, engine="local", progress=None)


def keys_of(table: TableContext) -> list[int]:
    return rows_of(table).read_all()["key"].to_pylist()


def leaf_count(table: TableContext) -> int:
    return table.partitions.tree().leaf_count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_leaves_are_merged_level_by_level(new_table: NewTable, layout: str) -> None:
    table = new_table(split_points=[10, 20, 30], layout=layout, merge_threshold_rows=100)
    load(table, range(40))
    table.store.totals.bring_forward()
    assert sorted(pair.row_count for pair in mergeable(table)) == [20, 20]
    found = []
    for _ in range(4):
        report = merge(table)
        assert report.errors == ()
        found.append((len(report.partitions_merged), leaf_count(table)))
    assert found == [(2, 2), (1, 1), (0, 1), (0, 1)]
    assert keys_of(table) == list(range(40))
    assert table.store.totals.read().row_count == 40
    assert FileChecks(table.store.own).problems() == []
    assert tree_problems(table.supplier, table.table) == []
    ended = query(
        table.supplier, "select kind, error from last_round where table_id = %s", table.table.table_id
    )
    assert ("merge", None) in ended


def test_files_shared_by_leaves_are_compacted_before_a_merge(new_table: NewTable) -> None:
    """Two leaves share a file. The round compacts both leaves, so that each has its own files, and merges."""
    table = new_table(merge_threshold_rows=1_000)
    load(table, range(100))
    table.partitions.split("root", 50)
    split(table)
    load(table, range(100, 120))
    assert {r.only_contains_data_for_this_partition for r in table.store.file_references()} == {False, True}
    report = merge(table)
    assert (len(report.partitions_merged), report.jobs_run, report.errors) == (1, 2, ())
    assert keys_of(table) == list(range(120))
    assert all(r.only_contains_data_for_this_partition for r in table.store.file_references())
    assert merge(table).partitions_merged == ()


def test_a_leaf_whose_files_a_job_holds_waits(new_table: NewTable) -> None:
    table = new_table(
        split_points=[10], merge_threshold_rows=100, compaction_strategy="basic", compaction_batch_files=2
    )
    for _ in range(2):
        load(table, range(20))
    assert table.jobs.create() == 2
    assert merge(table) == type(merge(table))((), 0)
    jobs = table.jobs.take(9)
    for job in jobs:
        table.store.unassign_job(job.job_id)
    assert len(merge(table).partitions_merged) == 1


@pytest.mark.parametrize(
    ("properties", "rows", "merges"),
    [
        ({"merge_threshold_rows": 41}, 40, True),
        ({"merge_threshold_rows": 40}, 40, False),
        # leaves that a split would soon divide again are never merged
        ({"merge_threshold_rows": 1_000, "split_threshold_rows": 40, "split_min_rows": 2}, 30, False),
        ({"merge_threshold_rows": 1_000, "split_threshold_rows": 40, "split_min_rows": 2}, 29, True),
    ],
)
def test_leaves_are_merged_below_the_threshold(
    new_table: NewTable, properties: dict[str, Any], rows: int, merges: bool
) -> None:
    table = new_table(split_points=[10], **properties)
    load(table, range(rows))
    assert (len(list(mergeable(table))), len(merge(table).partitions_merged)) == (merges, merges)


def test_new_leaves_are_not_merged_at_once(new_table: NewTable) -> None:
    table = new_table(split_points=[10], merge_threshold_rows=100)
    assert merge(table, rest_seconds=3_600).partitions_merged == ()
    back = "update epoch set created_at = created_at - interval '2 h' where table_id = %s"
    query(table.supplier, back, table.table.table_id)
    assert len(merge(table, rest_seconds=3_600).partitions_merged) == 1


def test_only_changed_leaves_are_examined_for_merges(new_table: NewTable) -> None:
    table = new_table(split_points=[10, 20, 30], merge_threshold_rows=10)
    load(table, range(40))
    assert table.partitions.look_for_small_pairs() == 0
    query(
        table.supplier, "update tables set properties = properties where table_id = %s", table.table.table_id
    )
    assert table.partitions.look_for_small_pairs() == 0
    left, _ = table.partitions.split(table.partitions.leaves()[0].partition_id, -5)
    assert table.partitions.look_for_small_pairs() == 0
    table.partitions.split(left.partition_id, -9)
    assert table.partitions.look_for_small_pairs() == 1


def test_merging_without_the_property_is_refused_with_the_command_to_set_it(new_table: NewTable) -> None:
    table = new_table(split_points=[10])
    for use in (merge, mergeable):
        with pytest.raises(InvalidProperties, match=r"dormouse table set .* merge_threshold_rows="):
            use(table)
