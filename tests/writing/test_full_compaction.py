"""Full compactions, which make one file of each leaf even where the strategy would not."""

from __future__ import annotations

from collections import Counter

import pyarrow.parquet as pq
import pytest
from keyed_tables import MARKS, SCHEMA, begun, data, delete_keys, keyed, seen, upsert

import dormouse as dm
from dormouse.data.newest import places_of
from dormouse.errors import NotWhole
from tests.support.api import Instance, Table
from tests.support.model import is_inlined
from tests.support.state import LAYOUTS


@pytest.mark.objects
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_compaction_makes_one_file_of_each_leaf(instance: Instance, layout: str) -> None:
    table = keyed(
        instance, layout=layout, compaction_strategy="size_ratio", compaction_batch_files=4,
        split_threshold_rows=400, split_min_rows=2,
    )  # fmt: skip
    upsert(table, *((key, 0) for key in range(1_000)))
    table.split()
    table.compact()
    for number in range(1, 6):
        upsert(table, (number, number), (999 - number, number))
    table.compact()
    assert max(files_of_leaves(instance, table.name).values()) > 1
    expected = seen(table, instance)
    report = table.compact(full=True)
    assert (report.given_up, report.jobs_failed) == (0, 0)
    assert set(files_of_leaves(instance, table.name).values()) == {1}
    assert table.status().row_count == 1_000
    assert seen(table, instance) == expected
    assert table.compact(full=True).jobs_created == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_compaction_divides_files_that_a_round_of_splits_has_left_above(
    instance: Instance, layout: str
) -> None:
    """A round pushes references down one level, and a process can end between a split and its pushes."""
    table = keyed(instance, layout=layout, inline_bytes_max=65_536)
    for number in range(3):
        upsert(table, *((key, number) for key in range(number, 90, 3)))
    expected = seen(table, instance)
    left, _ = table.partitions.split("root", 40)
    table.partitions.split(left.partition_id, 20)
    report = table.compact(full=True)
    assert (report.given_up, report.jobs_failed) == (0, 0)
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    assert files_of_leaves(instance, table.name) == dict.fromkeys(leaves, 1)
    assert not any(is_inlined(one.filename) for one in table.context.store.file_references())
    assert seen(table, instance) == expected
    assert table.compact(full=True).jobs_created == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_that_share_one_file_can_be_merged_after_a_full_compaction(
    instance: Instance, layout: str
) -> None:
    table = keyed(instance, layout=layout, split_threshold_rows=100, split_min_rows=2)
    upsert(table, *((key, 0) for key in range(150)))
    table.split()
    assert list(files_of_leaves(instance, table.name).values()) == [1, 1]
    expected = seen(table, instance)
    partitions = instance.table(table.name).context.partitions
    leaves = [leaf.partition_id for leaf in partitions.leaves()]
    with pytest.raises(NotWhole, match=f"run 'dormouse compact {table.name} --full' first"):
        partitions.merge(leaves)
    assert table.compact(full=True).jobs_created == 2
    partitions.merge(leaves)
    assert len(partitions.leaves()) == 1
    assert seen(table, instance) == expected


@pytest.mark.slow
def test_a_leaf_of_a_keyed_table_becomes_one_file_now_and_then(instance: Instance) -> None:
    """Full merges must be rare: compactions write at most five rows for each upserted row."""
    table = keyed(instance, compaction_strategy="size_ratio", compaction_batch_files=12)
    upsert(table, *((key, 0) for key in range(400)))
    written, upserted, single = 0, 400, 0
    for number in range(1, 60):
        upsert(table, *((key % 400, number) for key in range(number * 7, number * 7 + 10)))
        upserted += 10
        written += table.compact().rows_written
        single += list(files_of_leaves(instance, table.name).values()) == [1]
    assert 2 <= single <= 8
    assert written <= 5 * upserted
    assert seen(table, instance) == {
        key: max((n for n in range(1, 60) for at in range(10) if (n * 7 + at) % 400 == key), default=0)
        for key in range(400)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_a_full_compaction_leaves_no_deleted_rows(instance: Instance, layout: str, keep: str | None) -> None:
    """Each leaf has one file, so that no file would be merged but for the deletions."""
    properties = dm.TableProperties(keep=keep, split_threshold_rows=400, split_min_rows=2)
    table = instance.create_table("t", SCHEMA, layout=layout, split_points=[500], properties=properties)
    table.ingest(data([(key, key % 10) for key in range(1_000)]), engine="local")
    table.compact(full=True)
    assert set(files_of_leaves(instance, "t").values()) == {1}
    for key in (3, 700, 5_000):
        table.delete({"k": key})
    assert stored_rows(table) == 1_000
    assert table.compact().jobs_run == 0
    table.delete({"v": 7, "k": dm.Range(500)})
    report = table.compact(full=True)
    assert (report.given_up, report.jobs_failed, report.jobs_run) == (0, 0, 2)
    left = {key: key % 10 for key in range(1_000) if key not in (3, 700) and (key < 500 or key % 10 != 7)}
    assert seen(table, instance) == left
    assert stored_rows(table) == len(left)
    again = table.compact(full=True)
    assert (again.jobs_created, again.jobs_run) == (0, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_compaction_drops_marks_of_deletion_in_a_single_file(instance: Instance, layout: str) -> None:
    """The marks hide nothing once no load is open that began before them."""
    table = keyed(instance, layout=layout, compaction_batch_files=10)
    table.upsert(data([(0, 0), (1, 0)], [True, False]), deletes=MARKS)
    assert (table.compact(full=True).jobs_run, stored_rows(table), has_marks(table)) == (1, 1, False)
    commit = begun(table, (1, 1), (5, 1))
    table.upsert(data([(key, 0) for key in range(10)], [key < 4 for key in range(10)]), deletes=MARKS)
    assert table.compact(full=True).jobs_run == 1
    assert has_marks(table), "the marks hide a row of the open load"
    assert table.compact(full=True).jobs_run == 0
    commit()
    assert seen(table, instance) == dict.fromkeys(range(4, 10), 0)
    assert table.compact(full=True).jobs_run == 1
    assert stored_rows(table) == 6
    delete_keys(table, 5)
    commit = begun(table, (5, 2))
    delete_keys(table, 6)
    assert table.compact(full=True).jobs_run == 1
    assert has_marks(table), "the mark of the last load hides rows of the open one"
    commit()
    assert table.compact(full=True).jobs_run == 1
    assert (seen(table, instance), has_marks(table)) == ({4: 0, 5: 2, 7: 0, 8: 0, 9: 0}, False)


@pytest.mark.objects
@pytest.mark.parametrize(("seconds", "is_left"), [(None, True), (3_600.0, True), (0.0, False)])
def test_a_full_compaction_keeps_marks_that_may_hide_older_rows(
    instance: Instance, seconds: float | None, is_left: bool
) -> None:
    properties = {} if seconds is None else {"deletion_marks_seconds": seconds}
    table = keyed(instance, newest_by="v", **properties)
    table.upsert(data([(1, 5), (2, 5)], [True, False]), deletes=MARKS)
    assert table.compact(full=True).jobs_run == (not is_left)
    assert has_marks(table) == is_left
    assert table.compact(full=True).jobs_run == 0
    assert seen(table, instance) == {2: 5}


def stored_rows(table: Table) -> int:
    """Returns the number of rows in the table's files, including replaced and deleted ones."""
    return sum(
        pq.read_metadata(str(table.context.objects.local_path(name))).num_rows for name in names_of(table)
    )


def has_marks(table: Table) -> bool:
    return any(places_of(table.context.objects, name).has_marks for name in names_of(table))


def names_of(table: Table) -> set[str]:
    return {reference.filename for reference in table.context.store.file_references()}


def files_of_leaves(instance: Instance, name: str) -> Counter[str]:
    references = instance.table(name).context.store.file_references()
    return Counter(reference.partition_id for reference in references)
