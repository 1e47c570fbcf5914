"""Deletions by condition. Each is one row in the database, and from then on no reader returns
matching rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidProperties, InvalidQuery
from dormouse.reading.sql.selects import SCANS_MAX, read_together
from dormouse.writing import compaction_job, ingest
from tests.stored import query
from tests.support.api import Instance, Table
from tests.support.reading import KeyRanges, plan_query
from tests.support.state import LAYOUTS

NAN = float("nan")
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("s", dm.STRING)],
    [dm.Field("t", dm.LONG)],
    [dm.Field("v", dm.LONG, nullable=True), dm.Field("d", dm.DOUBLE, nullable=True)],
)
BATCHES_OF_TWO = {"compaction_strategy": "basic", "compaction_batch_files": 2}


def made(instance: Instance, layout: str = "file_table", name: str = "t", **properties: Any) -> Table:
    given = dm.TableProperties(**{**BATCHES_OF_TWO, **properties})
    return instance.create_table(name, SCHEMA, layout=layout, properties=given)


def row(k: int, s: str = "a", t: int = 0, v: int | None = 0, d: float | None = 0.0) -> dict[str, Any]:
    return {"k": k, "s": s, "t": t, "v": v, "d": d}


def add(table: Table, *rows: dict[str, Any]) -> None:
    types = [pa.int64(), pa.string(), pa.int64(), pa.int64(), pa.float64()]
    schema = pa.schema(
        [pa.field(f.name, kind, f.nullable) for f, kind in zip(SCHEMA.fields, types, strict=True)]
    )
    table.ingest(pa.Table.from_pylist(list(rows), schema=schema))


def plain(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns sorted rows in a form that can be compared; NaN equals NaN."""
    return sorted(tuple(map(repr, one.values())) for one in rows)


def seen(table: Table, instance: Instance) -> list[tuple[Any, ...]]:
    """Returns the table's rows, after checking that all readers return the same rows."""
    found = plain(table.query().read_all().to_pylist())
    assert plain(instance.sql(f"select * from {table.name}").read_all().to_pylist()) == found
    with instance.duckdb() as opened:
        assert plain(opened.execute(f"select * from {table.name}").to_arrow_table().to_pylist()) == found
    return found


def keys(table: Table, where: Any = None) -> list[int]:
    return [row["k"] for row in table.query(where, ["k"]).read_all().to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deletion_removes_earlier_rows_and_keeps_later_ones(instance: Instance, layout: str) -> None:
    table = made(instance, layout)
    add(table, *(row(k) for k in range(10)))
    report = table.delete({"k": dm.Range(2, 5)})
    assert (report.deletion_id, report.rows) == (1, None)
    assert keys(table) == [0, 1, 5, 6, 7, 8, 9]
    add(table, row(3), row(4, v=7))
    assert keys(table) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert table.delete({"k": 4}).deletion_id == 2
    left = seen(table, instance)
    assert len(left) == 8
    table.compact()
    assert seen(table, instance) == left, "a compaction applies each deletion only to earlier rows"
    assert table.status().row_count == 8, "physically"
    add(table, row(3), row(4))
    table.convert_layout(LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)])
    assert keys(table) == [0, 1, 3, 3, 4, 5, 6, 7, 8, 9]


CONDITIONS: list[tuple[Any, Callable[[dict[str, Any]], bool]]] = [
    (dm.ALL, lambda r: True),
    ({"v": 1}, lambda r: r["v"] == 1),
    ({"v": None}, lambda r: r["v"] is None),
    ({"v": [None, 2]}, lambda r: r["v"] in (None, 2)),
    ({"v": dm.Range(1, 3)}, lambda r: r["v"] in (1, 2)),
    ({"v": []}, lambda r: False),
    ({"d": dm.Range(min=1.0)}, lambda r: r["d"] is not None and not r["d"] < 1.0),
    ({"d": NAN}, lambda r: r["d"] is not None and r["d"] != r["d"]),
    ({"d": [NAN, 5.0, None]}, lambda r: r["d"] is None or r["d"] == 5.0 or r["d"] != r["d"]),
    ({"d": dm.Range(max=5.0)}, lambda r: r["d"] is not None and r["d"] < 5.0),
    ({"s": "a\0'\"", "v": 1}, lambda r: r["s"] == "a\0'\"" and r["v"] == 1),
    ({"k": [1, dm.Range(4, 6)], "t": 1}, lambda r: r["k"] in (1, 4, 5) and r["t"] == 1),
]


@pytest.mark.slow
def test_a_condition_deletes_the_rows_that_a_query_returns(instance: Instance) -> None:
    strings, values = ["a", "a\0'\"", "é"], [None, 1, 2, 3]
    doubles = [None, 0.0, 1.0, 5.0, NAN, float("inf")]
    rows = [row(n % 7, strings[n % 3], n % 2, values[n % 4], doubles[n % 6]) for n in range(84)]
    rows += [row(9, d=-0.0, v=None), row(9, d=None, v=None)]
    for number, (where, gone) in enumerate(CONDITIONS):
        table = made(instance, name=f"t{number}")
        add(table, *rows[:50])
        add(table, *rows[50:])
        found = table.query(None if where is dm.ALL else where).read_all().to_pylist()
        assert table.delete(where, dry_run=True).rows == len(found), where
        table.delete(where)
        left = [one for one in rows if not gone(one)]
        assert plain(left + found) == plain(rows), where
        assert seen(table, instance) == plain(left), where
        table.compact()
        assert seen(table, instance) == plain(left), where


def test_an_empty_or_invalid_condition_is_refused(instance: Instance) -> None:
    table = made(instance)
    add(table, row(1))
    for where in ({}, None, dm.Region()):
        with pytest.raises(InvalidQuery, match=r"is no condition; say which rows, or dm\.ALL"):
            table.delete(where)  # type: ignore[arg-type]
    with pytest.raises(InvalidQuery, match="unknown column 'w'"):
        table.delete({"w": 1})
    with pytest.raises(InvalidQuery, match="more than 65,536"):
        table.delete({"k": list(range(20_000))})
    assert keys(table) == [1]
    assert table.deletions() == []


@pytest.mark.slow
def test_an_aggregated_table_deletes_only_by_keys(instance: Instance) -> None:
    table = made(instance, aggregate="sum(v), max(d)")
    add(table, row(1, v=1), row(1, v=2), row(2, v=3))
    with pytest.raises(InvalidQuery, match="sort keys, or by a condition in SQL"):
        table.delete({"v": 1})
    assert table.delete(dm.sql("v = 1")).rows == 0  # as v is 3 in each merged row
    table.delete({"k": 1, "t": 0})
    add(table, row(1, v=5))
    assert [r["v"] for r in table.query().read_all().to_pylist()] == [5, 3]
    assert len(seen(table, instance)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moment_before_a_deletion_has_the_rows_and_one_after_does_not(
    instance: Instance, layout: str
) -> None:
    table = made(instance, layout)
    moments: list[tuple[Any, list[int]]] = []

    def note() -> None:
        # records a cut too: a time is read at the last cut before it
        clock, now = query(instance._supplier, "select clock_timestamp()")[0][0], keys(table)
        moments.extend([(clock, now), (table.history.record_cut(), now)])

    for step in range(4):
        add(table, *(row(k, v=step) for k in range(6)))
        note()
        table.delete({"k": step + 1} if step % 2 else {"v": step, "k": dm.Range(2, 5)})
        note()
        table.compact()
        note()
        for when, rows in moments:
            assert keys_at(table, when) == rows
            [count] = instance.sql("select count(*) as n from t", as_of=when).read_all().to_pylist()
            assert count == {"n": len(rows)}
    assert len({tuple(rows) for _, rows in moments}) == 8


def keys_at(table: Table, when: Any) -> list[int]:
    return [row["k"] for row in table.query(columns=["k"], as_of=when).read_all().to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_applied_in_order_give_the_later_rows(instance: Instance, layout: str) -> None:
    table = made(instance, layout)
    cuts, copies = [table.history.record_cut()], [plain([])]
    for step in range(5):
        add(table, *(row(k, v=step) for k in range(step, step + 4)))
        if step == 2:
            table.delete({"v": dm.Range(max=2)})
            add(table, *(row(k, v=1) for k in range(3)))
        table.delete({"k": step + 1})
        if step % 2:
            table.compact()
        add(table, row(step + 1, v=step))
        cuts.append(table.history.record_cut())
        copies.append(plain(table.query().read_all().to_pylist()))
    for first in range(len(cuts)):
        for last in range(first, len(cuts)):
            copy = list(copies[first])
            for change in table.changes(cuts[first], cuts[last]).read_all().to_pylist():
                kind, [one] = change.pop("_change"), plain([change])
                copy.append(one) if kind == "insert" else copy.remove(one)
            assert sorted(copy) == copies[last], (first, last)
    assert len(table.changes(None, cuts[-1]).read_all()) > 0


def test_a_consumer_reads_deleted_rows_as_deletes(instance: Instance) -> None:
    table = made(instance)
    add(table, row(1), row(2), row(3))
    consumer = table.consumer("etl")
    table.delete({"k": dm.Range(2, 4)})
    table.compact()
    assert [(c["k"], c["_change"]) for c in consumer.read().read_all().to_pylist()] == [
        (2, "delete"),
        (3, "delete"),
    ]
    consumer.acknowledge()
    assert consumer.read().read_all().num_rows == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_restore_has_exactly_the_deletions_of_its_moment(instance: Instance, is_compacted: bool) -> None:
    table = made(instance)
    cuts, rows = [], []
    for step in range(3):
        add(table, row(1, v=step), row(2, v=step), row(3, v=step))
        table.delete({"k": 1 + step})
        cuts.append(table.history.record_cut())
        rows.append(plain(table.query().read_all().to_pylist()))
        if is_compacted:
            table.compact()
    add(table, row(1), row(2), row(3))
    for target in (0, 2, 1, 2, 0):
        table.restore(to=cuts[target])
        assert seen(table, instance) == rows[target]
        assert [plain(table.query(as_of=cut).read_all().to_pylist()) for cut in cuts] == rows
        assert table.restore(to=cuts[target], dry_run=True).deletions == 0
    add(table, row(3))
    table.delete({"k": 2})
    table.compact()
    assert keys(table) == [3, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deletion_is_retired_when_no_file_can_have_its_rows(instance: Instance, layout: str) -> None:
    table = made(instance, layout, split_threshold_rows=4, split_min_rows=2, history_retention_seconds=900)
    add(table, *(row(k) for k in range(10)))
    table.split()
    add(table, *(row(k) for k in range(5)))
    table.delete({"k": 2})
    table.delete({"k": dm.Range(min=100)})
    table.delete({"k": 7})
    table.delete({"v": 5})
    cut = table.history.record_cut()
    before = keys(table)
    table.collect_garbage()
    assert [one.deletion_id for one in table.deletions()] == [1, 3, 4], "no file has a key from 100 on"
    table.compact()
    table.collect_garbage()
    assert 1 not in [one.deletion_id for one in table.deletions()]
    for _ in range(3):
        add(table, *(row(k) for k in range(10, 20)), *(row(k) for k in range(5)))
        table.split()
        table.compact()
        table.collect_garbage()
    assert keys_at(table, cut) == before
    assert [one.deletion_id for one in table.deletions(pending_only=False)] == [1, 2, 3, 4]
    query(instance._supplier, "update deletion set retired_at = '2000-01-01' where retired_xid is not null")
    table.collect_garbage()
    kept = [one.deletion_id for one in table.deletions(pending_only=False)]
    assert {1, 2} <= {*kept}, "the cut needs them"
    table.delete({"k": 11})
    assert table.deletions()[-1].deletion_id == 5


@pytest.mark.slow
def test_deletion_ids_are_not_reused(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    for expected in (1, 2, 3):
        add(table, row(1), row(2))
        assert table.delete({"k": 1}).deletion_id == expected
        while table.deletions():
            add(table, row(3))
            table.compact()
            table.collect_garbage()
        query(instance._supplier, "update deletion set retired_at = '2000-01-01'")
        table.collect_garbage()
        assert [one.deletion_id for one in table.deletions(pending_only=False)] == [expected]
    assert 1 not in keys(table)


def test_files_with_many_pending_deletions_are_due_for_compaction(instance: Instance) -> None:
    table = made(instance, deletions_max=3, compaction_batch_files=5)
    add(table, *(row(k) for k in range(10)))
    for key in range(3):
        table.delete({"k": key})
    table.delete({"k": 50})
    assert table.compact().jobs_run == 0
    table.delete({"k": 3})
    assert table.compact().jobs_run == 1
    assert table.status().row_count == 6
    assert table.status().deletions == 5
    table.collect_garbage()
    assert table.status().deletions == 0
    assert table.status().rows_exact


def test_an_aggregate_is_refused_while_a_deletion_by_values_is_pending(instance: Instance) -> None:
    table = made(instance)
    add(table, row(1, v=1), row(1, v=2))
    table.delete({"v": 1})
    with pytest.raises(InvalidProperties, match="deletion 1 of table 't' names values"):
        table.set_properties(aggregate="sum(v), max(d)")
    table.set_properties(deletions_max=1, gc_delay_seconds=0)
    table.delete({"v": 7})
    table.compact()
    table.collect_garbage()
    table.set_properties(aggregate="sum(v), max(d)")
    assert [r["v"] for r in table.query().read_all().to_pylist()] == [2]


@pytest.mark.slow
def test_the_command_line_deletes_rows(
    instance: Instance,
    cli: Callable[..., tuple[int, str, str]],
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    table = made(instance)
    add(table, *(row(k) for k in range(5)))
    assert cli("delete", "t", "--where", "k=1:3", "--dry-run") == (0, "would delete 2 rows of table t\n", "")
    assert cli("delete", "t")[0] == 2
    assert cli("delete", "t", "--all", "--where", "k=1")[0] == 2
    for verb in ("delete", "erase"):
        for condition in ("k=:", "v=:", '{"v": {"min": null}}'):
            code, _, err = cli(verb, "t", "--where", condition, "--yes")
            assert (code, "bounds nothing" in err, "--all" in err) == (2, True, True)
    code, _, err = cli("delete", "t", "--where", "k=1:3")
    assert (code, "--yes is needed" in err) == (2, True)
    assert keys(table) == [0, 1, 2, 3, 4]
    code, out, _ = cli("delete", "t", "--where", "k=1:3", "--yes")
    assert (code, out) == (0, "deleted the rows of table t with k=1:3 (deletion 1)\n")
    assert keys(table) == [0, 3, 4]
    found = json.loads(cli("table", "deletions", "t", "--json")[1])
    assert [(one["deletion_id"], one["pending"]) for one in found] == [(1, True)]
    assert "yes" in cli("table", "deletions", "t")[1]
    assert "1 deletion pending" in cli("status")[1]
    assert json.loads(cli("delete", "t", "--all", "--yes", "--json")[1])["deletion_id"] == 2
    assert keys(table) == []


@pytest.mark.slow
def test_a_statement_reads_files_with_a_hundred_sets_of_deletions(instance: Instance) -> None:
    points = [10 * n for n in range(1, 60)]
    table = instance.create_table("t", SCHEMA, split_points=points)
    rows = [row(10 * n + i, v=i) for n in range(60) for i in range(4)]
    add(table, *rows)
    for n in range(0, 60, 2):
        table.delete({"k": 10 * n + 1})
    add(table, *rows)
    for n in range(60):
        table.delete({"k": 10 * n + 2, "v": 2})
    left = [one for one in rows if one["v"] != 2]
    first = [one for one in left if one["v"] != 1 or one["k"] % 20 != 1]
    assert seen(table, instance) == plain(left + first)
    scans = [scan for group in plan_query(table.context, KeyRanges()) for scan in group]
    assert len(scans) > SCANS_MAX >= len(list(read_together(SCHEMA, scans)))


@pytest.mark.objects
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deletion_during_a_job_hides_its_rows_but_not_those_of_a_running_ingest(
    instance: Instance, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(instance, layout)
    add(table, row(1), row(2), row(3))
    table.delete({"k": 1})
    add(table, row(1), row(2), row(3))
    merge, write = compaction_job.merge_sorted, ingest.write_leaves

    def merged(*args: Any, **more: Any) -> Any:
        facts = merge(*args, **more)
        table.delete({"k": 2})
        return facts

    def written(*args: Any) -> Any:
        files = write(*args)
        table.delete({"k": 3})
        return files

    monkeypatch.setattr(compaction_job, "merge_sorted", merged)
    assert table.compact().jobs_run == 1
    assert keys(table) == [1, 3, 3]
    monkeypatch.setattr(ingest, "write_leaves", written)
    add(table, row(2), row(3))
    assert keys(table) == [1, 2, 3]
    monkeypatch.undo()
    assert table.compact().jobs_run == 1
    assert table.status().row_count == 3
    assert keys(table) == [1, 2, 3]
