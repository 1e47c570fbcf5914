"""Keyed tables: every reader sees only the newest row of each key, before and after compactions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from keyed_tables import MARKS, SCHEMA, begun, data, delete_keys, keyed, seen, upsert

import dormouse as dm
from dormouse.errors import InvalidData, QueryOvertaken
from dormouse.reading.keyed import KeyedScans
from dormouse.reading.scan_session import key_session
from dormouse.writing import deleting
from tests.support.api import Instance
from tests.support.reading import plan_query, question
from tests.support.state import LAYOUTS


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_row_of_each_key_stays(instance: Instance, layout: str) -> None:
    table = keyed(instance, layout=layout)
    upsert(table, (1, 10), (2, 20), (3, 30))
    upsert(table, (2, 21), (4, 40))
    assert seen(table, instance) == {1: 10, 2: 21, 3: 30, 4: 40}
    delete_keys(table, 3, 9)
    assert seen(table, instance) == {1: 10, 2: 21, 4: 40}
    while table.compact().jobs_run:
        assert seen(table, instance) == {1: 10, 2: 21, 4: 40}
    status = table.status()
    assert (status.files, status.row_count, status.rows_exact) == (1, 3, True)


def test_ingest_upserts_rows_of_a_keyed_table(instance: Instance) -> None:
    table = keyed(instance)
    table.ingest(data([(1, 1)]))
    table.ingest(data([(1, 2)]))
    assert seen(table, instance) == {1: 2}


def test_the_last_row_of_each_key_in_a_load_stays(instance: Instance) -> None:
    table = keyed(instance)
    report = table.upsert(data([(1, 1), (2, 2), (1, 3)]))
    assert report.rows == 2
    assert seen(table, instance) == {1: 3, 2: 2}
    table.upsert(data([(1, 4), (1, None), (2, None), (2, 5)], [False, True, True, False]), deletes=MARKS)
    assert seen(table, instance) == {2: 5}


def test_the_last_row_of_each_key_in_a_large_load_stays(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load exceeds its memory, so its rows are sorted in parts on disk, which are then merged."""
    from dormouse.writing import ingest

    table = keyed(instance)
    rows = [(key % 500, number) for number, key in enumerate(range(0, 70_000, 7))]
    batches = data(rows).to_batches(1_000)
    reader = pa.RecordBatchReader.from_batches(batches[0].schema, iter(batches))
    ingest.ingest_in_process(table.context, reader, memory_bytes=20_000)
    assert seen(table, instance) == dict(rows)


def test_a_load_that_began_later_wins_whenever_it_commits(instance: Instance) -> None:
    table = keyed(instance)
    early = begun(table, (1, 1), (2, 1))
    upsert(table, (1, 2))
    early()
    assert seen(table, instance) == {1: 2, 2: 1}
    table.compact()
    assert seen(table, instance) == {1: 2, 2: 1}


@pytest.mark.slow
def test_conditions_on_values_apply_to_the_newest_row_only(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 10), (2, 20))
    upsert(table, (1, 11))
    for compacted in (False, True):
        assert seen(table, instance, where={"v": 10}) == {}
        assert seen(table, instance, where={"v": 11}) == {1: 11}
        assert table.sql("select count(*) as n from t where v = 10").read_all().to_pylist() == [{"n": 0}]
        assert table.sql("select k from t where v < 15 and k < 5").read_all().to_pylist() == [{"k": 1}]
        assert table.sql("select v from t order by k limit 1").read_all().to_pylist() == [{"v": 11}]
        assert table.sql("select v from t where k = 1").read_all().to_pylist() == [{"v": 11}]
        with instance.duckdb(where={"t": {"v": 10}}) as opened:
            assert opened.execute("select * from t").fetchall() == []
        assert compacted or table.compact().jobs_run == 1


@pytest.mark.slow
def test_the_row_with_the_largest_value_of_newest_by_is_the_newest(instance: Instance) -> None:
    table = keyed(instance, newest_by="v")
    upsert(table, (1, 10), (1, 9), (2, 20))
    upsert(table, (1, 5), (2, 30))
    assert seen(table, instance) == {1: 10, 2: 30}
    upsert(table, (1, 10, "later"))
    assert table.query({"k": 1}, ["s"]).read_all().to_pylist() == [{"s": "later"}]
    delete_keys(table, 2, v=29)
    assert seen(table, instance) == {1: 10, 2: 30}
    delete_keys(table, 2, v=30)
    for _ in range(4):
        assert seen(table, instance) == {1: 10}
        table.compact()
    upsert(table, (2, 29))
    assert seen(table, instance) == {1: 10}
    upsert(table, (2, 31))
    assert seen(table, instance) == {1: 10, 2: 31}


def test_zeros_are_equal_and_nan_is_refused_in_the_column_of_newest_by(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("d", dm.DOUBLE), dm.Field("n", dm.LONG)])
    properties = dm.TableProperties(keep="newest_row", newest_by="d")
    table = instance.create_table("t", schema, properties=properties)
    for number, value in enumerate([0.0, -0.0]):
        table.upsert(pa.table({"k": [1], "d": [value], "n": [number]}))
    assert table.query(None, ["n"]).read_all().to_pylist() == [{"n": 1}]
    with pytest.raises(InvalidData, match=r"'d' determines which row is newer, but is NaN in row 1"):
        table.upsert(pa.table({"k": [1, 2], "d": [0.5, float("nan")], "n": [1, 2]}))


@pytest.mark.slow
@pytest.mark.parametrize("newest_by", [None, "v"])
def test_a_deletion_by_keys_applies_to_all_loads_that_began_before_it(
    instance: Instance, newest_by: str | None
) -> None:
    table = keyed(instance, newest_by=newest_by)
    upsert(table, (1, 1), (2, 2))
    late = begun(table, (1, 3), (3, 3), (9, 9))
    report = table.delete({"k": dm.Range(1, 4)})
    assert report.deletion_id == 1
    assert seen(table, instance) == {}
    table.collect_garbage()
    late()
    assert seen(table, instance) == {9: 9}
    for _ in range(3):
        table.compact()
        table.collect_garbage()
        assert seen(table, instance) == {9: 9}
    upsert(table, (1, 4))
    assert seen(table, instance) == {1: 4, 9: 9}


def test_a_deletion_stays_while_a_load_is_open_that_began_before_it(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (5, 5))
    late = begun(table, (1, 1))
    table.delete({"k": 1})
    table.compact()
    table.collect_garbage()
    assert table.status().deletions == 1
    late()
    assert seen(table, instance) == {5: 5}
    table.compact()
    table.collect_garbage()
    assert (table.status().deletions, seen(table, instance)) == (0, {5: 5})


@pytest.mark.slow
def test_with_newest_by_a_deletion_by_keys_hides_later_loads_of_older_rows(instance: Instance) -> None:
    table = keyed(instance, newest_by="v")
    upsert(table, (1, 10))
    table.delete({"k": 1})
    upsert(table, (1, 9))
    assert seen(table, instance) == {}
    for _ in range(4):
        table.compact()
        table.collect_garbage()
        assert seen(table, instance) == {}
    upsert(table, (1, 8))
    assert seen(table, instance) == {}
    upsert(table, (1, 11))
    assert seen(table, instance) == {1: 11}


@pytest.mark.slow
def test_a_deletion_by_values_deletes_the_newest_rows_that_match(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 7), (2, 7), (3, 3))
    upsert(table, (1, 8))
    late = begun(table, (2, 9))
    assert table.delete({"v": 7}, dry_run=True).rows == 1
    report = table.delete({"v": 7})
    assert (report.deletion_id, report.rows) == (None, 1)
    assert seen(table, instance) == {1: 8, 3: 3}, "no row that was replaced comes back"
    late()
    assert seen(table, instance) == {1: 8, 2: 9, 3: 3}, "the deletion has not seen the load that began before"
    while table.compact().jobs_run:
        assert seen(table, instance) == {1: 8, 2: 9, 3: 3}
    upsert(table, (2, 1))
    assert seen(table, instance) == {1: 8, 2: 1, 3: 3}


def test_a_deletion_by_values_is_ordered_like_the_row_that_it_deletes(instance: Instance) -> None:
    table = keyed(instance, newest_by="v", split_threshold_rows=2)
    upsert(table, (1, 7, "x"), (2, 3, "x"))
    assert table.delete({"s": "x"}).rows == 2
    upsert(table, (1, 6, "older"), (2, 4, "newer"))
    assert seen(table, instance) == {2: 4}


@pytest.mark.slow
@pytest.mark.objects
def test_marks_are_kept_while_another_file_has_an_older_row(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, *((key, 0) for key in range(50)))
    upsert(table, (7, 1))
    delete_keys(table, 7)
    assert table.compact().jobs_run == 1  # a job of the two small files
    assert table.status().files == 2
    assert 7 not in seen(table, instance)
    table.compact()
    assert (table.status().row_count, table.status().rows_exact) == (49, True)


@pytest.mark.slow
def test_marks_are_kept_while_an_open_load_may_add_an_older_row(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 1), (2, 2))
    late = begun(table, (1, 3))
    delete_keys(table, 1)
    table.compact()
    status = table.status()
    assert (status.row_count, status.rows_exact) == (2, False)
    late()
    assert seen(table, instance) == {2: 2}
    table.compact()
    assert (table.status().row_count, seen(table, instance)) == (1, {2: 2})


def test_marks_are_removed_despite_newer_files_and_later_loads(instance: Instance) -> None:
    table = keyed(instance, compaction_batch_files=2)
    upsert(table, (1, 1))
    delete_keys(table, 1)
    upsert(table, *((key, 5) for key in range(9)))
    late = begun(table, (1, 3))
    assert table.compact().jobs_run == 1
    assert (table.status().files, table.status().row_count) == (1, 9)
    late()
    assert seen(table, instance)[1] == 3


@pytest.mark.slow
def test_marks_of_a_table_with_newest_by_expire(instance: Instance) -> None:
    kept, forgot = (
        keyed(instance, name, newest_by="v", deletion_marks_seconds=seconds)
        for name, seconds in (("kept", 3_600.0), ("forgot", 0.0))
    )
    for table in (kept, forgot):
        upsert(table, (1, 5), (2, 5))
        delete_keys(table, 1, v=6)
        table.compact()
    assert (kept.status().row_count, forgot.status().row_count) == (2, 1)
    for table in (kept, forgot):
        upsert(table, (1, 5))
    assert (seen(kept, instance), seen(forgot, instance)) == ({2: 5}, {1: 5, 2: 5})


@pytest.mark.slow
def test_a_filter_hides_the_newest_row_and_reveals_no_older_one(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("t", dm.LONG)])
    properties = dm.TableProperties(
        keep="newest_row", filter="age_off(t, 1000)", compaction_strategy="basic", compaction_batch_files=2
    )
    table = instance.create_table("t", schema, properties=properties)
    far, old = 1 << 52, 5
    table.upsert(pa.table({"k": [1, 2, 3], "t": [far, far, far]}))
    table.upsert(pa.table({"k": [1, 4], "t": [old, far]}))
    table.upsert(pa.table({"k": [4, 5], "t": [old, old]}))
    for _ in range(3):
        found = table.query(None, ["k"]).read_all().to_pylist()
        assert found == table.sql("select k from t order by 1").read_all().to_pylist() == [{"k": 2}, {"k": 3}]
        table.compact()
    assert table.status().row_count == 2


@pytest.mark.slow
def test_splits_merges_and_conversions_keep_the_newest(instance: Instance) -> None:
    table = keyed(instance, split_threshold_rows=20, split_min_rows=2, merge_threshold_rows=1_000)
    expected = {}
    for number in range(4):
        rows = [(key, number) for key in range(number, 60, number + 1)]
        upsert(table, *rows)
        expected |= dict(rows)
        table.split()
        assert seen(table, instance) == expected
    table.convert_layout("salted_counts")
    delete_keys(table, *range(0, 60, 9))
    for key in range(0, 60, 9):
        expected.pop(key)
    for work in (table.split, table.compact, table.merge, table.compact, table.merge, table.compact):
        work()
        assert seen(table, instance) == expected
    table.convert_layout("dummy_reference")
    assert seen(table, instance) == expected
    assert instance.check(deep=True).problems == ()


@pytest.mark.slow
def test_moments_and_restores_have_the_rows_that_were_newest_then(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 1), (2, 2))
    first = table.history.record_cut()
    upsert(table, (1, 5))
    delete_keys(table, 2)
    second = table.history.record_cut()
    while table.compact().jobs_run:
        pass
    assert seen(table, instance) == {1: 5}
    assert seen(table, instance, as_of=second) == {1: 5}
    assert seen(table, instance, as_of=first) == {1: 1, 2: 2}
    table.restore(first)
    assert seen(table, instance) == {1: 1, 2: 2}
    upsert(table, (2, 3))
    assert seen(table, instance) == {1: 1, 2: 3}


def test_counts_are_exact_after_compaction_and_an_upper_bound_before(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 1), (2, 2))
    assert (table.status().row_count, table.status().rows_exact) == (2, True)
    upsert(table, (2, 3), (3, 3))
    assert (table.status().row_count, table.status().rows_exact) == (4, False)
    table.compact()
    assert (table.status().row_count, table.status().rows_exact) == (3, True)
    delete_keys(table, 8)
    assert table.status().rows_exact is False


def test_an_ingest_id_counts_once(instance: Instance) -> None:
    table = keyed(instance)
    assert table.upsert(data([(1, 1)]), ingest_id="once").applied
    upsert(table, (1, 2))
    assert not table.upsert(data([(1, 1)]), ingest_id="once").applied
    assert seen(table, instance) == {1: 2}


def test_the_schema_of_a_keyed_table_has_no_internal_columns(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 1, "x"))
    assert table.schema == SCHEMA
    assert table.query().read_all().schema.names == ["k", "v", "s"]
    assert table.sql("select * from t").read_all().schema.names == ["k", "v", "s"]


@pytest.mark.parametrize("newest_by", [None, "v"])
def test_the_newest_rows_are_found_as_rows_stream(instance: Instance, newest_by: str | None) -> None:
    """Files in which each key is unique are merged without a sort, which would keep rows in memory."""
    table = keyed(instance, newest_by=newest_by)
    upsert(table, (1, 1), (2, 2))
    upsert(table, (1, 3))
    table.delete({"k": 2})
    asked, context = question(SCHEMA, {"v": 3}, None, None), table.context
    [scans] = plan_query(context, asked.ranges)
    names = SCHEMA.names
    read = KeyedScans(SCHEMA, context.properties, scans, asked.conditions, names=names)
    plan = read.plan(key_session(context.objects), context.objects).display_indent()
    assert read.merges and "SortPreservingMergeExec" in plan
    assert "SortExec" not in plan.replace("SortPreservingMergeExec", "")
    table.compact()
    [scans] = plan_query(context, asked.ranges)
    assert not KeyedScans(SCHEMA, context.properties, scans, names=names).merges


def test_a_deletion_by_values_is_retried_if_its_files_were_collected(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = keyed(instance)
    upsert(table, (1, 7), (2, 2))
    looks = iter([QueryOvertaken("its files were collected"), None])
    asked = deleting.query

    def query(*given: Any) -> Any:
        if (error := next(looks)) is not None:
            raise error
        return asked(*given)

    monkeypatch.setattr(deleting, "query", query)
    assert table.delete({"v": 7}).rows == 1
    assert seen(table, instance) == {2: 2}
