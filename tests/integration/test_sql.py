"""SQL over tables whose files were written by hand, checked against DuckDB on the same rows."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from query_lake import Lake, tuples
from trees import holds

from dormouse.data.arrow_schema import arrow_schema
from dormouse.errors import InvalidQuery, ObjectNotFound, ObjectStoreError
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, DOUBLE, INT, LIST, LONG, STRING
from dormouse.postgres import ConnectionSupplier
from dormouse.query import explain_sql, sql
from dormouse.query.pushdown import scans, wanted
from dormouse.query.scan_session import session

SCHEMA = Schema(
    [Field("Carrier", STRING), Field("flight", LONG), Field("code", BYTES), Field("leg", INT)],
    [Field("time", LONG)],
    [Field("delay", DOUBLE, nullable=True), Field("tags", LIST(STRING), nullable=True)],
)

NAMES = Schema([Field("iata", STRING)], [], [Field("Name", STRING)])
COUNTS = Schema([Field("word", STRING)], [Field("at", LONG)], [Field("n", LONG), Field("last", STRING)])


@pytest.fixture(scope="module")
def shared(
    own_database: tuple[str, ConnectionSupplier], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ConnectionSupplier, Path]:
    """A database and a folder for all tests."""
    return *own_database, tmp_path_factory.mktemp("lake") / "a b [c]%20"


@pytest.fixture(scope="module")
def lake(shared: tuple[str, ConnectionSupplier, Path]) -> Lake:
    """One for the tests that only read it."""
    return flights(*shared)


def flights(dsn: str, supplier: ConnectionSupplier, folder: Path) -> Lake:
    """1,800 rows in four leaves, of which two interleave; some files have references on several leaves."""
    lake = Lake(dsn, supplier, folder, SCHEMA, split_points=["DL", "UA"], name="Flights")
    lake.context.partitions.split(lake.context.partitions.leaves()[1].partition_id, 50, "flight")
    rng = random.Random(1)
    for n in range(3):
        lake.add([row(rng) for _ in range(600)], one_file=n == 1)
    return lake


def row(rng: random.Random) -> dict[str, object]:
    return {
        "Carrier": rng.choice(["AA", "DL", "EV", "UA", "it's", "é", ""]),
        "flight": rng.randrange(-100, 100),
        "code": rng.choice([b"", b"\x00", b"\xff\x00"]),
        "leg": rng.randrange(-3, 3),
        "time": rng.randrange(10),
        "delay": rng.choice([None, 1.5, -2.0]),
        "tags": rng.choice([None, [], ["a", None]]),
    }


STATEMENTS = [
    "select count(*) from Flights",
    "select Carrier, count(*), avg(delay) from Flights group by Carrier order by Carrier",
    "select count(*) from Flights where Carrier = 'DL' and flight between -5 and 60",
    "select count(*) from Flights where Carrier in ('AA', 'UA', 'it''s') or flight = 7",
    "select count(*) from Flights where not (flight > 3) and flight != -5",
    "select count(*) from Flights where flight = -7 or flight = 60 or (flight > 90 and leg < 0)",
    "select count(*) from Flights where 50 <= flight and Carrier >= 'DL' and Carrier < 'F'",
    "select count(*) from Flights where flight not in (1, 2, 3) and leg > 1",
    "select count(*) from Flights where flight in (1, 2, 3, 4, 5, 6, 77, -8, -9)",
    "select count(*) from Flights where flight not in (1, 2, 3, 4, 5, 6, 77, -8, -9)",
    "select count(*) from Flights where leg > 3000000000 or leg > 1.5",
    "select count(*) from Flights where code = '\\xff\\x00'::blob",
    "select count(*) from Flights where Carrier like 'D%' and abs(flight) < 20 and -flight > 3",
    "select count(*) from Flights a join Flights b on a.flight = b.flight where a.Carrier = 'AA'",
    "select count(*) from Flights where flight > (select max(flight) - 9 from Flights where Carrier = 'UA')",
    "select count(*) from Flights f where exists (select 1 from Flights g where g.flight = -f.flight)",
    "select count(*) from (select * from Flights where Carrier = 'AA' limit 10) where flight > -1000",
    "with big as (select * from Flights where flight > 90) select sum(flight) from big",
    "select count(*) from Flights where Carrier = 'AA' and Carrier = 'UA'",
    "select count(*) from Flights where flight > 5 and null",
    "select Carrier, flight from Flights where Carrier > 'E' group by 1, 2 order by 1, 2 limit 7",
    "select count(*) from Flights where true or flight = 3",
    "select count(*) from Flights where (flight = 3) is null or (Carrier = 'AA') = (flight > 0)",
    "select count(*) from Flights where case when flight > 0 then Carrier = 'AA' else leg = 1 end",
    "select Carrier from Flights where flight = 3 union all select Carrier from Flights where leg = 2",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_answers_are_those_of_duckdb(lake: Lake, statement: str) -> None:
    theirs = lake.expect(statement.replace("Flights", "t"))
    ours = tuples(sql({"Flights": lake.context}, statement.replace("'\\xff\\x00'::blob", "X'ff00'")))
    assert sorted(ours) == [pytest.approx(row) for row in sorted(theirs)]


def test_rows_come_in_the_order_that_the_statement_says(lake: Lake) -> None:
    statement = "select flight, time from {} where Carrier >= 'DL' order by flight desc, time limit 50"
    assert tuples(sql({"Flights": lake.context}, statement.format("Flights"))) == lake.expect(
        statement.format("t")
    )


@pytest.mark.parametrize(
    ("condition", "partitions", "files"),
    [
        ("true", 4, 9),
        ("Carrier = 'AA'", 1, 3),
        ("Carrier in ('AA', 'UA')", 2, 5),
        ("Carrier = 'DL' and flight < 0", 1, 3),
        ("Carrier = 'DL' or Carrier = 'EV' and flight < 0", 2, 5),
        ("Carrier between 'DL' and 'E' and flight in (1, 2, 51)", 2, 5),
        ("Carrier = 'DL' or flight = 3", 4, 9),
        ("flight + 1 = 3", 4, 9),
        ("Carrier > 'Z' and Carrier < 'a'", 1, 3),
        ("Carrier = 'AA' and Carrier = 'UA'", 0, 0),
        ("Carrier = 'AA' and flight > 100", 1, 1),
        ("leg > 5", 4, 9),
    ],
)
def test_a_statement_reads_only_what_it_wants(
    lake: Lake, condition: str, partitions: int, files: int
) -> None:
    found = explain_sql({"Flights": lake.context}, f"select * from Flights where {condition}")
    summary = found.get("Flights")
    assert ((summary.partitions, summary.files) if summary else (0, 0)) == (partitions, files)


def test_what_one_use_of_a_table_wants_does_not_hide_rows_from_another(lake: Lake) -> None:
    """A scan in a subquery of an expression is not among the plan's inputs: others must not prune for it."""
    contexts = {"Flights": lake.context}
    text = "select * from Flights where Carrier = 'AA' and flight > (select min(flight) from Flights)"
    assert explain_sql(contexts, text)["Flights"].partitions == 4
    text = "select * from Flights a, Flights b where a.Carrier = 'AA' and b.Carrier = 'UA'"
    assert explain_sql(contexts, text)["Flights"].partitions == 2


def test_tables_are_joined(lake: Lake, shared: tuple[str, ConnectionSupplier, Path]) -> None:
    names = Lake(*shared, NAMES, name="names-of")
    names.add([{"iata": "AA", "Name": "American"}, {"iata": "UA", "Name": "United"}])
    contexts = {"Flights": lake.context, "names-of": names.context, "unused": names.context}
    text = """select Name, count(*) from Flights f join "names-of" n on f.Carrier = n.iata
              where n.iata = 'UA' group by Name"""
    [[count]] = lake.expect("select count(*) from t where Carrier = 'UA'")
    assert tuples(sql(contexts, text)) == [("United", count)]
    assert explain_sql(contexts, text)["Flights"].partitions == 1
    assert set(explain_sql(contexts, text)) == {"Flights", "names-of"}


def test_equal_keys_are_aggregated_and_old_rows_filtered(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    properties = {"aggregate": "sum(n), max(last)", "filter": "age_off(at, 1000000)"}
    lake = Lake(dsn, supplier, tmp_path, COUNTS, split_points=["m"], **properties)
    now = time.time_ns() // 1_000_000
    fresh = [{"word": w, "at": now, "n": 1, "last": w} for w in "abxyz"]
    old = [{"word": w, "at": now - 2_000_000, "n": 100, "last": "old"} for w in "ax"]
    for _ in range(3):
        lake.add(fresh + old)
    contexts = {"t": lake.context}
    assert tuples(sql(contexts, "select word, n from t order by word")) == [(w, 3) for w in "abxyz"]
    assert tuples(sql(contexts, "select sum(n) from t where word > 'm' and n = 3")) == [(9,)]
    assert explain_sql(contexts, "select n from t where word > 'm'")["t"].files == 3


def test_the_schema_is_plain_also_without_rows(lake: Lake) -> None:
    text = "select Carrier || 'x', code, tags, [Carrier], named_struct('a', Carrier) from Flights"
    for condition in ("", " where Carrier = 'nobody'"):
        table = sql({"Flights": lake.context}, text + condition).read_all()
        assert [str(field.type) for field in table.schema] == [
            "string",
            "binary",
            "list<element: string>",
            "list<item: string>" if "item" in str(table.schema) else "list<element: string>",
            "struct<a: string>",
        ]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select * frm Flights", 'SQL: ParserError("Expected: end of statement, found: frm'),
        ("select * from flihgts", "unknown table 'flihgts'; did you mean 'Flights'?"),
        ("select * from '/etc/passwd'", "unknown table '/etc/passwd'"),
        ("select * from 'objects/x.parquet'", "unknown table 'objects/x.parquet'"),
        ("select carrier from Flights", 'No field named carrier. Did you mean \'"Flights"."Carrier"\'?'),
        ("create table x as select 1", "SQL can only read"),
        ("create external table x stored as csv location '/etc/passwd'", "SQL can only read"),
        ("copy (select 1) to 'never.csv'", "SQL can only read"),
        ("copy Flights to 'never.csv'", "SQL can only read"),
        ("drop view Flights", "SQL can only read"),
        ("insert into Flights select * from Flights", "SQL can only read"),
        ("set datafusion.execution.batch_size = 1", "SQL can only read"),
        ("select 1; select 2", "give a single SQL statement"),
        ("", "SQL: No SQL statements"),
        ("select abs(Carrier, 3) from Flights", "SQL: "),
        ("select * from Flights where flight = 'x'", "SQL: Cannot cast string 'x' to value of Int64 type"),
        ("select repeat('x', 400000000)", "SQL: the function repeat is not offered, as its answer can be of"),
        ("select RPAD(Carrier, 2147483647, 'y') from Flights", "SQL: the function rpad is not offered"),
        ("select unnest(generate_series(1, 1000000000))", "SQL: the function generate_series is not offered"),
        ("select * from Flights limit 'x'", "SQL: Expected LIMIT to be an integer or null, but got Utf8"),
    ],
)
def test_a_mistake_is_one_clear_line(lake: Lake, statement: str, message: str) -> None:
    with pytest.raises(InvalidQuery) as error:
        sql({"Flights": lake.context}, statement).read_all()
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not Path("never.csv").exists()


REFUSED = """
explain drop table x
explain insert into Flights select * from Flights
explain analyze copy Flights to 'never.csv'
delete from Flights
update Flights set leg = 2
merge into Flights using Flights b on Flights.leg = b.leg when matched then delete
truncate Flights
create view v as select 1
create table v (a int)
create schema s
create function f(int) returns int return $1
create index i on Flights(leg)
drop function abs
copy Flights to 'never.parquet'
set time zone = 'utc'
reset datafusion.execution.batch_size
begin
commit
rollback
prepare p as select 1
execute p
deallocate p
select * into v from Flights
with x as (insert into Flights values (1) returning a) select * from x
analyze table Flights
vacuum
call f()
load 'x'
attach 'x' as y
grant select on Flights to x
alter table Flights add column b int
unload ('select 1') to 's3://x'
show tables
show all
"""
NO_TABLES = """
select * from read_parquet('/etc/passwd')
select * from read_csv('/etc/passwd')
select * from parquet_metadata('/etc/passwd')
select * from information_schema.tables
select * from "file:///etc/passwd"
select * from 's3://bucket/x.parquet'
select * from 'https://example.com/x.parquet'
select * from other.public.Flights
select * from "dormouse base 0"
select getenv('HOME')
"""


@pytest.mark.parametrize("statement", REFUSED.strip().splitlines())
def test_whatever_does_not_read_is_refused(lake: Lake, statement: str) -> None:
    for ask in (sql, explain_sql):
        with pytest.raises(InvalidQuery, match=r"^SQL can only read: SELECT, WITH") as error:
            ask({"Flights": lake.context}, statement)
        assert len(str(error.value).splitlines()) == 1
    assert not list(Path().glob("never.*"))


@pytest.mark.parametrize("statement", NO_TABLES.strip().splitlines())
def test_nothing_but_the_tables_is_read(lake: Lake, statement: str) -> None:
    with pytest.raises(
        InvalidQuery, match=r"^(SQL: table function|SQL: Invalid function|unknown table)"
    ) as error:
        sql({"Flights": lake.context}, statement)
    assert len(str(error.value).splitlines()) == 1


def test_series_and_descriptions_are_read(lake: Lake) -> None:
    contexts = {"Flights": lake.context}
    assert tuples(sql(contexts, "select value from range(1, 3)")) == [(1,), (2,)]
    text = "select count(*) from generate_series(-2, 2) g join Flights on g.value = Flights.leg"
    assert tuples(sql(contexts, text)) == lake.expect("select count(*) from t where leg between -2 and 2")
    described = tuples(sql(contexts, "describe Flights"))
    assert [name for name, *_ in described] == list(SCHEMA.names)


def test_no_function_is_left_that_makes_a_value_as_large_as_a_number_says(lake: Lake) -> None:
    calls = ["repeat('x', 2)", "lpad('x', 2)", "rpad('x', 2)", "range(2)", "generate_series(2)"]
    calls += [
        f"{kind}_{name}" for kind in ("array", "list") for name in ("repeat(1, 2)", "resize([1], 2, 0)")
    ]
    for call in calls:
        with pytest.raises(InvalidQuery, match=rf"the function {call.partition('(')[0]} is not offered"):
            sql({"Flights": lake.context}, f"select {call}")


def test_what_fails_while_it_runs_is_a_mistake_too(lake: Lake) -> None:
    with pytest.raises(InvalidQuery, match="the query failed: Divide by zero"):
        sql({"Flights": lake.context}, "select 1 / (flight - flight) from Flights").read_all()
    with pytest.raises(InvalidQuery, match="a statement must be a string"):
        sql({"Flights": lake.context}, 3)  # type: ignore[arg-type]


def test_explain_shows_the_pruned_scans(lake: Lake) -> None:
    text = "explain analyze select count(*) from Flights where Carrier = 'UA'"
    (kind, ours), (_, plan) = tuples(sql({"Flights": lake.context}, text))
    size = explain_sql({"Flights": lake.context}, text)["Flights"].byte_count
    assert (kind, str(ours).splitlines()) == (
        "dormouse",
        [
            "table Flights",
            "  partitions: 1 of 4",
            "  files: 3 of 3 (0 pruned by their keys)",
            f"  bytes: {size:,}",
            "  row keys:",
            "    Carrier: 'UA'",
        ],
    )
    assert set(re.findall(r"/(\w+)\.parquet", str(plan))) == set(_names_in_last_leaf(lake))
    assert "pruning_predicate" in str(plan)


def _names_in_last_leaf(lake: Lake) -> list[str]:
    leaf = lake.context.partitions.leaves()[-1]
    return [Path(r.filename).stem for r in lake.context.store.file_references_in([leaf.partition_id])]


def test_constants_need_no_table() -> None:
    assert tuples(sql({}, "select 1 as one, 'x' as x")) == [(1, "x")]
    assert tuples(sql({}, "values (1), (2)")) == [(1,), (2,)]


def test_a_file_that_vanished_is_named(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> None:
    lake = flights(dsn, supplier, tmp_path)
    reader = sql({"Flights": lake.context}, "select count(*) from Flights where Carrier = 'UA'")
    [gone, *_] = lake.context.store.file_references_in([lake.context.partitions.leaves()[-1].partition_id])
    lake.context.objects.delete([gone.filename])
    with pytest.raises(ObjectNotFound, match=re.escape(gone.filename)):
        reader.read_all()


def test_a_damaged_file_is_named(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> None:
    lake = flights(dsn, supplier, tmp_path)
    [name, *_] = {r.filename for r in lake.context.store.file_references()}
    path = lake.context.objects.local_path(name)
    assert path is not None
    path.write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    with pytest.raises(ObjectStoreError, match=re.escape(name)):
        sql({"Flights": lake.context}, "select sum(flight) from Flights").read_all()


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=6), number=st.integers(-(2**63), 2**63 - 1))
def test_literals_of_any_kind_prune_nothing_that_is_wanted(text: str, number: int) -> None:
    ctx = session(None, in_key_order=False)
    schema = Schema([Field("s", STRING), Field("n", LONG)])
    ctx.register_parquet("t", "file:///nowhere", schema=arrow_schema(schema), file_extension="")
    quoted_text = text.replace("'", "''")
    frame = ctx.sql(f"select * from t where s >= '{quoted_text}' and n = {number}")
    [scan] = scans(frame.optimized_logical_plan())
    found = wanted(schema, scan.filters())
    assert holds(found, {"s": text, "n": number})
    assert not holds(found, {"s": text, "n": number - 1 if number else 1})
