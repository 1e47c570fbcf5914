"""Changes across restores: removed rows are deletes, rows brought back are inserts, each row once."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest
from serving import serving

import dormouse as dm
from dormouse.client import connect as connect_client
from dormouse.errors import InvalidCut
from dormouse.reading import changes, table_view
from dormouse.state.history.moments import now, position_of
from dormouse.state.history.retention import PastRestore, events_between
from tests.small_tables import add, keys, made
from tests.stored import query
from tests.support.api import Instance, Table
from tests.support.state import LAYOUTS
from tests.support.writing import commit_files, open_source, write_leaves

Changed = list[tuple[str, int]]


def changed(table: Table, after: Any, till: Any = None) -> Changed:
    """Returns (kind of change, key) of each changed row, in the order that the table returns."""
    rows = table.changes(after=after, till=till).read_all().to_pylist()
    return [(row["_change"], row["k"]) for row in rows]


def inserts(*found: int) -> Counter[tuple[str, int]]:
    return Counter(("insert", key) for key in found)


def deletes(*found: int) -> Counter[tuple[str, int]]:
    return Counter(("delete", key) for key in found)


def churned(table: Table) -> None:
    """Compacts, splits and collects several times, which changes no row."""
    for _ in range(3):
        table.compact()
        table.split()
        table.collect_garbage()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_across_a_restore_and_later_compactions(instance: Instance, layout: str) -> None:
    table = made(instance, layout=layout, gc_delay_seconds=0)
    add(table, 0, 40)
    add(table, 40, 40)
    start = table.history.record_cut("start")
    add(table, 30, 5, v=1)
    loaded = table.history.record_cut("loaded")
    churned(table)
    table.restore(start)
    restored = table.history.record_cut("restored")
    churned(table)
    add(table, 90, 2)
    churned(table)
    bad = range(30, 35)
    for _ in range(2):
        assert Counter(changed(table, start)) == inserts(*bad, 90, 91) + deletes(*bad)
        assert Counter(changed(table, start, loaded)) == inserts(*bad)
        assert Counter(changed(table, loaded, restored)) == deletes(*bad), "not what was compacted, too"
        assert Counter(changed(table, loaded)) == deletes(*bad) + inserts(90, 91)
        assert Counter(changed(table, restored)) == inserts(90, 91)
        churned(table)
    rows = table.changes(after=loaded, till=restored).read_all().to_pylist()
    assert {(row["k"], row["v"]) for row in rows} == {(key, 1) for key in bad}, "as they were"


@pytest.mark.slow
def test_changes_across_a_restore_of_a_restore(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0)
    add(table, 0, 10)
    first = table.history.record_cut("first")
    add(table, 10, 10)
    second = table.history.record_cut("second")
    table.compact()
    table.restore(first)
    undone = table.history.record_cut("undone")
    churned(table)
    table.restore(second)
    redone = table.history.record_cut("redone")
    churned(table)
    table.restore(undone)
    came = inserts(*range(10, 20))
    went = deletes(*range(10, 20))
    assert changed(table, second, undone) == sorted(went.elements())
    assert Counter(changed(table, undone, redone)) == came
    assert Counter(changed(table, redone)) == went
    whole = changed(table, first)
    assert [change for change, _ in whole[::10]] == ["insert", "delete"] * 2
    assert Counter(whole) == came + went + came + went
    assert keys(table) == list(range(10))


@pytest.mark.slow
def test_a_restore_to_before_a_delete_brings_the_rows_back(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0)
    add(table, 0, 10)
    before = table.history.record_cut("before")
    table.delete({"k": dm.Range(0, 4)})
    deleted = table.history.record_cut("deleted")
    add(table, 20, 2)
    churned(table)
    table.restore(before)
    assert Counter(changed(table, deleted)) == inserts(20, 21) + inserts(0, 1, 2, 3) + deletes(20, 21)
    assert changed(table, before)[:4] == [("delete", key) for key in range(4)]
    churned(table)
    assert Counter(changed(table, deleted)) == inserts(20, 21) + inserts(0, 1, 2, 3) + deletes(20, 21)
    assert keys(table) == list(range(10))


def test_changes_across_a_restore_that_only_undoes_a_delete(instance: Instance) -> None:
    """The restore only changes which deletions apply; it adds and removes no file."""
    table = made(instance, split_threshold_rows=10**6)
    table.partitions.split("root", 5)
    add(table, 0, 10)
    before = table.history.record_cut("before")
    table.delete({"k": dm.Range(0, 4)})
    table.delete({"k": 9})
    deleted = table.history.record_cut("deleted")
    table.restore(before)
    assert Counter(changed(table, deleted)) == inserts(0, 1, 2, 3, 9)
    again = table.history.record_cut()
    table.restore(deleted)
    assert Counter(changed(table, again)) == deletes(0, 1, 2, 3, 9)


@pytest.mark.slow
def test_a_delete_a_restore_and_a_delete_are_changes_in_order(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0)
    add(table, 0, 6)
    before = table.history.record_cut("before")
    table.delete({"k": [0, 1]})
    churned(table)
    table.restore(before)
    middle = table.history.record_cut("middle")
    churned(table)
    table.delete({"k": [1, 2]})
    churned(table)
    parts = (deletes(0, 1), inserts(0, 1), deletes(1, 2))
    found = changed(table, before)
    assert [Counter(found[start : start + 2]) for start in range(0, 6, 2)] == [*parts]
    assert Counter(changed(table, middle)) == parts[-1]
    table.restore(before)
    churned(table)
    assert Counter(changed(table, middle)) == parts[-1] + inserts(1, 2)
    assert keys(table) == list(range(6))


def test_rows_of_a_load_that_commits_after_a_restore_are_kept(instance: Instance) -> None:
    table = made(instance)
    context = table.context
    add(table, 0, 5)
    before = table.history.record_cut("before")
    with ExitStack() as stack:
        attempt = stack.enter_context(context.attempts.attempt(context.table))
        late = pa.table({"k": [70, 71], "v": [0, 0]})
        files = write_leaves(context, attempt, open_source(late, context.schema), lambda *_: None, 1 << 20)
        add(table, 50, 2)
        table.restore(before)
        assert commit_files(context, attempt, files, "late")
    assert keys(table) == [0, 1, 2, 3, 4, 70, 71]
    assert changed(table, before) == [
        *(("insert", key) for key in (50, 51)),
        *(("delete", key) for key in (50, 51)),
        *(("insert", key) for key in (70, 71)),
    ]


@pytest.mark.slow
def test_a_consumer_goes_on_if_files_of_the_restored_moment_were_collected(instance: Instance) -> None:
    """The files between the restored moment and the consumer's position no longer exist."""
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0, 10)
    good = table.history.record_cut("good")
    add(table, 5, 3)
    table.compact()
    consumer = table.consumer("copy")
    copy = Counter(keys(table))
    table.restore(good)
    table.history.drop_cut("good")
    churned(table)
    add(table, 30, 2)
    churned(table)
    for row in consumer.read().read_all().to_pylist():
        copy[row["k"]] += 1 if row["_change"] == "insert" else -1
    consumer.acknowledge()
    assert sorted((+copy).elements()) == keys(table) == [*range(10), 30, 31]
    assert consumer.read().read_all().num_rows == 0


@pytest.mark.slow
def test_rows_of_equal_values_are_counted(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "BATCH_ROWS", 2)
    table = made(instance, gc_delay_seconds=0)
    for _ in range(2):
        add(table, 0, 2)
    two = table.history.record_cut("two")
    for _ in range(3):
        add(table, 0, 2)
    table.compact()
    five = table.history.record_cut("five")
    table.restore(two)
    assert Counter(changed(table, five)) == deletes(*([0, 1] * 3))
    back = table.history.record_cut("back")
    table.restore(five)
    assert Counter(changed(table, back)) == inserts(*([0, 1] * 3))


def test_rows_that_differ_only_in_other_columns_are_changes(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0)
    add(table, 0, 1, v=1)
    one = table.history.record_cut("one")
    add(table, 0, 1, v=2)
    add(table, 7, 1, v=2)
    table.delete({"v": 1})
    table.compact()
    two = table.history.record_cut("two")
    table.restore(one)
    found = table.changes(after=two, columns=["k"]).read_all()
    assert found.schema.names == ["k", "_change"]
    rows = Counter(tuple(row.values()) for row in found.to_pylist())
    assert rows == Counter([(0, "delete"), (7, "delete"), (0, "insert")])


def test_values_of_every_kind_are_compared(instance: Instance) -> None:
    """Rows that a compaction rewrote are no change, whatever their values are."""
    values = [
        dm.Field("d", dm.DOUBLE, True),
        dm.Field("b", dm.BYTES, True),
        dm.Field("l", dm.LIST(dm.DOUBLE), True),
        dm.Field("m", dm.MAP(dm.STRING, dm.LONG), True),
        dm.Field("s", dm.STRUCT([dm.Field("x", dm.DOUBLE, True), dm.Field("y", dm.STRING, True)]), True),
        dm.Field("n", dm.DECIMAL(9, 2), True),
    ]
    schema = dm.Schema([dm.Field("k", dm.LONG)], [dm.Field("t", dm.STRING)], values)
    arrow = pa.schema([
        pa.field("k", pa.int64(), False), pa.field("t", pa.string(), False), ("d", pa.float64()),
        ("b", pa.binary()), ("l", pa.list_(pa.float64())), ("m", pa.map_(pa.string(), pa.int64())),
        ("s", pa.struct([("x", pa.float64()), ("y", pa.string())])), ("n", pa.decimal128(9, 2)),
    ])  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"k": k, "t": "", "d": d, "b": b, "l": found, "m": m, "s": s, "n": n}
        for k, (d, b, found, m, s, n) in enumerate([
            (math.nan, b"\0", [math.nan, None], [("a", 1), ("b", None)], {"x": math.nan, "y": None}, 1),
            (None, None, None, None, None, None),
            (-0.0, b"", [], [], {"x": None, "y": ""}, 0),
            (math.inf, b"a", [1.0], [("a", 2)], {"x": 1.0, "y": "ä"}, -1),
        ])
    ]  # fmt: skip
    properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
    table = instance.create_table("every", schema, properties=properties)
    for row in rows:
        table.ingest(pa.Table.from_pylist([row], schema=arrow))
    first = table.history.record_cut()
    other = {**rows[3], "m": [("a", 3)]}
    table.ingest(pa.Table.from_pylist([other], schema=arrow))
    table.compact()
    second = table.history.record_cut()
    table.restore(first)
    found = table.changes(after=second).read_all().to_pylist()
    assert found == [{**table_row(other), "_change": "delete"}]
    table.restore(second)
    found = table.changes(after=first).read_all().to_pylist()
    assert [row["_change"] for row in found] == ["insert", "delete", "insert"]
    assert {repr(row["m"]) for row in found} == {"[('a', 3)]"}


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a row in which `n` is a decimal with two digits, as tables return it."""
    return {**row, "n": row["n"] and pa.scalar(row["n"], pa.decimal128(9, 2)).as_py()}


def test_merged_rows_are_changes_if_their_total_changed(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, aggregate="sum(v)")
    add(table, 0, 3, v=1)
    add(table, 0, 3, v=2)
    table.compact()
    good = table.history.record_cut("good")
    add(table, 1, 1, v=10)
    bad = table.history.record_cut("bad")
    table.restore(good)
    rows = table.changes(after=bad).read_all().to_pylist()
    assert [(row["_change"], row["k"], row["v"]) for row in rows] in (
        [("delete", 1, 13), ("insert", 1, 3)],
        [("insert", 1, 3), ("delete", 1, 13)],
    )


def test_rows_hidden_by_the_filter_are_no_changes_of_a_restore(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, filter="age_off(v, 1000)")
    far = 1 << 60
    add(table, 0, 3, v=0)
    add(table, 5, 3, v=far)
    good = table.history.record_cut("good")
    add(table, 20, 1, v=far)
    table.compact()
    bad = table.history.record_cut("bad")
    table.restore(good)
    assert changed(table, bad) == [("delete", 20)]


def test_only_leaves_that_a_restore_changed_are_read(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 2)
    monkeypatch.setattr(table_view, "PAGE_LEAVES_MAX", 2)
    table = made(instance, split_threshold_rows=10**6)
    for point in range(10, 80, 10):
        leaf = next(one for one in table.partitions.leaves() if one.region.range("k").contains(point))
        table.partitions.split(leaf.partition_id, point)
    add(table, 10, 70)
    before = table.history.record_cut()
    add(table, 0, 1)
    add(table, 45, 20, v=1)
    after = table.history.record_cut()
    table.restore(before)
    context = table.context
    [past] = events_between(context, position_of(context, after), now(context))
    assert isinstance(past, PastRestore)
    restored = changes.Restored(context, past)
    assert (restored._ranges() or {})["k"] == (dm.Range(max=10), dm.Range(40, 70))
    groups = list(restored.groups())
    assert [(len(went), len(came)) for went, came in groups] == [(1, 0)] * 4, "leaves 0, 40, 50 and 60"
    assert Counter(changed(table, after)) == deletes(0, *range(45, 65))


def test_a_restore_by_an_older_dormouse_is_refused_by_name(instance: Instance) -> None:
    table = made(instance)
    add(table, 0, 2)
    before = table.history.record_cut()
    consumer = table.consumer("c")
    add(table, 5, 2)
    table.restore(before)
    after = table.history.record_cut()
    query(
        instance._supplier,
        "update restored set snapshot = null, number = null, deletion_id = null returning 1",
    )
    with pytest.raises(InvalidCut, match=r"was restored at .*, by an old Dormouse, which recorded"):
        table.changes(after=before)
    with pytest.raises(InvalidCut, match=r"consumer 'c' cannot continue: .* To go on: table.drop_consumer"):
        consumer.read()
    assert changed(table, after) == []
    table.restore(before)
    assert changed(table, after) == []


def test_a_consumer_is_behind_after_a_restore_or_a_delete_alone(
    instance: Instance,
) -> None:
    table = made(instance)
    add(table, 0, 2)
    before = table.history.record_cut()
    add(table, 5, 2)
    consumer = table.consumer("c")
    assert [one.seconds_behind for one in table.consumers()] == [0]
    table.restore(before)
    assert all(one.seconds_behind for one in table.consumers())
    assert consumer.read().read_all().num_rows == 2
    consumer.acknowledge()
    assert [one.seconds_behind for one in table.consumers()] == [0]
    table.delete({"k": 1})
    assert all(one.seconds_behind for one in table.consumers())


def test_changes_across_restores_over_http(instance: Instance) -> None:
    table = made(instance)
    add(table, 0, 2)
    before = table.history.record_cut("before")
    add(table, 5, 2)
    table.restore(before)
    with serving(instance) as url, connect_client(url) as client:
        rows = client.table("t").changes("before").read_all().to_pylist()
    assert [(row["_change"], row["k"]) for row in rows] == changed(table, "before")
    assert Counter(changed(table, "before")) == inserts(5, 6) + deletes(5, 6)
