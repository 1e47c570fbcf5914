"""Statements that write: what each is parsed to, what is refused, and hostile texts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.errors import InvalidQuery
from dormouse.model.types import Field, checked_parameters
from dormouse.reading.sql.clauses import Expression
from dormouse.reading.sql.conditions import literal_of
from dormouse.reading.sql.plain_where import plain_where
from dormouse.reading.sql.worker import plain_value
from dormouse.reading.sql.writes import Clause, Delete, Insert, Merge, Update, Written, written
from tests.support.model import BOOLEAN, DATE, DOUBLE, INT, LONG, STRING, TIMESTAMP, Range, Schema
from tests.tiers import by_tier


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"enable_external_access": False}) as made:
        yield made


def text_of(expression: Expression | None) -> str:
    return "-" if expression is None else expression.text


def sets_of(statement: Any) -> str:
    return ", ".join(f"{one.column}={text_of(one.value)}" for one in statement.sets)


def clause_of(clause: Clause) -> str:
    condition = "" if clause.condition is None else f" if {clause.condition.text}"
    rest = clause.star or sets_of(clause) or ("" if clause.message is None else clause.message.text)
    return f"{clause.of}{condition}: {clause.action} {rest}".rstrip()


def shown(statement: Written) -> str:
    """Returns a parsed statement as one line."""
    target = statement.target
    of = target.table if target.alias == target.table else f"{target.table} as {target.alias}"
    match statement:
        case Update():
            return f"update {of}: {sets_of(statement)} where {text_of(statement.where)}"
        case Delete():
            return f"delete {of} where {text_of(statement.where)}"
        case Insert(query=query):
            columns = "by name" if statement.by_name else ",".join(statement.columns or ("*",))
            found = f"insert {of} ({columns}): {query.prefix}|{query.text}"
            if (conflict := statement.conflict) is not None:
                found += f"; {conflict.action} ({','.join(conflict.columns)}) {sets_of(conflict)}"
                found += f" where {text_of(conflict.condition)}"
            return found.rstrip()
        case Merge(query=query):
            on = f"({','.join(statement.using)})" if statement.using else text_of(statement.on)
            clauses = "; ".join(map(clause_of, statement.clauses))
            return f"merge {of}: {query.prefix}|{query.text} as {statement.source} on {on}: {clauses}"


STATEMENTS = [
    ("update t set a = 1", "update t: a=1 where -"),
    ("UPDATE T AS x SET a = x.b, B=default WHERE x.k=1;", "update T as x: a=x.b, B=- where x.k=1"),
    ("update t x set (a, b) = (1, default), c = f(2, 3) ", "update t as x: a=1, b=-, c=round(2, 3) where -"),
    ('update "t t" set "a b" = "c""d" where "where" = 1', 'update t t: a b="c""d" where "where" = 1'),
    ("update main.t set a = b is distinct from c where d", "update t: a=b is distinct from c where d"),
    ("update t set a = case when b then 1 end, b = [x for x in l if x > 1] where true",
     "update t: a=case when b then 1 end, b=[x for x in l if x > 1] where true"),
    ("update t set a = s.end + s.case + {'when': 1}.when, b = 2",
     "update t: a=s.end + s.case + {'when': 1}.when, b=2 where -"),
    ("update t set a = 1, b = 2, where d", "update t: a=1, b=2 where d"),
    ("merge into t using (values (1)) s(k,) on t.k = s.k when matched then update set a = 1, "
     "when not matched then insert (k) values (s.k,)",
     "merge t: |SELECT * FROM (values (1)) s(k,) as s on t.k = s.k: matched: update a=1; "
     "not matched: insert k=s.k"),
    (" ; ;delete from t;;", "delete t where -"),
    ("update t set a = .1, b = 1. where c > .5", "update t: a=.1, b=1. where c > .5"),
    ("; with a as (select 1) insert into t from a", "insert t (*): with a as (select 1)|from a"),
    ("delete from t", "delete t where -"),
    ("delete from t as d where d.k in (1, 2)", "delete t as d where d.k in (1, 2)"),
    ("truncate t", "delete t where -"),
    ("truncate table t", "delete t where -"),
    ("insert into t values (1, 'a'), (2, 'b')", "insert t (*): |values (1, 'a'), (2, 'b')"),
    ("insert into t (k, v) select 1, 2 order by 1", "insert t (k,v): |select 1, 2 order by 1"),
    ("insert into t (select k from s)", "insert t (*): |(select k from s)"),
    ("insert into t (values, v) values (1, 2)", "insert t (values,v): |values (1, 2)"),
    ("insert into t by name from s", "insert t (by name): |from s"),
    ("insert into t by position (values (1))", "insert t (*): |(values (1))"),
    ("insert or replace into t values (1)", "insert t (*): |values (1); replace ()  where -"),
    ("insert or ignore into t values (1)", "insert t (*): |values (1); nothing ()  where -"),
    ("insert into t as x values (1) on conflict (k) do nothing",
     "insert t as x (*): |values (1); nothing (k)  where -"),
    ("insert into t (k, v) select * from a join b on conflict.x = 1 on conflict do update "
     "set v = excluded.v + t.v where t.v > 0",
     "insert t (k,v): |select * from a join b on conflict.x = 1; update () v=excluded.v + t.v where t.v > 0"),
    ("with a as (select ')'), insert(b) as materialized (select 2) insert into t select * from a, insert",
     "insert t (*): with a as (select ')'), insert(b) as materialized (select 2)|select * from a, insert"),
    ("insert into t with a as (select 1) select * from a",
     "insert t (*): |with a as (select 1) select * from a"),
    ("merge into t using s using (k) when matched then update when not matched then insert",
     "merge t: |SELECT * FROM s as s on (k): matched: update by position; not matched: insert by position"),
    ("merge into t as x using (select 1 as k) as y on x.k = y.k and y.k > 0 "
     "when matched and y.gone or case when x.a then true end then delete "
     "when matched and x.a is null then do nothing "
     "when matched then update set a = y.a, b = case when y.b then 1 else 2 end "
     "when not matched by target and y.k > 3 then insert (k, a) values (y.k, default) "
     "when not matched then insert by name "
     "when not matched by source and x.k < 9 then update set a = null "
     "when not matched by source then error 'no row for ' || x.k",
     "merge t as x: |SELECT * FROM (select 1 as k) as y as y on x.k = y.k and y.k > 0: "
     "matched if y.gone or case when x.a then true end: delete; "
     "matched if x.a is null: nothing; "
     "matched: update a=y.a, b=case when y.b then 1 else 2 end; "
     "not matched if y.k > 3: insert k=y.k, a=-; "
     "not matched: insert by name; "
     "not matched by source if x.k < 9: update a=null; "
     "not matched by source: error 'no row for ' || x.k"),
    ("merge into t using (values (1, 2)) s(k, v) on t.k = s.k when matched then update by name "
     "when not matched then insert values (s.k, s.v)",
     "merge t: |SELECT * FROM (values (1, 2)) s(k, v) as s on t.k = s.k: matched: update by name; "
     "not matched: insert =s.k, =s.v"),
    ("with s as (select 1 as k) merge into t using s on t.k = s.k when matched then update set * "
     "when not matched then insert *",
     "merge t: with s as (select 1 as k)|SELECT * FROM s as s on t.k = s.k: "
     "matched: update by position; not matched: insert by position"),
    ("merge into t using s on t.k = s.k when matched then error",
     "merge t: |SELECT * FROM s as s on t.k = s.k: matched: error"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "expected"), STATEMENTS)
def test_a_statement_is_parsed_to_its_clauses(
    connection: duckdb.DuckDBPyConnection, statement: str, expected: str
) -> None:
    assert shown(written(connection, statement.replace("f(2, 3)", "round(2, 3)"))) == expected


@pytest.mark.parametrize(("statement", "expected"), STATEMENTS)
def test_a_parsed_statement_can_be_sent_by_a_worker(
    connection: duckdb.DuckDBPyConnection, statement: str, expected: str
) -> None:
    parsed = written(connection, statement.replace("f(2, 3)", "round(2, 3)"))
    assert plain_value(pa.py_buffer(pickle.dumps(parsed))) == parsed


HOSTILE = [
    ("update t set a = 'it''s; -- no' where b = 'x'", "update t: a='it''s; -- no'\n where b = 'x'"),
    ("update t set a = 1 -- where k = 2\n where k = 3", "update t: a=1 -- where k = 2\n where k = 3"),
    ("update t set a = /* , b = 2 where */ 1", "update t: a=1 where -"),
    ("update t set a = /* /* nested */ where */ 1 where k = $$ returning $$",
     "update t: a=1 where k = $$ returning $$"),
    ("update t set a = $x$ $$ ; ' $x$ where k = E'\\'' || ' where '",
     "update t: a=$x$ $$ ; ' $x$ where k = E'\\'' || ' where '"),
    ('update t set "where" = 1, "set" = "from" where "returning" = 1',
     'update t: where=1, set="from" where "returning" = 1'),
    ("update t set ü = 'é;' where \"日本\" = '\U0001f600'", "update t: ü='é;' where \"日本\" = '\U0001f600'"),
    ("update\tt\nset a\u00a0=\u20031\u00a0where k = '\u00a0'", "update t: a=1 where k = '\u00a0'"),
    ("delete from t where (((k = 1) or ((k = 2)))) and ')' <> '('",
     "delete t where (((k = 1) or ((k = 2)))) and ')' <> '('"),
    ("delete from t where k = x'41' or k = '\\'' or true", None),
    ("insert into t values ('); drop table t; --', 1)", "insert t (*): |values ('); drop table t; --', 1)"),
    ("insert into t values (x'41', e'\\n', 1e3, 1_000)", "insert t (*): |values (x'41', e'\\n', 1e3, 1_000)"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "expected"), HOSTILE)
def test_strings_comments_and_quoted_names_are_no_clauses(
    connection: duckdb.DuckDBPyConnection, statement: str, expected: str | None
) -> None:
    if expected is None:
        with pytest.raises(InvalidQuery, match="unterminated"):
            written(connection, statement)
    else:
        assert shown(written(connection, statement)) == expected


REFUSED = [
    ("select 1", "not SELECT: instance.sql"),
    ("from t", "not FROM: instance.sql"),
    ("explain update t set a = 1", "not EXPLAIN"),
    ("with a as (select 1) select * from a", "not WITH … SELECT"),
    ("with a as (select 1) update t set a = 1", "WITH … UPDATE is not supported"),
    ("create table t (a int)", "not CREATE: instance.create_table"),
    ("copy t to 'x'", "not COPY"),
    ("attach 'x'", "not ATTACH"),
    ("set threads = 1", "not SET"),
    ("import database 'x'", "not IMPORT"),
    ("export database 'x'", "not EXPORT"),
    ("pragma version", "not PRAGMA"),
    ("begin", "not BEGIN: instance.transaction() makes several changes"),
    ("drop table t", "not DROP"),
    ("", "the statement is empty"),
    (" ; ", "the statement is empty"),
    ("update t set a = 1; delete from t", "only one statement can be run at a time"),
    ("update t set a = 1; import database 'x'", "only one statement can be run at a time"),
    ("update t set a = 'x", "unterminated quoted string"),
    ("update t set a = 1) where (1=1", "syntax error"),
    ("delete from t where k = 1=1) or (", "syntax error"),
    ("update t set a = 1 from s where t.k = s.k", "UPDATE … FROM is not supported: write MERGE INTO"),
    ("delete from t using s where t.k = s.k", "DELETE … USING is not supported: write MERGE INTO"),
    ("delete from t where k = 1 returning *", "RETURNING is not supported"),
    ("insert into t values (1) returning k", "RETURNING is not supported"),
    ("update t set a = (select max(a) from t)", "reads only columns of its own row, not table 't'"),
    ("update t set a = (select 1)", "an expression has no subquery"),
    ("delete from t where k in (from s)", "not table 's'"),
    ("delete from t where exists (from 'x.csv')", "not table 'x.csv'"),
    ("update t set a = read_text('/etc/passwd')", "unknown function 'read_text'"),
    ("update t set a = getenv('HOME')", "getenv"),
    ("update t set a = 1, A = 2", "column 'a' is named twice"),
    ("update t set (a, b) = (1, 2, 3)", "expected 2 values, got 3"),
    ("insert into t (a, a) values (1, 2)", "column 'a' is named twice"),
    ("insert into t default values", "DEFAULT VALUES gives no value of the keys"),
    ("insert or replace into t values (1) on conflict do nothing", "both OR REPLACE"),
    ("update only t set a = 1", "leave ONLY out"),
    ("update other.t set a = 1", "there is no schema 'other'"),
    ("update a.b.t set a = 1", "there is no schema 'a'"),
    ("merge into t using s join r using (k) on t.k = s.k when matched then delete", "USING takes a table"),
    ("merge into t using range(3) r on true when matched then delete", "USING takes a table"),
    ("merge into t using (select 1) on true when matched then delete", "USING takes a table"),
    ("merge into t using s as T on true when matched then delete", "are both called 'T'"),
    ("merge into t using s on t.k = s.k when matched then insert", "WHEN MATCHED THEN INSERT"),
    ("merge into t using s on t.k = s.k when not matched by source then update", "has no source"),
    ("delete from t where k = $1", "has 1 parameter, but 0 values"),
    ("upsert into t values (1)", "INSERT OR REPLACE INTO"),
    (None, "must be a string"),
    ("update t set a = '\0'", "NUL"),
]


@pytest.mark.parametrize(("statement", "reason"), REFUSED)
def test_other_statements_are_refused_in_one_line(
    connection: duckdb.DuckDBPyConnection, statement: Any, reason: str
) -> None:
    with pytest.raises(InvalidQuery) as failed:
        written(connection, statement)
    assert reason in str(failed.value)
    assert "\n" not in str(failed.value)


def test_parsing_acts_on_nothing(tmp_path: Path) -> None:
    """Not even with a connection that may write files: DuckDB imports a database when it extracts IMPORT."""
    (tmp_path / "schema.sql").write_text("create table evil (a int);")
    (tmp_path / "load.sql").write_text("")
    with duckdb.connect() as connection:
        for statement in (
            f"import database '{tmp_path}'",
            f"update t set a = 1; import database '{tmp_path}'",
            f"with a as (select 1) import database '{tmp_path}'",
            f"/* update */ import database '{tmp_path}'",
            "insert into t values (1)",
            "update t set a = nextval('s')",
        ):
            with pytest.raises(InvalidQuery):
                written(connection, statement if "values" not in statement else f"{statement} x")
        assert connection.execute("show tables").fetchall() == []


WORDS = st.sampled_from(
    ["a", "t.b", '"where"', '"a b"', "s.end", "1", "'x'", "'it''s'", "';'", "'--'", "'/*'", "$$ set $$",
     "$q$ ' $q$", "null", "ü", "'ü'", "1.5e3", "date '2026-01-31'", '";"', '"--"'],
)  # fmt: skip
SPACES = st.sampled_from([" ", "\n", "\t", "  ", " /* where , */ ", " -- when ) '\n"])

OPERATORS = st.sampled_from(["||", "and", "-"])
COMPARISONS = st.sampled_from(["=", "is distinct from"])
"""Operators that cannot follow each other without parentheses."""


def expressions() -> st.SearchStrategy[str]:
    return st.recursive(
        WORDS,
        lambda inner: st.one_of(
            st.tuples(inner, SPACES, OPERATORS, SPACES, inner).map("".join),
            st.tuples(inner, SPACES, COMPARISONS, SPACES, inner).map(lambda five: f"({''.join(five)}\n)"),
            inner.map(lambda one: f"({one}\n)"),
            st.tuples(inner, inner).map(lambda both: f"coalesce({both[0]}\n, {both[1]}\n)"),
            st.tuples(inner, inner, inner).map(
                lambda three: f"case when {three[0]}\nthen {three[1]}\nelse {three[2]}\nend"
            ),
            st.tuples(inner, inner).map(lambda both: f"[{both[0]}\n, {both[1]}\n]"),
            inner.map(lambda one: f"{{'from': {one}\n}}"),
        ),
        max_leaves=6,
    )  # fmt: skip


@settings(max_examples=by_tier(40, 300), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["a", '"b c"', "date", "ü"]), expressions()), min_size=1, max_size=3,
             unique_by=lambda pair: pair[0]),
    st.none() | expressions(),
    SPACES,
)  # fmt: skip
def test_the_clauses_of_random_statements_are_found(
    connection: duckdb.DuckDBPyConnection, sets: list[tuple[str, str]], where: str | None, space: str
) -> None:
    listed = f"{space},".join(f"{space}{name}{space}={space}{value}" for name, value in sets)
    condition = "" if where is None else f"{space}where{space}{where}{space}"
    parsed = written(connection, f"update{space}t{space}set{listed}{condition}")
    assert isinstance(parsed, Update)
    wanted = [(name.strip('"'), value) for name, value in sets]
    assert [(one.column, code(text_of(one.value))) for one in parsed.sets] == wanted
    assert (None if parsed.where is None else code(parsed.where.text)) == where
    merge = (
        f"merge into t using s on{space}{where or 'true'}{space}when matched{space}and{space}{sets[0][1]}"
        f"{space}then update set{listed}{space}when not matched then do nothing"
    )
    merged = written(connection, merge)
    assert isinstance(merged, Merge)
    assert [code(text_of(one.value)) for one in merged.clauses[0].sets] == [value for _, value in sets]
    assert code(text_of(merged.clauses[0].condition)) == sets[0][1]
    assert code(text_of(merged.on)) == (where or "true")


def code(text: str) -> str:
    """Returns the text of a clause without a comment after it."""
    for comment in (" /* where , */", " -- when ) '\n"):
        text = text.removesuffix(comment.rstrip(" ")).removesuffix(comment.rstrip())
    return text.strip()


VALUES: list[Any] = [
    None, True, 0, -5, 2**40, -(2**63), 2**100, 0.1, -0.0, float("inf"), float("-inf"), "it's", "", "?$1",
    "a\nb",     "\ufeff\x01", b"", b"\x00'\xff", Decimal("0.10"), Decimal("-1.50"), date(1, 1, 1),
    datetime(2026, 1, 31, 12, 0, 0, 5), datetime(2026, 1, 31, 12, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC),
    time(23, 59, 59, 999_999), timedelta(days=-1, microseconds=5), timedelta(seconds=1.5),
    UUID(int=5), [1, 2], [], ["a", None], [[1], [-2]],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_parameter_becomes_a_literal_of_the_same_value_and_type(
    connection: duckdb.DuckDBPyConnection, value: Any
) -> None:
    [checked] = checked_parameters([value])
    connection.execute("set timezone = 'UTC'")
    rows = [
        connection.execute(statement, parameters).fetchone()
        for statement, parameters in (
            ("select $1, typeof($1)", [checked]),
            (f"select {literal_of(checked)}, typeof({literal_of(checked)})", []),
        )
    ]
    assert rows[0] is not None and rows[1] is not None
    assert repr(rows[1][0]) == repr(rows[0][0])
    if value != []:
        assert rows[1][1].replace("INTEGER_LITERAL", "INTEGER") == rows[0][1]


def test_a_nan_parameter_is_a_nan(connection: duckdb.DuckDBPyConnection) -> None:
    for value in (float("nan"), Decimal("nan")):
        assert connection.execute(f"select isnan({literal_of(value)})").fetchone() == (True,)


@pytest.mark.parametrize(
    ("statement", "parameters", "expected"),
    [
        ("update t set a = ?, b = ? where k = ?", [1, "x", -3], "update t: a=1, b='x' where k =  (-3)"),
        ("update t set a = $2, b = $1", ["x", 1], "update t: a=1, b='x' where -"),
        ("update t set a = $N || '$N ?' where k = $m -- $x", {"n": "'", "M": None},
         "update t: a=''''  || '$N ?' where k =  NULL  -- $x\n"),
        ("delete from t where k in ($1, $1)", ["a); --"], "delete t where k in ( 'a); --' ,  'a); --' )"),
        ("insert into t values (?, ?)", [1, [2]], "insert t (*): |values ( 1 ,  [2] )"),
        ("delete from t where a -$1 = 1", [-1], "delete t where a - (-1)  = 1"),
    ],
)  # fmt: skip
def test_parameters_become_literals(
    connection: duckdb.DuckDBPyConnection, statement: str, parameters: Any, expected: str
) -> None:
    assert shown(written(connection, statement, parameters)) == expected


def test_values_that_do_not_fit_the_parameters_are_refused(connection: duckdb.DuckDBPyConnection) -> None:
    for statement, parameters in (
        ("update t set a = ?", [1, 2]),
        ("update t set a = $n", {"m": 1}),
        ("update t set a = ? where k = $1", [1, 2]),
    ):
        with pytest.raises(InvalidQuery):
            written(connection, statement, parameters)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x.a = y.b", "t.a = s.b"),
        ('X."a b" || "x".a', 't."a b" || t.a'),
        ("y.y.x = x.x.y", "s.y.x = t.x.y"),
        ("list_transform(l, x -> x.a + y.b)", "list_transform(l, x -> x.a + s.b)"),
        ("[x.a for x in l] = [y.b]", "[x.a for x in l] = [s.b]"),
        ("x.j -> '$.a' = 'x.a'", "t.j -> '$.a' = 'x.a'"),
        ("ü.a = x.ü /* x.a */ -- y.b", "ü.a = t.ü /* x.a */ -- y.b\n"),
        ("x . a = 1", "t . a = 1"),
    ],
)
def test_an_expression_can_call_its_tables_otherwise(
    connection: duckdb.DuckDBPyConnection, text: str, expected: str
) -> None:
    parsed = written(connection, f"delete from t where {text}")
    assert isinstance(parsed, Delete) and parsed.where is not None
    assert parsed.where.called({"x": "t", "y": "s"}) == expected


def test_a_table_that_has_one_of_the_new_names_is_refused(connection: duckdb.DuckDBPyConnection) -> None:
    parsed = written(connection, "delete from t where t.a = 1")
    assert isinstance(parsed, Delete) and parsed.where is not None
    assert parsed.where.called({"t": "t"}) == "t.a = 1"
    with pytest.raises(InvalidQuery, match=r"unknown table 't' of column t\.a: use x"):
        parsed.where.called({"x": "t"})


SCHEMA = Schema(
    row_keys=[Field("k", LONG), Field("Day", DATE)],
    values=[
        Field("n", INT, nullable=True), Field("s", STRING, nullable=True), Field("x", DOUBLE, nullable=True),
        Field("seen", TIMESTAMP, nullable=True), Field("ok", BOOLEAN, nullable=True),
    ],
)  # fmt: skip
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("k = 5", {"k": 5}),
        ("5 = t.K", {"k": 5}),
        ("k >= 1 and 9 > k", {"k": Range(1, 9)}),
        ("k between 1 and 9", {"k": Range(1, 9, max_inclusive=True)}),
        ("k > 1", {"k": Range(1, min_inclusive=False)}),
        ("k in (1, 2) and n is null", {"k": [1, 2], "n": None}),
        ("day = '2026-01-31' and s = 'it''s'", {"Day": date(2026, 1, 31), "s": "it's"}),
        ("day < date '2026-01-31'", {"Day": Range(max=date(2026, 1, 31))}),
        ("seen >= '2026-01-31 12:00:00' and ok = true", {"seen": Range(NOON), "ok": True}),
        ("seen = timestamptz '2026-01-31 13:00:00+01'", {"seen": NOON}),
        ("seen = '2026-01-31T12:00:00.000000Z'::TIMESTAMPTZ", {"seen": NOON}),
        ("k = 1.5", None),
        ("k = '5'", None),
        ("k = '5'::BIGINT", None),
        ("k = null", None),
        ("k in (1, null)", None),
        ("k = 1 or k = 2", None),
        ("k = n", None),
        ("k + 1 = 5", None),
        ("k <> 5", None),
        ("k is null", None),
        ("s is not null", None),
        ("n = 5000000000", None),
        ("x = 1.0", None),
        ("x = 1", None),
        ("day = '2026-1-31'", None),
        ("seen = timestamp '2026-01-31 13:00:00+01'", None),
        ("k = 1 and k = 2", None),
        ("k > 1 and k > 2", None),
        ("k > 9 and k < 1", None),
        ("other.k = 1", None),
        ("s.k = 1", None),
        ("y = 1", None),
    ],
)
def test_only_a_condition_with_the_same_meaning_becomes_one_on_columns(
    connection: duckdb.DuckDBPyConnection, condition: str, expected: Any
) -> None:
    parsed = written(connection, f"delete from t where {condition}")
    assert isinstance(parsed, Delete) and parsed.where is not None
    assert plain_where(SCHEMA, "t", parsed.where) == expected


def test_the_places_of_values_are_found(connection: duckdb.DuckDBPyConnection) -> None:
    text = "values (default, 'default', (1)), ([1, 2][1], \"default\", DEFAULT) -- default"
    parsed = written(connection, f"insert into t {text}")
    assert isinstance(parsed, Insert)
    raw = parsed.query.text.encode()
    assert [(raw[one.begin : one.end].strip(), one.column) for one in parsed.query.cells] == [
        (b"default", 0), (b"'default'", 1), (b"(1)", 2),
        (b"[1, 2][1]", 0), (b'"default"', 1), (b"DEFAULT", 2),
    ]  # fmt: skip
