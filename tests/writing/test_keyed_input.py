"""Valid and invalid keyed tables and loads. An invalid one gives a one-line error and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_tables import MARKS, data, keyed, seen, upsert

import dormouse as dm
from dormouse.errors import InvalidData, InvalidInput, InvalidProperties, InvalidQuery
from tests.support.api import Instance


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"newest_by": "k"}, "newest_by: 'k' is not a value column; the values are v, s"),
        ({"newest_by": "x"}, "newest_by: 'x' is not a value column"),
        ({"newest_by": "s"}, "newest_by: 's' may be null"),
        ({"aggregate": "sum(v), max(s)"}, "aggregate: with keep='newest_row'"),
        ({"deletion_marks_seconds": 5.0}, "deletion_marks_seconds needs newest_by"),
        ({"keep": "every_row", "newest_by": "v"}, "newest_by: only a table with keep='newest_row'"),
        ({"keep": "last"}, "keep must be every_row or newest_row, not 'last'"),
    ],
)
def test_invalid_properties_of_a_keyed_table_are_refused(
    instance: Instance, properties: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidProperties, match=message):
        keyed(instance, **properties)
    assert instance.tables() == []


def test_a_keyed_table_with_sort_keys_or_a_list_as_newest_by_is_refused(instance: Instance) -> None:
    properties = dm.TableProperties(keep="newest_row")
    sorted_too = dm.Schema([dm.Field("k", dm.LONG)], [dm.Field("time", dm.LONG)])
    with pytest.raises(InvalidProperties, match="no sort keys; make 'time' a row key or a value"):
        instance.create_table("t", sorted_too, properties=properties)
    lists = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("l", dm.LIST(dm.LONG))])
    with pytest.raises(InvalidProperties, match="newest_by: 'l' is list<long>, which has no order"):
        instance.create_table("t", lists, properties=properties.model_copy(update={"newest_by": "l"}))


def test_keep_and_newest_by_cannot_be_changed(instance: Instance) -> None:
    table = keyed(instance, newest_by="v")
    for change in ({"keep": "every_row", "newest_by": None}, {"newest_by": None}):
        with pytest.raises(InvalidProperties, match="is chosen when a table is made, and stays"):
            table.set_properties(**change)
    assert table.set_properties(deletion_marks_seconds=9.0).deletion_marks_seconds == 9.0


def test_upsert_is_refused_for_a_table_that_keeps_every_row(instance: Instance) -> None:
    table = keyed(instance, keep="every_row")
    with pytest.raises(InvalidInput, match="table 't' keeps every row, so no row replaces another"):
        table.upsert(data([(1, 1)]))


@pytest.mark.parametrize(
    ("column", "deletes", "error", "message"),
    [
        (None, MARKS, InvalidData, f"column '{MARKS}' \\(boolean\\) is missing from the data"),
        (pa.array([1]), MARKS, InvalidData, f"column '{MARKS}' is int64 in the data; the schema says bool"),
        (pa.array([None], pa.bool_()), MARKS, InvalidData, f"'{MARKS}' must not be null, but is in row 0"),
        (pa.array([True]), "v", InvalidInput, "deletes: 'v' is a column of the table"),
        (pa.array([True]), None, InvalidData, f"column '{MARKS}' is not in the schema"),
        (pa.array([True]), "", InvalidInput, "deletes is the name of a boolean column of the data, not ''"),
    ],
)
def test_invalid_marks_are_refused_and_nothing_is_loaded(
    instance: Instance, column: Any, deletes: str | None, error: type[Exception], message: str
) -> None:
    table = keyed(instance)
    rows = data([(1, 1)]) if column is None else data([(1, 1)]).append_column(MARKS, column)
    with pytest.raises(error, match=message):
        table.upsert(rows, deletes=deletes)
    assert table.status().files == 0


def test_only_a_mark_may_lack_values_except_that_of_newest_by(instance: Instance) -> None:
    table = keyed(instance)
    with pytest.raises(InvalidData, match=r"'v' is null in row .* only rows marked for deletion may be null"):
        table.upsert(data([(1, None), (2, None)], [True, False]), deletes=MARKS)
    by_value = keyed(instance, "u", newest_by="v")
    with pytest.raises(InvalidData, match="column 'v' must not be null, but is in row 0"):
        by_value.upsert(data([(1, None)], [True]), deletes=MARKS)


def test_parquet_and_csv_files_can_have_marks(instance: Instance, tmp_path: Path) -> None:
    table = keyed(instance)
    upsert(table, (1, 1), (2, 2))
    pq.write_table(data([(1, None), (3, 3)], [True, False]), tmp_path / "changes.parquet")
    table.upsert(str(tmp_path / "changes.parquet"), deletes=MARKS)
    assert seen(table, instance) == {2: 2, 3: 3}
    (tmp_path / "changes.csv").write_text(f"k,v,s,{MARKS}\n2,,,true\n4,4,x,false\n")
    table.upsert(str(tmp_path / "changes.csv"), deletes=MARKS)
    assert seen(table, instance) == {3: 3, 4: 4}


@pytest.mark.slow
def test_values_of_any_type_are_replaced_and_deleted(instance: Instance) -> None:
    """Value columns may be not nullable, although a deletion mark has no values."""
    part = pa.field("x", pa.int64(), False)
    kinds = {
        "a": (dm.LIST(dm.LONG), pa.list_(pa.int64()), [[1, 2], [3]]),
        "b": (dm.STRUCT([dm.Field("x", dm.LONG)]), pa.struct([part]), [{"x": 1}, {"x": 2}]),
        "c": (dm.MAP(dm.STRING, dm.LONG), pa.map_(pa.string(), pa.int64()), [[("p", 1)], [("q", 2)]]),
        "d": (dm.BYTES, pa.binary(), [b"1", b"2"]),
        "e": (dm.BOOLEAN, pa.bool_(), [True, False]),
    }
    schema = dm.Schema(
        [dm.Field("k", dm.STRING), dm.Field("n", dm.BYTES)],
        values=[dm.Field(name, kind) for name, (kind, _, _) in kinds.items()],
    )
    properties = dm.TableProperties(keep="newest_row", compaction_strategy="basic", compaction_batch_files=2)
    table = instance.create_table("t", schema, properties=properties)
    fields = [pa.field("k", pa.string()), pa.field("n", pa.binary())]
    fields += [pa.field(name, kind) for name, (_, kind, _) in kinds.items()]

    def rows(number: int, *keys: str) -> pa.Table:
        values = {name: given[number] for name, (_, _, given) in kinds.items()}
        return pa.Table.from_pylist([{"k": key, "n": b"\0", **values} for key in keys], pa.schema(fields))

    table.upsert(rows(0, "a", "b", "c"))
    table.upsert(rows(1, "b").append_column("d_", pa.array([False])), deletes="d_")
    marks = pa.table({"k": ["c"], "n": pa.array([b"\0"]), "d_": [True], **{n: pa.nulls(1) for n in kinds}})
    table.upsert(marks, deletes="d_")
    expected = [*rows(0, "a").to_pylist(), *rows(1, "b").to_pylist()]
    for _ in range(3):
        assert table.query().read_all().to_pylist() == expected
        assert len(table.sql("select * from t").read_all()) == 2
        table.compact()


def test_a_delete_of_a_keyed_table_without_a_condition_is_refused(instance: Instance) -> None:
    table = keyed(instance)
    upsert(table, (1, 1))
    with pytest.raises(InvalidQuery, match="is no condition"):
        table.delete({})
    for where in ({"s": dm.Range()}, {"v": dm.Range()}, {"k": dm.Range()}):
        for change in (table.delete, table.erase):
            with pytest.raises(InvalidQuery, match="bounds nothing"):
                change(where)
    assert seen(table, instance) == {1: 1}
    table.delete(dm.ALL)
    assert seen(table, instance) == {}
