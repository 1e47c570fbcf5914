"""Updates, compared with DuckDB's UPDATE on the same rows."""

from __future__ import annotations

import itertools
from datetime import timedelta
from decimal import Decimal
from math import nan
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import DormouseError
from tests.edited import NOON, SCHEMA, Judged, row, table_of
from tests.support.api import Instance
from tests.support.model import WhenMatched, WhenNotMatched, sql
from tests.support.state import LAYOUTS
from tests.support.writing import Edit, Merge, Update
from tests.tiers import sampled

ROWS = [row(k) for k in range(0, 100, 3)] + [row(k, "b") for k in range(0, 100, 7)]
CASES: list[tuple[Any, dict[str, Any], str, str]] = [
    ({"k": 3}, {"i": 7}, "k = 3", "i = 7"),
    ({"k": 3, "c": "a"}, {"i": sql("i + 1")}, "k = 3 and c = 'a'", "i = i + 1"),
    ({"k": dm.Range(20, 60)}, {"i": sql("i * 2"), "s": None}, "k >= 20 and k < 60", "i = i * 2, s = NULL"),
    ({"k": [1, 21, 42], "f": None}, {"s": "unknown"}, "k in (1, 21, 42) and f is null", "s = 'unknown'"),
    ({"d": nan}, {"d": -0.0}, "d = 'nan'", "d = '-0.0'"),
    ({"d": 0.0}, {"i": sql("k::INT")}, "d = 0", "i = k"),
    ({"s": None}, {"s": sql("c || ':' || k")}, "s is null", "s = c || ':' || k"),
    (dm.ALL, {"m": sql("m * 1.1")}, "true", "m = m * 1.1"),
    (dm.ALL, {"ts": sql("ts + interval 1 day")}, "true", "ts = ts + interval 1 day"),
    (dm.ALL, {"i": sql("d")}, "false", "i = 1"),  # fails: NaN is no INT
    (sql("i > 3 or d is null"), {"f": True}, "i > 3 or d is null", "f = true"),
    (sql("k % 2 = 0 and c = 'b'"), {"l": [1, 2]}, "k % 2 = 0 and c = 'b'", "l = [1, 2]"),
    (sql("k % 4 = 0"), {"st": {"a": 9}}, "k % 4 = 0", "st = {'a': 9}"),
    (sql("t.st.a > 50"), {"l": sql("list_append(l, 9)")}, "st.a > 50", "l = list_append(l, 9)"),
    (sql("list_contains(l, 3)"), {"b": b"\x00\xff"}, "list_contains(l, 3)", "b = '\\x00\\xFF'::BLOB"),
    (sql("d = 0"), {"s": "zero"}, "d = 0", "s = 'zero'"),
    (sql("day > date '2026-02-01'"), {"day": None}, "day > date '2026-02-01'", "day = NULL"),
    ({"k": 9}, {"ts": NOON}, "k = 9", "ts = '2026-01-02 12:00:00+00'"),
    (sql("k = 6 and now() > timestamptz '2000-01-01'"), {"m": Decimal("1.25")}, "k = 6", "m = 1.25"),
    ({"k": 1_000}, {"i": 1}, "k = 1000", "i = 1"),
    (sql("false"), {"i": 1}, "false", "i = 1"),
]  # fmt: skip
OF_KEYS: list[tuple[Any, dict[str, Any], str, str]] = [
    ({"k": dm.Range(0, 20)}, {"k": sql("k + 60")}, "k >= 0 and k < 20", "k = k + 60"),
    (sql("c = 'b'"), {"c": "a", "k": sql("100 - k")}, "c = 'b'", "c = 'a', k = 100 - k"),
    (dm.ALL, {"k": 7}, "true", "k = 7"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("layout", "inline_bytes_max"), [*((one, 65_536) for one in LAYOUTS), (LAYOUTS[0], 0)]
)
@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_updates_are_those_of_duckdb(
    instance: Instance, layout: str, keep: str, inline_bytes_max: int
) -> None:
    judged = Judged(instance, ROWS, layout, keep, inline_bytes_max=inline_bytes_max)
    cases = sampled(CASES, 8) + (OF_KEYS if keep == "every_row" else [])
    for number, (where, values, condition, sets) in enumerate(cases):
        if number % 6 == 5 and inline_bytes_max:
            # planning slows down with each pending deletion; with objects, those of all cases are
            judged.table.compact(full=True)
        update = Update(judged.sessions, where, values)
        if condition == "false" and where is dm.ALL:
            with pytest.raises(DormouseError, match="'i'"):
                update.dry_run(judged.table.context)
            continue
        judged.edit(update, f"UPDATE t SET {sets} WHERE {condition}")
    judged.table.compact()
    judged.check()


def test_duplicates_are_all_updated(instance: Instance) -> None:
    judged = Judged(instance, [row(k % 5) for k in range(20)])
    assert judged.edit(
        Update(judged.sessions, sql("i = 2"), {"i": sql("i + 1")}), "UPDATE t SET i = i + 1 WHERE i = 2"
    ) == {"updated": 4}
    assert judged.edit(Update(judged.sessions, {"i": 3}, {"k": 99}), "UPDATE t SET k = 99 WHERE i = 3") == {
        "updated": 8
    }


def test_many_rows_are_written_as_objects(instance: Instance) -> None:
    judged = Judged(instance, [row(k) for k in range(5_000)])
    counts = judged.edit(
        Update(judged.sessions, sql("k % 2 = 0"), {"i": sql("k::INT")}), "UPDATE t SET i = k WHERE k % 2 = 0"
    )
    assert counts == {"updated": 2_500}


def test_a_list_of_many_keys_needs_no_long_condition(instance: Instance) -> None:
    judged = Judged(instance, [row(k) for k in range(50)])
    keys = [*range(0, 40, 2), *range(1_000_000, 1_020_000)]
    judged.edit(
        Update(judged.sessions, {"k": keys}, {"i": 5}), "UPDATE t SET i = 5 WHERE k < 40 AND k % 2 = 0"
    )


def test_a_table_that_merges_rows_updates_the_merged_ones(instance: Instance) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("n", dm.LONG)])
    table = instance.create_table("sums", schema, properties=dm.TableProperties(aggregate="sum(n)"))
    for _ in range(3):
        table.ingest([{"k": k, "n": k} for k in range(10)])
    sessions = instance._tables.sessions()
    for where, values in (
        (sql("n > 20"), {"n": sql("n - 20")}),
        ({"n": 6}, {"n": 0}),
        ({"k": 1}, {"n": sql("n * 100")}),
    ):
        with Edit(table.context.supplier, None) as edit:
            edit.add(table.context, Update(sessions, where, values))
            edit.commit()
    expected = [0, 300, 0, 9, 12, 15, 18, 1, 4, 7]
    assert [one["n"] for one in table.query().read_all().to_pylist()] == expected
    table.compact()
    assert [one["n"] for one in table.query().read_all().to_pylist()] == expected
    assert instance.execute("delete from sums where n >= 12").deleted == 4
    assert [one["n"] for one in table.query().read_all().to_pylist()] == [0, 0, 9, 1, 4, 7]


WRONG: list[tuple[Any, Any, str]] = [
    ({"k": 1}, {"nope": 1}, "unknown column 'nope'"),
    ({"k": 1}, {"i": sql("dayy")}, "unknown column 'dayy'; did you mean 'day'"),
    ({"k": 1}, {"i": sql("i +")}, "is no expression"),
    ({"k": 1}, {"i": sql("(select 1)")}, "reads no other table"),
    ({"k": 1}, {"i": sql("sum(i)")}, "over many rows"),
    ({"k": 1}, {"i": sql("1), (2")}, "more than one expression"),
    ({"k": 1}, {"i": sql("3000000000")}, "'i': .*out of range"),
    ({"k": 1}, {"i": 3_000_000_000}, "'i' is int"),
    ({"k": 1}, {"i": "x"}, "'i' is int"),
    ({"k": 1}, {"l": ["x"]}, "'l' is list"),
    ({"k": 1}, {"c": None}, "'c' must not be null"),
    ({"k": 1}, {"c": sql("NULL")}, "'c' must not be null"),
    ({"k": 1}, {}, "give new values"),
    ({"k": 1}, "i = 1", "give new values"),
    ({}, {"i": 1}, "no condition"),
    ({"k": dm.Range()}, {"i": 1}, "bounds nothing"),
    (sql("random() < 0.5"), {"i": 1}, "another value each time"),
    (sql("k = 1; drop table t"), {"i": 1}, "is no expression"),
    (sql("z = 1"), {"i": 1}, "unknown column 'z'"),
    ({"z": 1}, {"i": 1}, "unknown column 'z'"),
]


def test_bad_updates_are_one_clear_line(instance: Instance) -> None:
    judged = Judged(instance, [row(1), row(2)])
    for (where, values, complaint), is_dry in itertools.product(WRONG, (True, False)):
        with pytest.raises(DormouseError, match=complaint) as raised:
            update, context = Update(judged.sessions, where, values), judged.table.context
            if is_dry:
                update.dry_run(context)
            with Edit(context.supplier, None) as edit:
                edit.add(context, update)
        assert "\n" not in str(raised.value)
    judged.check()


def test_keyed_tables_refuse_new_keys_and_older_rows(instance: Instance) -> None:
    judged = Judged(instance, [row(1), row(2)], keep="newest_row")
    context = judged.table.context
    with pytest.raises(DormouseError, match="row key"):
        Update(judged.sessions, {"k": 1}, {"k": 3}).dry_run(context)
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
    properties = dm.TableProperties(keep="newest_row", newest_by="v")
    dated = instance.create_table("dated", schema, properties=properties)
    dated.upsert([{"k": 1, "v": 5}])
    for where in ({"k": 1}, sql("k = 1")):
        with pytest.raises(DormouseError, match=r"'v' determines which row is the newest, and 4 .* its 5"):
            Update(judged.sessions, where, {"v": sql("v - 1")}).dry_run(dated.context)
        assert Update(judged.sessions, where, {"v": sql("v + 1")}).dry_run(dated.context) == {"updated": 1}


def test_a_table_with_a_filter_refuses_updates(instance: Instance) -> None:
    table = instance.create_table(
        "aging", SCHEMA, properties=dm.TableProperties(filter="age_off(ts, 86400000)")
    )
    with pytest.raises(DormouseError, match="filter hides rows"):
        Update(instance._tables.sessions(), {"k": 1}, {"i": 1}).dry_run(table.context)


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
@pytest.mark.parametrize("where", [{"i": 3}, sql("i = 3"), {"k": 3, "c": "a"}])
def test_only_rows_that_concern_an_update_make_it_run_again(
    instance: Instance, keep: str, where: Any
) -> None:
    judged = Judged(instance, [row(k, i=k) for k in range(10)], keep=keep)

    def attempts(update: Update, *meanwhile: dict[str, Any]) -> int:
        left = list(meanwhile)
        compute = update.compute

        def once(*given: Any) -> Any:
            found = compute(*given)
            if left:
                judged.table.ingest(table_of([left.pop(0)]))
            return found

        object.__setattr__(update, "compute", once)
        with Edit(judged.table.context.supplier, None) as edit:
            edit.add(judged.table.context, update)
            edit.commit()
        return edit.attempts

    add = {"s": sql("coalesce(s, '') || '!'")}
    assert attempts(Update(judged.sessions, where, add), row(5, i=4)) == 1
    assert attempts(Update(judged.sessions, where, add), row(3, i=3)) == 2
    if keep == "newest_row":
        # the row that the update would change was replaced by one that does not meet the condition
        assert attempts(Update(judged.sessions, {"i": 3}, add), row(3, i=8)) == 2
        rows = judged.table.query({"k": 3}).read_all().to_pylist()
        assert [(one["i"], one["s"]) for one in rows] == [(8, None)]


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_edits_see_columns_as_they_are_now(instance: Instance, keep: str) -> None:
    judged = Judged(instance, [row(k) for k in range(20)], keep=keep)
    table, sessions = judged.table, judged.sessions
    judged.edit(Update(sessions, sql("i = 2"), {"s": "before"}), "UPDATE t SET s = 'before' WHERE i = 2")
    table.add_column(dm.Field("n", dm.INT), 7)
    table.rename_column("i", "j")
    table.widen_column("j", dm.LONG)
    table.drop_column("b")
    for change in ("ADD COLUMN n INT DEFAULT 7", "RENAME i TO j", "ALTER j TYPE BIGINT", "DROP COLUMN b"):
        judged.judge.execute(f"ALTER TABLE t {change}")
    judged.check()
    judged.edit(
        Update(sessions, sql("n = 7 AND j > 3"), {"j": sql("j + n + 3000000000")}),
        "UPDATE t SET j = j + n + 3000000000 WHERE n = 7 AND j > 3",
    )
    judged.edit(Update(sessions, {"k": dm.Range(0, 5)}, {"n": 8}), "UPDATE t SET n = 8 WHERE k < 5")
    judged.edit(Update(sessions, {"n": 8}, {"s": sql("n::VARCHAR")}), "UPDATE t SET s = n WHERE n = 8")
    source = pa.table({"k": [1, 2, 300], "c": ["a", "a", "z"], "j": [11, 12, 13]})
    when = [WhenMatched("t.n = 8", update=["j"]), WhenNotMatched(insert=["k", "c", "j"])]
    judged.edit(
        Merge(sessions, source, ["k", "c"], when),
        "MERGE INTO t USING source AS s ON (t.k = s.k AND t.c = s.c) "
        "WHEN MATCHED AND t.n = 8 THEN UPDATE SET j = s.j "
        "WHEN NOT MATCHED THEN INSERT (k, c, j) VALUES (s.k, s.c, s.j)",
        source=source,
    )
    table.compact()
    judged.check()


def test_a_later_hour_is_one_for_all_rows(instance: Instance) -> None:
    judged = Judged(instance, [row(k) for k in range(3_000)])
    with Edit(judged.table.context.supplier, None) as edit:
        edit.add(judged.table.context, Update(judged.sessions, dm.ALL, {"ts": sql("now()")}))
        edit.commit()
    times = set(judged.table.query(columns=["ts"]).read_all().column("ts").to_pylist())
    assert len(times) == 1
    assert times.pop() > NOON - timedelta(days=10_000)
