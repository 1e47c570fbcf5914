"""Changes of a keyed table: applied in order to the rows of one moment, they give the rows of the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from keyed_tables import data, delete_keys, keyed, seen, upsert

import dormouse as dm
from dormouse.data.newest import first_of_keys
from dormouse.reading import keyed_changes
from tests.support.api import Instance, Table


def changed(table: Table, after: Any, till: Any = None) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.changes(after, till, ["k", "v"]).read_all().to_pylist()]


@pytest.mark.slow
def test_each_key_with_another_newest_row_is_one_change(instance: Instance) -> None:
    table = keyed(instance)
    assert changed(table, None) == []
    upsert(table, (1, 1), (2, 2), (3, 3))
    first = table.history.record_cut()
    assert changed(table, None) == [(1, 1, "upsert"), (2, 2, "upsert"), (3, 3, "upsert")]
    upsert(table, (1, 5), (4, 4), (6, 6))
    upsert(table, (1, 7))
    delete_keys(table, 2, 4, 9)
    expected = [(1, 7, "upsert"), (2, None, "delete"), (6, 6, "upsert")]
    assert changed(table, first) == expected
    second = table.history.record_cut()
    while table.compact().jobs_run:
        assert changed(table, first, second) == expected
    assert changed(table, second) == []
    assert table.changes(first, second).read_all().schema.names == ["k", "v", "s", "_change"]


@pytest.mark.parametrize("newest_by", [None, "v"])
def test_deletions_are_changes_of_existing_keys_only(instance: Instance, newest_by: str | None) -> None:
    table = keyed(instance, newest_by=newest_by)
    upsert(table, (1, 1), (2, 2), (3, 3))
    first = table.history.record_cut()
    upsert(table, (4, 4))
    table.delete({"k": dm.Range(2, 9)})
    upsert(table, (3, 5))
    assert changed(table, first) == [(2, None, "delete"), (3, 5, "upsert")]
    table.delete({"v": 5})
    assert changed(table, first) == [(2, None, "delete"), (3, None, "delete")]


def test_a_late_load_of_an_older_row_is_no_change(instance: Instance) -> None:
    table = keyed(instance, newest_by="v")
    upsert(table, (1, 10))
    first = table.history.record_cut()
    upsert(table, (1, 9), (2, 1))
    assert changed(table, first) == [(2, 1, "upsert")]


def test_many_keys_are_compared_in_groups(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_changes, "KEYS_AT_ONCE", 50)
    monkeypatch.setattr(keyed_changes, "LISTED_MAX", 20)
    schema = dm.Schema([dm.Field("a", dm.LONG), dm.Field("b", dm.STRING)], values=[dm.Field("v", dm.LONG)])
    table = instance.create_table("t", schema, properties=dm.TableProperties(keep="newest_row"))

    def rows(keys: range, v: int) -> pa.Table:
        return pa.table({"a": [k // 7 for k in keys], "b": [str(k % 7) for k in keys], "v": [v] * len(keys)})

    table.upsert(rows(range(2_000), 0))
    first = table.history.record_cut()
    table.upsert(rows(range(0, 2_000, 3), 1))
    table.delete({"a": dm.Range(100, 120)})
    found = table.changes(first, columns=["v", "b", "a"]).read_all().to_pylist()
    keys = {(row["a"], row["b"]): (row["v"], row["_change"]) for row in found}
    assert len(keys) == len(found)
    assert keys == {
        (k // 7, str(k % 7)): (None, "delete") if 100 <= k // 7 < 120 else (1, "upsert")
        for k in range(2_000)
        if 100 <= k // 7 < 120 or not k % 3
    }


def test_only_changed_rows_of_a_common_first_key_are_held(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(*given: Any) -> Iterator[pa.RecordBatch]:
        return (batch.slice(at, 20) for batch in first_of_keys(*given) for at in range(0, len(batch), 20))

    monkeypatch.setattr(keyed_changes, "first_of_keys", few)
    monkeypatch.setattr(keyed_changes, "KEYS_AT_ONCE", 20)
    monkeypatch.setattr(keyed_changes, "LISTED_MAX", 15)
    schema = dm.Schema(
        [dm.Field("a", dm.STRING), dm.Field("b", dm.BYTES), dm.Field("c", dm.INT)],
        values=[dm.Field("v", dm.LIST(dm.LONG))],
    )
    table = instance.create_table("t", schema, properties=dm.TableProperties(keep="newest_row"))
    keys = [(a, bytes([b]) * 2, c) for a in ("", "x") for b in range(100) for c in (-1, 1)]

    def upsert_each(step: int, v: int) -> None:
        some = [dict(zip("abc", key, strict=True), v=[v]) for key in keys[::step]]
        table.upsert(pa.Table.from_pylist(some, schema=table.query().schema))

    upsert_each(1, 0)
    first = table.history.record_cut()
    upsert_each(3, 1)
    found = keyed_changes.KeyedChanges._found
    held: list[tuple[list[str], int]] = []

    def spied(self: Any, some: pa.Table, ranges: Any, *given: Any) -> pa.Table:
        rows = found(self, some, ranges, *given)
        held.append((list(ranges), rows.num_rows))
        return rows

    monkeypatch.setattr(keyed_changes.KeyedChanges, "_found", spied)
    changes = table.changes(first, columns=["a", "b", "c", "v"]).read_all().to_pylist()
    assert [tuple(row.values()) for row in changes] == [(*key, [1], "upsert") for key in keys[::3]]
    assert len(held) > 4
    assert {tuple(names) for names, _ in held} == {("a",), ("a", "b")}
    assert sum(rows for _, rows in held) == 2 * len(changes)


@pytest.mark.slow
def test_a_consumer_that_applies_all_changes_has_the_tables_rows(instance: Instance) -> None:
    table = keyed(instance, split_threshold_rows=30, split_min_rows=2)
    consumer, copy = table.consumer("copy", from_=table.history.record_cut()), dict[int, int]()
    for number in range(8):
        upsert(table, *((key, number) for key in range(number, 80, number + 2)))
        delete_keys(table, *range(number, 80, 11))
        table.split()
        table.compact()
        for row in consumer.read().read_all().to_pylist():
            if row["_change"] == "delete":
                del copy[row["k"]]
            else:
                copy[row["k"]] = row["v"]
        consumer.acknowledge()
        assert copy == seen(table, instance)


def test_changes_have_all_columns_and_deleted_keys_have_null_values(instance: Instance) -> None:
    table = keyed(instance)
    table.upsert(data([(1, 1, "x")]))
    first = table.history.record_cut()
    delete_keys(table, 1)
    [row] = table.changes(first).read_all().to_pylist()
    assert row == {"k": 1, "v": None, "s": None, "_change": "delete"}


VALUES = {
    "d": dm.DOUBLE,
    "l": dm.LIST(dm.DOUBLE),
    "m": dm.MAP(dm.STRING, dm.LIST(dm.STRING)),
    "r": dm.STRUCT([dm.Field("x", dm.LONG, nullable=True)]),
}


@pytest.mark.slow
def test_a_row_that_is_upserted_unchanged_is_no_change(instance: Instance) -> None:
    values = [dm.Field(name, kind, nullable=True) for name, kind in VALUES.items()]
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=values)
    table = instance.create_table("t", schema, properties=dm.TableProperties(keep="newest_row"))
    nan = float("nan")
    rows: list[dict[str, Any]] = [
        {"k": 1, "d": nan, "l": [0.0, None, nan], "m": {"a": ["b", None]}, "r": {"x": 1}},
        {"k": 2, "d": None, "l": [], "m": {}, "r": {"x": None}},
        {"k": 3, "d": 0.0, "l": None, "m": None, "r": None},
    ]
    kinds = table.query().schema

    def change(*some: dict[str, Any]) -> list[int]:
        start = table.history.record_cut()
        table.upsert(pa.Table.from_pylist(list(some), schema=kinds))
        # the wanted columns do not decide what is a change
        return table.changes(start, columns=["k"]).read_all()["k"].to_pylist()

    assert change(*rows) == [1, 2, 3]
    assert change(*rows) == []
    others: list[dict[str, Any]] = [
        {"d": -0.0}, {"d": 1.5}, {"l": [None]}, {"l": []}, {"m": {"a": ["c"]}}, {"r": {"x": 2}},
        {"r": {"x": None}},
    ]  # fmt: skip
    for other in others:
        assert change(rows[0], rows[1], {**rows[2], **other}) == [3], other
        assert change(*rows) == [3]
    start = table.history.record_cut()
    table.delete({"k": 2})
    table.upsert(pa.Table.from_pylist(rows, schema=kinds))
    assert table.changes(start).read_all().num_rows == 0


def test_only_columns_that_the_table_still_has_are_compared(instance: Instance) -> None:
    table = keyed(instance)
    table.upsert(data([(1, 1, "x"), (2, 2, "y")]))
    first = table.history.record_cut()
    table.add_column(dm.Field("n", dm.LONG, nullable=True))
    table.drop_column("s")
    table.upsert(pa.table({"k": [1, 2], "v": [1, 2], "n": pa.array([None, 5], pa.int64())}))
    assert table.changes(first).read_all().to_pylist() == [{"k": 2, "v": 2, "n": 5, "_change": "upsert"}]
