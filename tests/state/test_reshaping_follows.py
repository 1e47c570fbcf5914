"""Tests that deletions, properties, handles and open queries follow changes of columns, and of refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.data.datafusion_session import key_order
from dormouse.data.transform import Transform
from dormouse.durability.erasing import Elsewhere
from dormouse.errors import (
    InvalidCut,
    InvalidData,
    InvalidQuery,
    InvalidSchema,
    QueryOvertaken,
    TableAlreadyExists,
    TableNotFound,
)
from dormouse.objects.names import parquet_suffix, schema_version_of
from dormouse.reading.scan_session import key_session, rows
from dormouse.sources.export import export
from tests.by_ranges import compact_by_ranges
from tests.reshaped import (
    ROWS,
    SCHEMA,
    TWO,
    Shaped,
    add_default,
    add_whole,
    ingest,
    newer_rows,
    rename_keys,
    rename_value,
    stored,
    swap_names,
    widen,
)
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance, Table, connect
from tests.support.reading import KeyRanges, plan_query


@pytest.fixture
def shaped(instance: Instance) -> Shaped:
    return Shaped.begun(instance)


@pytest.mark.slow
def test_pending_deletions_follow_their_columns(shaped: Shaped) -> None:
    """A deletion follows its column by id, even if another column has taken its name.

    A condition on a new column sees the column's default in old rows.
    """
    shaped.delete("i", -7)
    shaped.delete("s", "b")
    swap_names(shaped)
    rename_keys(shaped)
    shaped.check()
    assert [one.condition for one in shaped.table.deletions()] == ['{"i": [-7]}', '{"s": ["b"]}']
    add_default(shaped)
    newer_rows(shaped)
    shaped.delete("new", "old\0row")
    shaped.check()
    assert [one.condition for one in shaped.table.deletions()][2] == '{"new": ["old\\u0000row"]}'
    while shaped.table.compact().jobs_run:
        shaped.check()


@pytest.mark.slow
def test_a_column_that_a_pending_deletion_names_is_dropped_when_no_row_is_left(instance: Instance) -> None:
    properties = dm.TableProperties(**TWO, deletions_max=1)
    shaped = Shaped.made(instance, SCHEMA, properties=properties)
    shaped.ingest(*ROWS)
    shaped.delete("note", "x")
    shaped.rename("note", "remark")
    with pytest.raises(InvalidSchema, match="'remark' of table 't' is used by pending deletion 1"):
        shaped.table.drop_column("remark")
    shaped.check()
    newer_rows(shaped)
    while shaped.table.compact().jobs_run:
        pass
    shaped.table.collect_garbage()
    assert shaped.table.deletions() == []
    shaped.drop("remark")
    shaped.check()


def test_changes_have_the_columns_of_the_later_moment(shaped: Shaped) -> None:
    """The changes include rows that were deleted by a column that was dropped since."""
    shaped.delete("note", "x")
    shaped.cut("deleted")
    table = shaped.table
    ingest(table, [{**ROWS[0], "k": 8, "note": "y"}])
    while table.deletions():
        table.set_properties(deletions_max=1)
        ingest(table, [{**ROWS[0], "k": 1, "s": "q", "note": "q"}])
        ingest(table, [{**ROWS[0], "k": 8, "s": "q", "note": "q"}])
        table.compact()
        table.collect_garbage()
    table.drop_column("note")
    table.rename_column("i", "number")
    table.widen_column("number", dm.LONG)
    found = table.changes("first").read_all()
    assert found.column_names == ["k", "s", "t", "number", "f", "d", "_change"]
    deleted = [row for row in found.to_pylist() if row["_change"] == "delete"]
    assert [(row["k"], row["number"]) for row in deleted] == [(1, 1)]
    then = table.changes("first", "deleted").read_all()
    assert then.column_names == ["k", "s", "t", "i", "note", "f", "d", "_change"]


@pytest.mark.slow
def test_a_restore_keeps_the_current_columns(shaped: Shaped) -> None:
    """A restore brings back the rows, and keeps the current columns."""
    add_default(shaped)
    swap_names(shaped)
    newer_rows(shaped)
    shaped.table.restore("first")
    shaped.model = replace(shaped.model, rows=shaped.model.rows[: len(ROWS)])
    shaped.check()


def test_a_restore_is_refused_where_its_deletion_names_a_dropped_column(shaped: Shaped) -> None:
    table = shaped.table
    table.delete({"note": "x"})
    table.history.record_cut("deleted")
    table.restore("first")
    table.drop_column("note")
    for dry_run in (True, False):
        with pytest.raises(
            InvalidCut, match="deletion 1 was pending then, and a deletion names column 'note'"
        ):
            table.restore("deleted", dry_run=dry_run)
    assert len(table.query().read_all()) == len(ROWS)


def test_properties_follow_the_names_of_columns(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("sum", dm.LONG), dm.Field("at", dm.LONG)])
    given = {"aggregate": "sum(sum), max(at)", "bloom_filter_columns": "sum, at", **TWO}
    table = instance.create_table("t", schema, properties=dm.TableProperties(**given))
    for value in (1, 2):
        table.ingest(pa.table({"k": [1], "sum": [value], "at": [value]}))
    table.history.record_cut("before")
    other = instance.table("t")
    assert table.rename_column("sum", "total").names == ("k", "total", "at")
    assert other.query().read_all().to_pylist() == [{"k": 1, "total": 3, "at": 2}]
    assert other.properties.aggregate == "sum(total), max(at)"
    assert other.properties.bloom_filter_columns == "total, at"
    then = [{"k": 1, "sum": 3, "at": 2}]
    assert table.query(as_of="before").read_all().to_pylist() == then
    assert instance.sql("select * from t", as_of="before").read_all().to_pylist() == then
    table.compact()
    assert table.query().read_all().to_pylist() == [{"k": 1, "total": 3, "at": 2}]
    with pytest.raises(
        InvalidSchema, match="'total' of table 't' is used by aggregate and bloom_filter_columns"
    ):
        table.drop_column("total")
    with pytest.raises(InvalidSchema, match="aggregate: value 'more' has no function"):
        table.add_column(dm.Field("more", dm.LONG, nullable=True))


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda t: t.drop_column("k"), "'k' is a key, by which the rows are sorted: it cannot be dropped"),
    (lambda t: t.drop_column("t"), "'t' is a key"),
    (lambda t: t.drop_column("nothing"), "there is no column 'nothing'; the columns are k, s, t, i"),
    (lambda t: t.rename_column("nothing", "x"), "there is no column 'nothing'"),
    (lambda t: t.rename_column("i", "NOTE"), "there is a column 'note' already"),
    (lambda t: t.rename_column("i", "i"), "column 'i' already has that name"),
    (lambda t: t.rename_column("i", "__x"), "field name '__x': names that begin with two"),
    (lambda t: t.widen_column("i", dm.INT), "column 'i' is int, and int cannot hold all of its values or is"),
    (lambda t: t.widen_column("i", dm.STRING), "column 'i' is int, and string cannot hold"),
    (
        lambda t: t.widen_column("d", dm.DECIMAL(5, 3)),
        r"'d' is decimal\(5,2\), and decimal\(5,3\) cannot hold",
    ),
    (lambda t: t.widen_column("d", dm.DECIMAL(6, 4)), "cannot hold all of its values"),
    (lambda t: t.widen_column("d", "long"), "'long' is not a type"),
    (lambda t: t.widen_column("x", dm.LONG), "there is no column 'x'"),
    (lambda t: t.add_column(dm.Field("I", dm.LONG, nullable=True)), "there is a column 'i' already"),
    (lambda t: t.add_column(dm.Field("x", dm.LONG)), "'x' must not be null, and existing rows have no"),
    (lambda t: t.add_column(dm.Field("x", dm.LONG), "7"), "the default does not fit: .*'x' is long"),
    (lambda t: t.add_column(dm.Field("x", dm.INT), 1 << 31), "the default does not fit"),
    (lambda t: t.add_column(dm.Field("x", dm.LIST(dm.LONG)), [1]), "'x' is list<long>, which has no default"),
    (lambda t: t.add_column("x"), "a column is a dm.Field, not 'x'"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_invalid_changes_are_refused_in_one_line_and_change_nothing(shaped: Shaped, case: int) -> None:
    change, said = REFUSED[case]
    with pytest.raises(InvalidSchema, match=said) as caught:
        change(shaped.table)
    assert "\n" not in str(caught.value)
    assert (shaped.table.schema.version, shaped.table.schema_changes()) == (1, [])
    shaped.check()


@pytest.mark.slow
def test_other_handles_follow_changes_of_columns_at_once(shaped: Shaped, dsn: str, tmp_path: Path) -> None:
    """`Table` objects of another instance, made before the change, follow the change in each call."""
    with connect(dsn, f"file://{tmp_path}/objects") as other:
        handles = [other.table("t") for _ in range(6)]
        swap_names(shaped)
        shaped.drop("note")
        add_whole(shaped)
        wanted = shaped.model.shown()
        assert handles[0].schema == shaped.table.schema
        assert handles[1].query().read_all().to_pylist() == wanted
        assert handles[1].query({"new": -0.0}, ["k"]).read_all().num_rows == len(wanted)
        with pytest.raises(InvalidQuery, match="unknown column 'note'"):
            handles[2].query({"note": "x"})
        with pytest.raises(InvalidData, match="column 'f' does not fit int"):
            handles[3].ingest(pa.Table.from_pylist(ROWS).drop(["note"]))
        assert handles[4].delete({"new": -0.0}, dry_run=True).rows == len(wanted)
        handles[5].delete({"f": 1})
        shaped.model = shaped.model.without("f", 1)
        assert handles[5].query().read_all().to_pylist() == shaped.model.shown()
        assert handles[5].explain({"new": 1.0}).files
    shaped.check()


@pytest.fixture
def handles(shaped: Shaped, dsn: str, tmp_path: Path) -> Iterator[list[Table]]:
    """Yields `Table` objects of another instance, as another process has them.

    They are made before the test changes the columns.
    """
    with connect(dsn, f"file://{tmp_path}/objects") as other:
        yield [other.table("t") for _ in range(4)]


@pytest.mark.slow
def test_old_handles_delete_and_erase_by_the_current_names(shaped: Shaped, handles: list[Table]) -> None:
    rename_keys(shaped)
    add_whole(shaped)
    newer_rows(shaped)
    assert handles[0].delete({"k_k": 1}, dry_run=True).rows == 1
    assert handles[1].erase({"k_k": 1}, dry_run=True).rows == 1
    report = handles[2].erase({"k_k": 1})
    assert (report.rows, report.unreadable, report.is_finished) == (1, (), True)
    assert 1 not in {row["k_k"] for row in handles[3].query().read_all().to_pylist()}


@pytest.mark.slow
def test_a_look_on_an_old_handle_reads_columns_that_were_added_since(
    shaped: Shaped, handles: list[Table]
) -> None:
    """A `Table` that was opened before a column was added compacts files that have the column.

    It also applies deletions that name the column.
    """
    shaped.table.set_properties(compaction_batch_files=100)
    add_whole(shaped)
    newer_rows(shaped)
    shaped.delete("new", -0.0)
    report = handles[0].compact()
    assert report.jobs_run
    assert (report.jobs_failed, report.given_up) == (0, 0)
    shaped.check()


@pytest.mark.slow
def test_a_job_is_divided_by_keys_that_were_renamed_since(shaped: Shaped, handles: list[Table]) -> None:
    shaped.table.set_properties(compaction_batch_files=100)
    rename_keys(shaped)
    newer_rows(shaped)
    report = compact_by_ranges(handles[0].context)
    assert report.jobs_run
    assert (report.jobs_failed, report.given_up) == (0, 0)
    shaped.check()


def test_an_erasure_looks_at_files_with_columns_that_were_added_since(
    shaped: Shaped, handles: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is added after the erasure examined the table's files, before it examines other objects."""
    began = Elsewhere.look

    def changed_meanwhile(*arguments: Any) -> None:
        add_whole(shaped)
        newer_rows(shaped)
        name = next(name for name, _ in stored(shaped) if schema_version_of(name) == 2)
        objects = shaped.table.context.objects
        objects.put(f"{name.rpartition('/')[0]}/strange{parquet_suffix(2)}", objects.get(name))
        began(*arguments)

    monkeypatch.setattr(Elsewhere, "look", changed_meanwhile)
    report = handles[0].erase({"f": 0.25})
    assert (report.unreadable, report.objects_looked_at) == ((), 1)


def test_an_old_handle_deletes_from_a_keyed_table_by_a_column_that_was_added_since(
    instance: Instance, dsn: str, tmp_path: Path
) -> None:
    schema = OF_K_AND_NUMBERS
    table = instance.create_table("t", schema, properties=dm.TableProperties(keep="newest_row"))
    with connect(dsn, f"file://{tmp_path}/objects") as other:
        handle = other.table("t")
        ingest(table, [{"k": k, "v": k} for k in range(3)])
        table.add_column(dm.Field("new", dm.STRING, nullable=True), "old")
        table.rename_column("k", "key")
        handle.delete({"new": "old", "key": 2})
    assert [row["key"] for row in table.query().read_all().to_pylist()] == [0, 1]


def test_an_open_query_keeps_the_columns_that_it_began_with(shaped: Shaped) -> None:
    reader = shaped.table.query()
    streamed = shaped.instance.sql("select * from t order by k")
    before = shaped.model.shown()
    swap_names(shaped)
    add_whole(shaped)
    newer_rows(shaped)
    assert reader.schema.names == streamed.schema.names == list(SCHEMA.names)
    assert reader.read_all().to_pylist() == before
    assert streamed.read_all().to_pylist() == before


@pytest.mark.slow
@pytest.mark.parametrize("dropped", [False, True])
def test_an_open_query_outlives_its_files_as_long_as_its_columns_are_there(
    instance: Instance, dropped: bool
) -> None:
    """A query's files are compacted and collected while columns are renamed or dropped.

    The query goes on with the new files, unless they lack a column that it reads.
    """
    properties = dm.TableProperties(**TWO, history_retention_seconds=0)
    shaped = Shaped.made(instance, SCHEMA, split_points=list(range(10, 400, 10)), properties=properties)
    for t in (0, 1):
        shaped.ingest(*({**ROWS[0], "k": k, "t": t, "i": k} for k in range(400)))
    reader = shaped.table.query()
    first = reader.read_next_batch()
    before = sorted(shaped.model.shown(), key=lambda row: (row["k"], row["t"]))
    swap_names(shaped)
    if dropped:
        shaped.drop("note")
    while shaped.table.compact().jobs_run:
        pass
    for _ in range(2):
        shaped.table.collect_garbage()
    if dropped:
        with pytest.raises(QueryOvertaken, match="column 'note' was dropped from table 't' while"):
            reader.read_all()
        return
    rest = reader.read_all()
    assert first.to_pylist() + rest.to_pylist() == before


def test_a_renamed_table_is_followed_by_its_id(shaped: Shaped) -> None:
    """Another table takes the old name. `Table` objects of the renamed table must never change it."""
    instance, handle = shaped.instance, shaped.instance.table("t")
    other = instance.create_table("other", SCHEMA)
    with pytest.raises(TableAlreadyExists):
        instance.rename_table("t", "other")
    with pytest.raises(TableNotFound):
        instance.rename_table("nobody", "x")
    renamed = instance.rename_table("t", "departures")
    taken = instance.create_table("t", SCHEMA)
    assert (handle.name, renamed.name) == ("departures", "departures")
    ingest(handle, [{**ROWS[0], "k": 7}])
    handle.add_column(dm.Field("x", dm.LONG, nullable=True))
    assert [row["k"] for row in renamed.query().read_all().to_pylist()] == [1, 2, 3, 7]
    for empty in (taken, other):
        assert (empty.query().read_all().num_rows, empty.schema) == (0, SCHEMA)


def test_an_export_has_the_current_columns(shaped: Shaped, tmp_path: Path) -> None:
    rename_value(shaped)
    add_default(shaped)
    with (tmp_path / "t.parquet").open("wb") as sink:
        export(shaped.table.query(), sink, "parquet")
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == shaped.model.shown()


def test_old_files_are_read_as_sorted_streams(shaped: Shaped) -> None:
    """Files with older names and types of keys are merged without a sort, which would need much memory."""
    rename_keys(shaped)
    widen(shaped)
    newer_rows(shaped)
    context = shaped.table._followed()
    scans = [scan for group in plan_query(context, KeyRanges()) for scan in group]
    assert {schema_version_of(scan.filename) for scan in scans} == {1, 7}
    transform, objects = Transform.parse(context.schema, context.properties), context.objects
    frame = rows(key_session(objects), objects, transform, scans, 0).sort(
        *key_order(context.schema.key_names)
    )
    plan = frame.execution_plan().display_indent()
    assert "SortPreservingMergeExec" in plan
    assert "SortExec" not in plan


@pytest.mark.slow
def test_leaves_are_split_and_merged_by_renamed_keys(shaped: Shaped) -> None:
    shaped.table.set_properties(split_threshold_rows=4, split_min_rows=2)
    for k in range(10, 30):
        shaped.ingest({**ROWS[0], "k": k})
    handle = shaped.instance.table("t")
    rename_keys(shaped)
    assert handle.split().partitions_split
    shaped.check()
    leaves = shaped.table.partitions.leaves()
    assert {name for leaf in leaves for name in leaf.region} == {"k_k"}
    handle.split()
    handle.compact()
    shaped.check()
