"""Statements that a user of DuckDB or PostgreSQL tries first, in Python, over HTTP and on the command line.

Each gets DuckDB's own answer, or one line that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import httpx
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery
from tests.served import service
from tests.serving import ARROW

FLIGHTS = pa.table(
    {"carrier": ["AA", "AA", "DL", "UA"], "n": [1, 2, 3, 4], "delay": pa.array([1.5, None, -2.0, 4.0])}
)
NAMES = pa.table({"carrier": ["AA", "DL"], "name": ["American", "Delta"]})
ANSWERED = """
from flights
from flights select carrier where n > 2
values (1, 'a'), (2, 'b')
table flights
select 1;
select 1; -- done
/* a */ select /* b; c */ 1 -- d
summarize flights
describe select carrier, n + 1 as m from flights
select column_name from (describe flights)
with recursive r(i) as (select 1 union all select i + 1 from r where i < 5) select * from r
with recursive r(i) using key (i) as (select 1 union select i + 1 from r where i < 5) select * from r
with f as materialized (select * from flights) select count(*) as n from f
pivot flights on carrier in ('AA', 'DL') using count(*)
from flights pivot (count(*) for carrier in ('AA', 'DL'))
unpivot (select carrier, n, delay from flights) on n, delay into name k value v
select carrier, n from flights qualify row_number() over (partition by carrier order by n) = 1
select f.n, g.n as m from flights f asof join flights g on f.carrier = g.carrier and f.n >= g.n
select count(*) as n from flights using sample 100%
select count(*) as n from flights tablesample reservoir(2)
select f.carrier, m.name from (from flights limit 2) f positional join (from names) m
select * from names, lateral (select count(*) c from flights f where f.carrier = names.carrier)
select [x * 2 for x in [1, 2, 3] if x > 1] as l
select * exclude (delay) from flights
select * replace (n + 1 as n) from flights
select * rename (n as m) from flights
select columns(*) from names
select min(columns('n|d.*')) from flights
select list_transform([1, 2], lambda x: x + 1) as l
select carrier.upper().lower() as c from flights
select 'a' || 'b' a, 'abc' ^@ 'a' b, 'abc' ~ 'a.*' c, 'abc' ~~ 'a%' d, 'abc' glob 'a*' e
select levenshtein('a', 'b') a, strip_accents('é') b, format('{} {}', 1, 2) c, printf('%d', 1) d
select ord('a') a, lpad('a', 3, 'b') b, to_base64('a'::blob) c, md5('a') d, "left"('abc', 2) e
select histogram(n) as h from flights
select * from range(3)
select unnest([1, 2]) as c, unnest({'a': 1, 'b': 2})
select carrier, count(*) as n from flights group by all order by all
select carrier, n, count(*) as c from flights group by grouping sets ((carrier), (n), ())
select carrier, count(*) as c from flights group by rollup (carrier)
select distinct on (carrier) carrier, n from flights order by carrier, n
select n from flights union by name select n, carrier from flights
select * from flights semi join names using (carrier)
select * from flights natural join names
select count(n) over w as s from flights window w as (partition by carrier order by n)
select arg_max(carrier, n) a, median(n) b, string_agg(carrier, ',' order by n) c from flights
select * from flights order by n fetch first 2 rows only
select n::varchar a, try_cast('a' as int) b from flights
"""
REFUSED = {
    "create table x as select 1": "not CREATE; instance.create_table",
    "create macro f(a) as a + 1": "not CREATE; instance.create_table",
    "copy flights to 'never.parquet'": "not COPY; 'dormouse sql --output FILE'",
    "truncate table flights": "not TRUNCATE; instance.execute",
    "merge into flights using names b on flights.carrier = b.carrier when matched then delete": "not MERGE",
    "update flights set n = 2 from names where names.carrier = flights.carrier": "instance.execute",
    "insert into flights values ('x', 1, null) on conflict do nothing": "not INSERT; instance.execute",
    "insert into flights valus ('x'": "not INSERT; instance.execute",
    "upsert into flights values ('x')": "not UPSERT; it is INSERT OR REPLACE",
    "replace into flights values ('x')": "not REPLACE; it is INSERT OR REPLACE",
    "drop table if exists flights cascade": "not DROP; 'dormouse table drop'",
    "alter table flights rename to f": "not ALTER; table.add_column",
    "begin transaction": "not BEGIN; each statement reads one moment",
    "commit": "not COMMIT; each statement reads one moment",
    "savepoint a": "not SAVEPOINT; each statement reads one moment",
    "lock table flights": "not LOCK; each statement reads one moment",
    "declare c cursor for select 1": "not DECLARE; each statement reads one moment",
    "vacuum full flights": "not VACUUM; 'dormouse maintain'",
    "force checkpoint": "not FORCE; 'dormouse maintain'",
    "set memory_limit = '1GB'": "not SET; instance.duckdb()",
    "reset memory_limit": "not RESET; instance.duckdb()",
    "prepare p as select $1": "not PREPARE; give the values of $1 or $name beside a statement",
    "execute p(1)": "not EXECUTE; give the values of $1 or $name beside a statement",
    "grant select on flights to public": "not GRANT; roles of PostgreSQL",
    "pragma show_tables": "not PRAGMA; SHOW TABLES lists the tables",
    "attach 'x.db' as y": "not ATTACH; instance.duckdb()",
    "call pragma_version()": "not CALL; instance.duckdb()",
    "load httpfs": "not LOAD; instance.duckdb()",
    "use main": "not USE; instance.duckdb()",
    "explain insert into flights values (1)": "not INSERT; instance.execute",
    "select 1; select 2": "not 2; send each by itself",
    "pivot flights on carrier using count(*)": "PIVOT … ON column IN (…)",
    "select * from flights at (timestamp => now())": "as_of or --as-of",
    "select * from flights at (version => 1)": "as_of or --as-of",
    "select * from flights for system_time as of now()": "as_of or --as-of",
    "select * from flights for update": "none is locked",
    "select carrier into x from flights": "instance.create_table",
    "with f as (insert into flights values ('x') returning *) select * from f": "instance.execute",
    "select * from histogram(flights, carrier)": "SELECT histogram(column) FROM table",
    "select table_name from information_schema.tables": "SHOW TABLES lists the tables",
    "show create table flights": "DESCRIBE table gives its columns",
    "show databases": "use SHOW TABLES, or SHOW",
    "select * from memory.main.flights": "use the names of tables and functions alone",
    "select * from public.flights": "use the names of tables and functions alone",
    "select :a": "a parameter is written $name",
    "select $1": "the statement has 1 parameter, but 0 values were given",
    "\\d flights": "SHOW TABLES lists the tables",
    ".tables": "SHOW TABLES lists the tables",
    "'": "unterminated quoted string",
    "select 'a": "unterminated quoted string",
    "/* a": "unterminated /* comment",
}


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    keys = [dm.Field("carrier", dm.STRING)]
    delay = dm.Field("delay", dm.DOUBLE, nullable=True)
    flights = module_instance.create_table(
        "flights", dm.Schema([*keys, dm.Field("n", dm.LONG)], values=[delay])
    )
    flights.ingest(FLIGHTS)
    module_instance.create_table("names", dm.Schema(keys, values=[dm.Field("name", dm.STRING)])).ingest(NAMES)
    return module_instance


@pytest.fixture(scope="module")
def url(instance: dm.Instance) -> Iterator[str]:
    with service(instance) as url:
        yield url


@pytest.mark.slow
def test_statements_that_read_have_duckdbs_answer(instance: dm.Instance, url: str) -> None:
    with duckdb.connect() as plain, httpx.Client(base_url=url) as client:
        plain.register("flights_", FLIGHTS)
        plain.register("names_", NAMES)
        plain.execute("create table flights as from flights_; create table names as from names_")
        for statement in ANSWERED.strip().splitlines():
            expected = plain.execute(statement).to_arrow_table().to_pylist()
            found = instance.sql(statement).read_all()
            # catalog numbers, and the order of unordered rows, differ
            assert sorted(map(str, found.to_pylist())) == sorted(map(str, expected)), statement
            answer = client.post("/v1/sql", json={"statement": statement}, headers={"accept": ARROW})
            assert answer.status_code == 200, (statement, answer.text)
            served = pa.ipc.open_stream(answer.content).read_all()
            assert sorted(map(str, served.to_pylist())) == sorted(map(str, expected)), statement


@pytest.mark.slow
def test_statements_that_do_not_read_are_refused_with_an_alternative(instance: dm.Instance, url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for statement, message in REFUSED.items():
            with pytest.raises(InvalidQuery) as error:
                instance.sql(statement)
            said = str(error.value)
            assert message in said, (statement, said)
            assert len(said.splitlines()) == 1, statement
            answer = client.post("/v1/sql", json={"statement": statement})
            assert (answer.status_code, answer.json()["detail"]) == (400, said), statement
    assert not Path("never.parquet").exists()


@pytest.mark.slow
def test_the_command_line_shows_a_refusal_in_one_line(
    dsn: str, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    on = ("--dsn", dsn, "--objects", (tmp_path / "objects").as_uri())
    dm.connect(dsn, on[-1]).close()
    for statement in ("begin", "explain insert into flights values (1)", "'"):
        code, out, said = cli("sql", statement, *on)
        assert (code, out, len(said.splitlines())) == (2, "", 1), said
        assert REFUSED.get(statement, "not BEGIN; each statement") in said
