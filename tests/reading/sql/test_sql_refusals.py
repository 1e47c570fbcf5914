"""Statements that are refused in one clear line: faulty ones, and those that do more than read tables."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path

import duckdb
import numpy as np
import pytest
from query_lake import Lake, explain_sql, sql, tuples

from dormouse.errors import InvalidQuery
from dormouse.postgres import ConnectionSupplier
from tests.support.model import DOUBLE, LONG, STRING, Field, Schema

SCHEMA = Schema(
    [Field("Carrier", STRING), Field("flight", LONG)],
    [],
    [Field("leg", LONG), Field("delay", DOUBLE, nullable=True)],
)


@pytest.fixture(scope="module")
def lake(own_database: tuple[str, ConnectionSupplier], tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Returns a table of a few rows."""
    lake = Lake(*own_database, tmp_path_factory.mktemp("lake"), SCHEMA, name="Flights")
    lake.add([{"Carrier": "AA", "flight": n, "leg": 1, "delay": None} for n in range(3)])
    return lake


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select * frm Flights", 'syntax error at or near "Flights"'),
        ("select * from flihgts", "unknown table 'flihgts'; did you mean 'Flights'?"),
        ("select * from '/etc/passwd'", "unknown table '/etc/passwd'"),
        ("select * from 'objects/x.parquet'", "unknown table 'objects/x.parquet'"),
        ("select carier from Flights", 'Referenced column "carier" not found in FROM clause!; Candidate'),
        (
            "select tolower(Carrier) from Flights",
            "unknown function 'tolower'; did you mean 'lower'?",
        ),
        ("create table x as select 1", "SQL can only read"),
        ("copy (select 1) to 'never.csv'", "SQL can only read"),
        ("copy Flights to 'never.csv'", "SQL can only read"),
        ("drop view Flights", "SQL can only read"),
        ("insert into Flights select * from Flights", "SQL can only read"),
        ("set threads = 1", "SQL can only read"),
        ("select 1; select 2", "only one statement can be run at a time, not 2"),
        ("", "the statement is empty"),
        ("-- nothing", "the statement is empty"),
        ("select abs(Carrier, 3) from Flights", "No function matches the given name and argument types"),
        ("select * from Flights where flight = 'x'", "Could not convert string 'x' to INT64"),
        ("select * from Flights limit 'x'", "Could not convert string 'x' to INT64"),
        ("pivot Flights on Carrier using count(*)", "PIVOT must name the values that become columns"),
        ("pivot Flights on Carrier, leg using count(*)", "PIVOT must name the values that become columns"),
        ("explain\nselect * frm Flights", 'syntax error at or near "Flights" (line 2, column 14)'),
        ("drop table Flights", "EXPLAIN of them; not DROP"),
        ("select (select flight from Flights)", "More than one row returned by a subquery"),
        ("show databases", "use SHOW TABLES, or SHOW"),
        ("select * from range(2) at (version => 1)", ""),
        ("select '\x00'", "neither NUL"),
        ("select '\ud800'", "neither NUL"),
        ("select " + "(" * 100_000, "memory exhausted"),
        ("select " + "1 + " * 5_000 + "1", "Max expression depth"),
        ("select 1" + " " * (1 << 20), "the statement has 1,048,584 characters, more than"),
    ],
)
def test_a_mistake_is_one_clear_line(lake: Lake, statement: str, message: str) -> None:
    with pytest.raises(InvalidQuery) as error:
        sql({"Flights": lake.context}, statement).read_all()
    assert message in str(error.value)
    assert "SET " not in str(error.value)  # no statement can change settings
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
create function f(a) as a + 1
create secret (type s3)
create index i on Flights(leg)
drop function abs
copy Flights to 'never.parquet'
set time zone 'utc'
reset threads
pragma version
pragma table_info('Flights')
begin
commit
rollback
prepare p as select 1
execute p
deallocate p
analyze Flights
vacuum
checkpoint
call range(3)
load 'x'
install httpfs
attach 'x' as y
detach x
use memory
export database 'never'
alter table Flights add column b int
set variable x = 1
"""
NO_TABLES = """
select * from flights where "Carrier" < system.main.now()::varchar
select * from read_parquet('/etc/passwd')
select * from read_csv('/etc/passwd')
select * from read_text('/etc/passwd')
select * from glob('/etc/*')
select * from parquet_metadata('/etc/passwd')
select * from query('select 1')
select * from query_table('Flights')
select * from duckdb_settings()
select * from duckdb_secrets()
select * from duckdb_views()
select * from json_execute_serialized_sql('{}')
select * from seq_scan('x')
select * from arrow_scan(1, 2, 3)
select (select content from read_text('/etc/passwd'))
select 1 where 1 in (select 1 from read_blob('/etc/passwd'))
with x as (from read_text('/etc/passwd')) from x
summarize (from read_text('/etc/passwd'))
describe (from read_text('/etc/passwd'))
explain from read_text('/etc/passwd')
explain analyze from read_text('/etc/passwd')
explain (format json) from read_text('/etc/passwd')
select * from information_schema.tables
select * from pg_catalog.pg_class
select * from memory.information_schema.tables
select * from duckdb_tables
select * from "file:///etc/passwd"
select * from 's3://bucket/x.parquet'
select * from 'https://example.com/x.parquet'
select * from other.public.Flights
from '/etc/passwd' union all (with "/etc/passwd" as (select 1) from "/etc/passwd")
from "a.parquet" union all (with "a.parquet" as (select 1) from "a.parquet")
from duckdb_views union all (with duckdb_views as (select 1) from duckdb_views)
from PG_SETTINGS union all (with pg_settings as (select 1) from pg_settings)
from sqlite_master union all (with sqlite_master as (select 1) from sqlite_master)
from pragma_database_list union all (with pragma_database_list as (select 1) from pragma_database_list)
select current_setting('temp_directory')
select "Current_Setting"('threads')
select json_serialize_plan('from read_parquet(''x.parquet'')', optimize := true)
select write_log('x')
describe '/etc/passwd'
summarize 'x.parquet'
from a.parquet
from Flights, read_text('/etc/passwd')
from Flights semi join read_text('/etc/passwd') on true
pivot read_text('/etc/passwd') on filename in ('a')
select getenv('HOME')
select pg_get_viewdef(22001)
select "PG_Get_ViewDef"(22001) from Flights
select pg_catalog.pg_get_viewdef(22001)
select format_type(1, 1)
select getvariable('x')
select current_query()
select in_search_path('temp', 'main')
select txid_current()
select json_serialize_sql('select 1')
select json_deserialize_sql('{}')
select nextval('s')
select setseed(0.5)
select sleep_ms(1)
select stats(leg) from Flights
select a_function_of_tomorrow(1)
from histogram(Flights, leg)
from (show databases), (show tables)
from (show variables), (show tables)
from (show all tables), duckdb_views
from a_function_of_tomorrow(1)
"""
CALLED = "current_setting('threads')"
"""An expression that is refused anywhere in a statement."""
PLACES = """
select [x for x in [1] if x::varchar > {}]
select list_transform([1], lambda x: {})
select columns(c -> c < {}) from Flights
select * replace ({} as leg) from Flights
select leg.concat({}) from Flights
select sum(leg order by {}) filter (where {} is null) from Flights
select sum(leg) over w from Flights window w as (partition by {} order by {})
select sum(leg) over (order by leg rows between {}::int preceding and current row) from Flights
select distinct on ({}) leg from Flights
select leg from Flights group by grouping sets ((leg, {}), ())
select leg from Flights group by leg having {} is null
select leg from Flights qualify row_number() over (order by {}) = 1
select leg from Flights order by {} limit 1
select leg from Flights limit {}::int offset {}::int
from Flights a join Flights b on a.leg = b.leg and {} is null
from Flights a asof join Flights b on a.leg >= length({})
from Flights a positional join (select {}) b
from Flights, lateral (select {})
from range({}::int)
from Flights at (version => {})
from (values ({}))
values ({})
select (select {}), exists (select {}), 1 in (select length({}))
select case when {} is null then {} else {} end
select {'a': {}}, map {'a': {}}, [{}], ({}, 1), struct_pack(a := {})
select [1, 2][{}::int:], {}::int, try({}), try_cast({} as int), - length({}), not {} is null
select interval ({}::int) days, {} at time zone 'utc', {} collate nocase, {} between 'a' and 'b'
select x: {}
pivot Flights on leg in (1, 2) using max({})
unpivot Flights on leg, {}
with x as materialized (select {}) from x
with recursive r(n) using key (n) as (select 1 union select n + length({}) from r) from r
select 1 union all by name select {}
summarize select {}
describe select {}
explain select {}
explain (analyze, format json) select {}
"""


INSTEAD = {
    "insert into Flights values ('AA', 1, 1, 1)": "not INSERT; instance.execute",
    "with x as (from Flights) insert into Flights from x": "not INSERT; instance.execute",
    "explain insert into Flights from Flights": "not INSERT; instance.execute",
    "update Flights set leg = 1": "not UPDATE; instance.execute",
    "merge into Flights using Flights b on true when matched then delete": "not MERGE; instance.execute",
    "delete from Flights": "not DELETE; instance.execute",
    "with x as (select 'update') delete from Flights": "not DELETE; instance.execute",
    "truncate Flights": "not TRUNCATE; instance.execute",
    "truncate table Flights": "not TRUNCATE; instance.execute",
    "create table v as from Flights": "not CREATE; instance.create_table",
    "drop table Flights": "not DROP; 'dormouse table drop'",
    "alter table Flights add column b int": "not ALTER; table.add_column",
    "copy Flights to 'never.csv'": "not COPY; 'dormouse sql --output FILE'",
    "set threads = 1": "not SET; instance.duckdb()",
    "attach 'x' as y": "not ATTACH; instance.duckdb()",
    "from Flights at (timestamp => now())": "give the moment beside the statement, by as_of or --as-of",
    "from Flights join (from Flights at (version => 1)) using (leg)": "as_of",
    "from information_schema.columns": "SHOW TABLES lists the tables, DESCRIBE their columns",
    "from pg_catalog.pg_class": "SHOW TABLES lists the tables",
    "from duckdb_tables()": "SHOW TABLES lists the tables",
    "from duckdb_columns()": "DESCRIBE their columns",
    "from histogram(Flights, leg)": "SELECT histogram(column) FROM table",
    "from histogram_values(Flights, leg)": "SELECT histogram(column) FROM table",
    "from summary(Flights)": "SUMMARIZE table",
    "from (pivot Flights on leg using max(leg)) a, (pivot Flights on Carrier using max(leg)) b": "PIVOT must",
    "with a as (pivot Flights on leg using max(leg)), b as (pivot a on leg using sum(1)) from b": "PIVOT",
}


@pytest.mark.parametrize("statement", INSTEAD)
def test_a_refusal_says_what_to_do_instead(lake: Lake, statement: str) -> None:
    for ask in (sql, explain_sql):
        with pytest.raises(InvalidQuery) as error:
            ask({"Flights": lake.context}, statement)
        assert INSTEAD[statement] in str(error.value)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("statement", REFUSED.strip().splitlines())
def test_every_statement_that_does_not_only_read_is_refused(lake: Lake, statement: str) -> None:
    for ask in (sql, explain_sql):
        with pytest.raises(InvalidQuery, match=r"^SQL can only read|^syntax error|^only one") as error:
            ask({"Flights": lake.context}, statement)
        assert len(str(error.value).splitlines()) == 1
    assert not list(Path().glob("never.*"))


@pytest.mark.parametrize("statement", NO_TABLES.strip().splitlines())
def test_statements_that_read_other_things_than_tables_are_refused(lake: Lake, statement: str) -> None:
    with pytest.raises(
        InvalidQuery,
        match=r"^(SQL reads tables only|there is no schema|unknown table|unknown function)",
    ) as error:
        sql({"Flights": lake.context}, statement)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("place", PLACES.strip().splitlines())
def test_a_refused_function_is_found_anywhere_in_a_statement(lake: Lake, place: str) -> None:
    with pytest.raises(InvalidQuery, match=r"^SQL reads tables only, not current_setting\(…\): it tells of"):
        sql({"Flights": lake.context}, place.replace("{}", CALLED))


def test_duckdbs_own_views_cannot_be_named(lake: Lake) -> None:
    with duckdb.connect() as conn:
        views = conn.execute("from duckdb_views() select view_name where schema_name <> 'information_schema'")
        names = [name for (name,) in views.fetchall()]
    assert names
    for name in names:
        with pytest.raises(InvalidQuery, match=f"unknown table '{name}'"):
            sql({"Flights": lake.context}, f"select (with {name} as (select 1) from {name}) from {name}")


@pytest.mark.parametrize(
    ("statement", "parameters", "answer"),
    [
        ("select $1 + $2", [1, 2], [(3,)]),
        ("select ? || ?", ["a'", "b"], [("a'b",)]),
        ("select $a, $b", {"a": None, "b": b"\x00"}, [(None, b"\x00")]),
        ("select count(*) from Flights where Carrier = $1 and flight >= $2", ["nobody", 3], [(0,)]),
        ("select list_sum($1)", [[1, 2, 3]], [(6,)]),
        ("select $1 + 1, list_sum($2)", [np.int64(3), np.array([1, 2])], [(4, 3)]),
        ("select $1 + $2", [date(2024, 2, 28), timedelta(days=2)], [(datetime(2024, 3, 1),)]),
        ("select count(*) > 0 from Flights where Carrier in $1", ["AA, DL and UA"], [(True,)]),
    ],
)
def test_parameters_are_values(
    lake: Lake, statement: str, parameters: object, answer: list[tuple[object, ...]]
) -> None:
    assert tuples(sql({"Flights": lake.context}, statement, parameters)) == answer


@pytest.mark.parametrize(
    ("statement", "parameters", "message"),
    [
        ("select $1 + $2", [1], "2"),
        ("select $1", [1, 2], "2"),
        ("select $1", None, "1"),
        ("select $a", {"b": 1}, "a"),
        ("select 1", [1], "1"),
        (
            "select 1",
            [1] * 10_001,
            "a statement can have 10,000 parameters, not 10,001: send several statements",
        ),
        ("select 1", {f"a{n}": n for n in range(10_001)}, "a statement can have 10,000 parameters"),
        ("select $1", "text", "parameters must be a list"),
        ("select $1", [object()], "parameter $1 is <object object"),
        ("select $1", ["a\0b"], "parameter $1 must have no NUL"),
        ("select $a", {"a b": 1}, "'a b' cannot be a parameter's name"),
        ("select $a", {"a": 1, "b": 3, "A": 2}, "parameters 'a' and 'A' differ in upper and lower case only"),
        ("select count(*) from Flights where flight = $1", ["x"], "Could not convert string 'x' to INT64"),
    ],
)
def test_parameters_that_do_not_fit_are_one_clear_line(
    lake: Lake, statement: str, parameters: object, message: str
) -> None:
    with pytest.raises(InvalidQuery) as error:
        sql({"Flights": lake.context}, statement, parameters).read_all()
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
