"""Statements that write have the results that DuckDB gives for the same rows, or are refused in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import duckdb
import pytest

import dormouse as dm
from dormouse.errors import DormouseError, InvalidInput, InvalidQuery
from tests.every_door import of_arrow
from tests.support.api import Instance
from tests.tiers import sampled

COLUMNS = """k BIGINT NOT NULL, g VARCHAR NOT NULL, n INTEGER, x DOUBLE, s VARCHAR, d DATE, seen TIMESTAMPTZ,
    "p q" DECIMAL(9, 2)"""
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("g", dm.STRING)],
    values=[
        dm.Field("n", dm.INT, nullable=True), dm.Field("x", dm.DOUBLE, nullable=True),
        dm.Field("s", dm.STRING, nullable=True), dm.Field("d", dm.DATE, nullable=True),
        dm.Field("seen", dm.TIMESTAMP, nullable=True), dm.Field("p q", dm.DECIMAL(9, 2), nullable=True),
    ],
)  # fmt: skip
ROWS: list[tuple[Any, ...]] = [
    (1, "a", 10, 1.5, "one", date(2026, 1, 1), datetime(2026, 1, 1, 12, tzinfo=UTC), Decimal("1.50")),
    (2, "a", None, math.nan, None, None, None, None),
    (2, "b", -5, -0.0, "it's", date(1, 1, 1), datetime(1, 1, 1, tzinfo=UTC), Decimal("-0.01")),
    (3, "c", 0, math.inf, "", date(9999, 12, 31), datetime(2026, 1, 31, 23, 59, tzinfo=UTC), Decimal("0")),
    (4, "d", 7, 0.0, "ü", date(2026, 1, 31), None, Decimal("9999999.99")),
]
NEWS: list[tuple[Any, ...]] = [
    (1, "a", 11, 2.5, "new", None, None, None),
    (3, "c", None, -math.inf, None, date(2026, 2, 1), None, Decimal("5")),
    (7, "z", 70, 0.1, "seven", None, datetime(2026, 3, 1, tzinfo=UTC), None),
]

BOTH: list[tuple[Any, ...]] = [
    ("update t set n = 5",),
    ("update t set n = n + 1, s = 'was ' || n where k >= 2",),
    ("update t as u set n = u.k::int, x = u.x * 2 where u.g in ('a', 'c') and u.n is not null",),
    ("update t set s = null where n is null",),
    ("update t set (n, s) = (n * 2, upper(s)) where x is distinct from 1.5",),
    ('update t set "p q" = "p q" + 0.01 where "p q" < 100',),
    ("update t set x = case when isnan(x) then 0 when x > 1e300 then -1 else x end",),
    ("update t set d = d + 1 where d between '2026-01-01' and '2026-01-31'",),
    ("update t set seen = '2026-05-05 00:00:00', n = '12' where seen is null",),
    ("update t set n = $1, s = $2 where k = $3", [None, "?", 1]),
    ("update t set n = ? where s = ?", [3, "it's"]),
    ("update t set s = $name where seen < $at", {"name": "$x", "AT": datetime(2026, 1, 15, tzinfo=UTC)}),
    ("update t set n = 1 where false",),
    ("update t set n = default where k = 1",),
    ("delete from t",),
    ("truncate t",),
    ("delete from t where k = 2",),
    ("delete from t where 3 > k",),
    ("delete from t where k between 2 and 3 and g = 'b'",),
    ("delete from t where n is null",),
    ("delete from t where d = '2026-01-31'",),
    ("delete from t where seen = timestamptz '2026-01-01 13:00:00+01'",),
    ("delete from t where isnan(x) or s = ''",),
    ("delete from t where k = 1.5 or k = 99",),
    ("delete from t as u where u.s like '%t''s'",),
    ("delete from t where x = 0",),
    ("delete from t where k = '2'::bigint and n < ' 5.4 '::int",),
    ("delete from t where k in ($1, $2)", [1, 4]),
    ("insert into t values (9, 'i', 1, 0.5, 'nine', '2026-01-31', '2026-01-31 12:00:00', 1.005)",),
    ("insert into t (g, k) values ('i', 9), ('j', '10')",),
    ("insert into t (k, g, n, s) values (9, 'i', default, 'x'), (10, 'j', 2, default)",),
    ("insert into t (k, g, n, x, d) values (9007199254740993, 'a', 1.6, 'nan', '2026-01-02'), "
     "(1e0, 'b', '7', 0.5, date '2026-01-03' + 1), (case when true then 5 else 6 end, 'c', (2), 1, null), "
     "(8, 'd', default /* none */, 1 -- one\n, default)",),
    ("insert into t (k, g, x) select k + 10, g || '!', n from t where n is not null order by k limit 3",),
    ("insert into t by name select 'z' as G, 26 as k",),
    ("insert into t from news where k = 7",),
    ("with q as (select * from news where k > 5), r as (from q) insert into t select * from r",),
    ("insert into t with q as (select * from news) select * from q where k > 5",),
    ("insert into t (k, g, n) values (?, ?, ?)", [5, "e", None]),
    ("merge into t using news using (k, g) when matched then update when not matched then insert",),
    ("merge into t using news on t.k = news.k and t.g = news.g when matched then update set * "
     "when not matched then insert *",),
    ("merge into t as a using (select k, g, n, s from news) as b on a.k = b.k and a.g = b.g "
     "when matched and b.n is null then delete when matched then update by name "
     "when not matched then insert by name",),
    ("merge into t using (select * from news) s on t.k = s.k and s.n > 0 when matched then update "
     "set n = t.n + s.n, s = s.s when not matched and s.k > 100 then insert",),
    ("merge into t s using news t on s.k = t.k and s.g = t.g when matched then update set s = t.s || s.s",),
    ("merge into t using news s using (k, g) when matched then do nothing "
     "when not matched then insert (k, g, s) values (s.k, s.g, upper(s.s))",),
    ("merge into t using news s using (k, g) when not matched by source and t.k < 4 then delete "
     "when not matched by source then update set n = -1",),
    ("merge into t using (values (1, 'a', 99), (8, 'h', 98)) v(kk, gg, nn) on t.k = v.kk and t.g = v.gg "
     "when matched then update set n = v.nn when not matched then insert (k, g, n) values (kk, gg, nn)",),
    ("merge into t using news s using (k, g) when matched and s.k = 1 then do nothing "
     "when matched then delete when not matched then insert values (k, g, 0, default, s, d, seen, 3)",),
    ("merge into t using (select k as a, g as b, n as c, x, s, d as e, seen as f, 1 as h from news) v "
     "on t.k = v.a and v.b = t.g when matched then update when not matched then insert",),
    ("with q as (select * from news where k = $1) merge into t using q on t.k = q.k "
     "when matched then update set s = $2", [3, "it''s"]),
    ("merge into t using news s on t.k = s.k and t.g = s.g when matched and s.n > 1000 "
     "then error 'too large' when matched then update set n = s.n",),
    ("merge into t using (select k, g, sum(n) as n, 1.5 as x, '2026-01-01' as d, 2 as \"p q\" from news "
     "group by all) s using (k, g) when matched then update by name when not matched then insert by name",),
]  # fmt: skip

KEYED: list[tuple[Any, ...]] = [
    ("insert or replace into t values (1, 'a', 5, 0, 'r', null, null, null), "
     "(9, 'i', 6, 1, 'n', null, null, 1)",),
    ("insert or replace into t (k, g, s) select k, g, 'replaced' from t where k < 3",),
    ("insert or ignore into t (k, g, n) values (1, 'a', 5), (9, 'i', 6)",),
    ("insert into t (k, g, n) values (1, 'a', 5), (9, 'i', 6) on conflict do nothing",),
    ("insert into t (k, g, n) values (1, 'a', 5), (9, 'i', 6) "
     "on conflict (g, k) do update set n = excluded.n",),
    ("insert into t (k, g, n) values (1, 'a', 5), (9, 'i', 6) "
     "on conflict (k, g) do update set n = excluded.n + t.n, s = s || '!' where t.n > 3",),
    ("insert into t as u (k, g, n) values (1, 'a', 5) "
     "on conflict (k, g) do update set n = u.n where excluded.n > 9",),
]  # fmt: skip


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    return module_instance


class Pair:
    """An instance and a DuckDB with the same tables: `t`, and `news`, which feeds it."""

    def __init__(self, instance: Instance, keep: str) -> None:
        self.instance = instance
        for name in set(instance) & {"t", "news"}:
            instance.drop_table(name)
        is_keyed = keep == "newest_row"
        self.table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(keep=keep))
        news = instance.create_table("news", SCHEMA)
        self.judge = duckdb.connect()
        self.judge.execute("set timezone = 'UTC'")
        key = ", PRIMARY KEY (k, g)" if is_keyed else ""
        self.judge.execute(f"create table t ({COLUMNS}{key}); create table news ({COLUMNS})")
        for name, load, rows in (
            ("t", self.table.upsert if is_keyed else self.table.ingest, ROWS),
            ("news", news.ingest, NEWS),
        ):
            load([dict(zip(SCHEMA.names, row, strict=True)) for row in rows[:2]])
            load([dict(zip(SCHEMA.names, row, strict=True)) for row in rows[2:]])
            marks = ", ".join("?" * len(SCHEMA.names))
            self.judge.executemany(f"insert into {name} values ({marks})", rows)

    @property
    def rows(self) -> list[str]:
        return sorted(map(repr, of_arrow(self.table.query())))

    @property
    def judged(self) -> list[str]:
        return sorted(map(repr, of_arrow(self.judge.execute("select * from t").to_arrow_table())))


@pytest.fixture(params=["every_row", "newest_row"])
def pair(instance: Instance, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(instance, request.param)
    yield made
    made.judge.close()


@pytest.fixture
def keyed(instance: Instance) -> Iterator[Pair]:
    made = Pair(instance, "newest_row")
    yield made
    made.judge.close()


def check(pair: Pair, statement: str, parameters: Any = None) -> None:
    """Runs a statement in both, after a dry run, and compares the rows and the numbers of changed rows."""
    before = pair.rows
    assert before == pair.judged
    would = pair.instance.execute(statement, parameters, dry_run=True)
    assert pair.rows == before and not would.applied
    [[count]] = pair.judge.execute(statement, parameters).fetchall()
    done = pair.instance.execute(statement, parameters, edit_id="once")
    assert pair.rows == pair.judged
    assert done.applied and done.edit_id == "once" and done.table == "t"
    counts = [[one.inserted, one.updated, one.deleted] for one in (would, done)]
    if done.deleted is None:
        assert counts[0] == [0, 0, count]
    else:
        assert counts[0] == counts[1] and sum(counts[1]) == count
    again = pair.instance.execute(statement, parameters, edit_id="once")
    assert not again.applied and pair.rows == pair.judged


@pytest.mark.parametrize("case", sampled(BOTH, 24), ids=lambda case: case[0])
def test_a_statement_has_the_result_of_duckdb(pair: Pair, case: tuple[Any, ...]) -> None:
    check(pair, *case)


@pytest.mark.parametrize("case", KEYED, ids=lambda case: case[0])
def test_a_statement_on_keys_has_the_result_of_duckdb(keyed: Pair, case: tuple[Any, ...]) -> None:
    check(keyed, *case)


REFUSED = [
    ("update nope set n = 1", "unknown table 'nope'"),
    ("update T2 set n = 1", "unknown table 'T2'"),
    ("update t set m = 1", "unknown column 'm'"),
    ("update t set n = m + 1", "m"),
    ("update t set n = other.n", "other"),
    ("update t set n = 'x'", "x"),
    ("update t set k = null where k = 1", "k"),
    ("update t set n = sum(n)", "sum"),
    ("delete from t where m = 1", "m"),
    ("insert into t values (1, 'a')", "another number of columns"),
    ("insert into t (k, g) values (9, 'i', 3)", "another number of columns"),
    ("insert into t (k, g, m) values (9, 'i', 3)", "unknown column 'm'"),
    ("insert into t by name select 9 as k, 'i' as g, 3 as m", "unknown column 'm'"),
    ("insert into t (n) values (1)", "k"),
    ("insert into t (k, g) values (null, 'a')", "null"),
    ("insert into t (k, g) values ('x', 'a')", "x"),
    ("insert into t (k, g) select k, g from nope", "unknown table 'nope'"),
    ("insert into t (k, g) select k, g from other.news", "there is no schema 'other'"),
    ("insert into t (k, g) select 1, * from read_csv('/etc/passwd')", "read_csv"),
    ("merge into t using nope on t.k = nope.k when matched then delete", "nope"),
    ("merge into t using news on t.k = news.m when matched then delete", "m"),
    ("merge into t using (select k from news) s using (k) when matched then update", "1 columns"),
    ("merge into t using (select k, 1 as m from news) s using (k) when matched then update by name", "'m'"),
    ("merge into t using news using (k, g) when matched then error 'this is wrong'", "'t': this is wrong"),
    ("merge into t using (from news union all from news) s using (k, g) when matched then delete",
     "match the row with k"),
    ("select * from t", "not SELECT"),
]  # fmt: skip


def check_refused(pair: Pair, cases: list[tuple[str, str]]) -> None:
    """Runs statements that are refused for the given reasons, in one line, and that change nothing."""
    before = pair.rows
    for statement, reason in cases:
        with pytest.raises(DormouseError) as failed:
            pair.instance.execute(statement)
        assert reason in str(failed.value) and "\n" not in str(failed.value), statement
        assert pair.rows == before, statement


def test_a_bad_statement_is_refused_in_one_line_and_changes_nothing(pair: Pair) -> None:
    check_refused(pair, REFUSED)


def test_a_key_of_a_keyed_table_has_one_row(keyed: Pair) -> None:
    cases = [
        ("insert into t (k, g) values (1, 'a')", "1"),
        ("insert into t (k, g, n) values (1, 'a', default)", "there already: INSERT OR REPLACE replaces it"),
        ("insert into t (k, g) values (9, 'i'), (9, 'i')", "9"),
        ("update t set k = 5 where k = 1", "'k'"),
        ("insert into t (k, g) values (9, 'i') on conflict (k) do nothing", "conflict by k, g"),
    ]
    check_refused(keyed, cases)


def test_conflicts_of_a_table_that_keeps_every_row_are_refused(instance: Instance) -> None:
    pair = Pair(instance, "every_row")
    for statement in ("insert or replace into t (k, g) values (1, 'a')",
                      "insert into t (k, g) values (1, 'a') on conflict do nothing"):  # fmt: skip
        with pytest.raises(InvalidInput, match="keeps every row"):
            instance.execute(statement)
    assert pair.rows == pair.judged


def test_a_key_may_be_changed_in_a_table_that_keeps_every_row(instance: Instance) -> None:
    check(Pair(instance, "every_row"), "update t set k = k * 10, g = g || k where k < 4")


def test_names_differ_in_case_from_those_of_the_table(instance: Instance) -> None:
    check(Pair(instance, "every_row"), "UPDATE T SET N = K, \"P Q\" = 3 WHERE G = 'a'")


def test_a_column_with_a_default_gets_it(instance: Instance) -> None:
    pair = Pair(instance, "every_row")
    pair.table.add_column(dm.Field("y", dm.STRING), "it's")
    pair.judge.execute("alter table t add column y varchar default 'it''s'")
    [columns] = [", ".join(SCHEMA.names[:2])]
    for statement in (
        f"insert into t ({columns}) values (20, 'v')",
        f"insert into t ({columns}, y) values (21, 'v', default), (22, 'w', 'own')",
        "update t set y = 'other' where k > 20",
        "update t set y = default where k = 21",
        "merge into t using news using (k, g) when not matched then insert (k, g, y) values (k, g, default)",
    ):
        instance.execute(statement)
        pair.judge.execute(statement)
        assert pair.rows == pair.judged, statement


def test_row_tables_are_refused_by_name(instance: Instance) -> None:
    name = f"edited_{uuid4().hex[:8]}"
    instance.create_row_table(name, [dm.Column("a", "INTEGER")])
    for statement in (f"update {name} set a = 1", f"delete from {name}", f"insert into {name} values (1)"):
        with pytest.raises(dm.errors.NotARowTable, match=f"{name}.*rows change"):
            instance.execute(statement)


def test_a_read_only_instance_runs_only_dry_runs(instance: Instance, dsn: str) -> None:
    Pair(instance, "every_row")
    with dm.connect(instance._tables.dsn, instance.objects.url, read_only=True) as reader:
        assert reader.execute("delete from t where k > 1", dry_run=True).deleted == 4
        with pytest.raises(DormouseError, match="read"):
            reader.execute("delete from t where k > 1")


def test_clauses_are_parsed_from_texts(instance: Instance) -> None:
    Pair(instance, "every_row")
    found = instance.merge_clauses(
        "t", ["matched and s.n is null then delete", "matched then update", "not matched then insert",
              "not matched by source and t.n > 3 then update set n = default, S = t.s || '!'"],
    )  # fmt: skip
    assert found == [
        dm.WhenMatched("s.n is null", delete=True),
        dm.WhenMatched(update="*"),
        dm.WhenNotMatched(insert="*"),
        dm.WhenNotMatchedBySource("t.n > 3", update={"n": None, "s": dm.sql("t.s || '!'")}),
    ]
    for text in ("matched", "matched then drop table t", "matched then delete; delete from t", ""):
        with pytest.raises(InvalidQuery):
            instance.merge_clauses("t", [text])
