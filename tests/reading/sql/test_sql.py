"""SQL over tables with files that the tests write, compared with DuckDB on the same rows."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from query_lake import Lake, explain_sql, sql, tuples

from dormouse.errors import InvalidQuery, ObjectNotFound, ObjectStoreError
from dormouse.postgres import ConnectionSupplier
from dormouse.reading import table_view
from dormouse.reading.sql import views
from tests.support.model import BOOLEAN, BYTES, DOUBLE, INT, LIST, LONG, STRING, Field, Schema
from tests.support.reading import arrow_schema

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
    """Returns the DSN and the connections of a database, and a folder, which all tests share."""
    return *own_database, tmp_path_factory.mktemp("lake") / "a b [c]%20"


@pytest.fixture(scope="module")
def lake(shared: tuple[str, ConnectionSupplier, Path]) -> Lake:
    """Returns the table `Flights`, which all tests of this module read and none changes."""
    return flights(*shared)


def flights(dsn: str, supplier: ConnectionSupplier, folder: Path) -> Lake:
    """Returns a table of 1,800 rows in four leaves, two of which cover the same carriers.

    One file is referenced by several leaves.
    """
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
    ours = tuples(sql({"Flights": lake.context}, statement))
    assert sorted(ours) == [pytest.approx(row) for row in sorted(theirs)]


def test_rows_are_in_the_order_of_the_statement(lake: Lake) -> None:
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
        ("flight + 1 = 3", 3, 7),
        ("Carrier > 'Z' and Carrier < 'a'", 1, 3),
        ("Carrier = 'AA' and Carrier = 'UA'", 0, 0),
        ("Carrier = 'AA' and flight > 100", 1, 1),
        ("leg > 5", 4, 9),
    ],
)
def test_a_statement_reads_only_the_partitions_and_files_that_it_needs(
    lake: Lake, condition: str, partitions: int, files: int
) -> None:
    found = explain_sql({"Flights": lake.context}, f"select * from Flights where {condition}")
    summary = found.get("Flights")
    assert ((summary.partitions, summary.files) if summary else (0, 0)) == (partitions, files)


def test_conditions_on_one_use_of_a_table_do_not_prune_another(lake: Lake) -> None:
    """A statement uses a table twice. The conditions of one use must not restrict the rows of the other."""
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


def test_the_schema_is_the_same_with_and_without_rows(lake: Lake) -> None:
    text = (
        "select Carrier || 'x', code, tags, [Carrier], {'a': [Carrier]}, count(*) over (), map {Carrier: leg}"
    )
    for condition in ("", " where Carrier = 'none'"):
        table = sql({"Flights": lake.context}, f"{text} from Flights{condition}").read_all()
        assert [str(field.type) for field in table.schema] == [
            "string",
            "binary",
            "list<element: string>",
            "list<element: string>",
            "struct<a: list<element: string>>",
            "int64",
            "map<string, int32>",
        ]
    found, table = sql({"Flights": lake.context}, "from Flights").schema, arrow_schema(SCHEMA)
    assert (found.names, found.types) == (table.names, table.types)


@pytest.mark.slow
def test_series_and_descriptions_are_read(lake: Lake) -> None:
    contexts = {"Flights": lake.context}
    assert tuples(sql(contexts, "from range(1, 3)")) == [(1,), (2,)]
    text = "select count(*) from generate_series(-2, 2) g(n) join Flights on n = Flights.leg"
    assert tuples(sql(contexts, text)) == lake.expect("select count(*) from t where leg between -2 and 2")
    for text in ("describe Flights", "show Flights", "from (describe flights)"):
        described = tuples(sql(contexts, text))
        assert [name for name, *_ in described] == list(SCHEMA.names)
    summarized = tuples(sql(contexts, "summarize Flights"))
    assert [(name, rows) for name, *_, rows, _ in summarized] == [(name, 1_800) for name in SCHEMA.names]
    assert tuples(sql({**contexts, "other": lake.context}, "show tables")) == [("Flights",), ("other",)]
    named = {**contexts, "tables": lake.context}
    assert tuples(sql(named, "show tables")) == [("Flights",), ("tables",)]
    assert len(tuples(sql(named, "from tables"))) == 1_800


def test_names_are_found_in_upper_and_lower_case(lake: Lake) -> None:
    contexts = {"Flights": lake.context, "T": lake.context, "t": lake.context}
    [[count]] = lake.expect("select count(*) from t")
    for name in ("flights", "FLIGHTS", '"flights"', "main.Flights", "t", "T", '"T"'):
        assert tuples(sql(contexts, f"select count(CARRIER) from {name}")) == [(count,)]
    with pytest.raises(InvalidQuery, match="cannot tell table 't' from 'T'"):
        sql(contexts, "from t, T")
    with pytest.raises(InvalidQuery, match="cannot tell table 'Xx' from 'xX'"):
        sql({"Xx": lake.context, "xX": lake.context}, "from xx")


def test_a_name_defined_by_the_statement_hides_a_table(lake: Lake) -> None:
    contexts = {"Flights": lake.context}
    assert tuples(sql(contexts, "with Flights as (select 1) from Flights")) == [(1,)]
    assert tuples(sql(contexts, "with Mine as (select 1) from mINE")) == [(1,)]
    [[count]] = lake.expect("select count(*) + 1 from t")
    text = """with x as (select 1 as n)
              select count(*) from (select n from x union all select flight from Flights)"""
    assert tuples(sql(contexts, text)) == [(count,)]


def test_columns_of_one_name_are_numbered(lake: Lake) -> None:
    found = sql({}, "select 1 as i, 2 as i, 3 as i_1, 4 as I, 5 as i").read_all()
    assert found.schema.names == ["i", "i_2", "i_1", "I", "i_3"]
    assert tuples(sql({"Flights": lake.context}, "select leg, leg from Flights limit 0")) == []


def test_a_failure_while_a_statement_runs_is_an_invalid_query(lake: Lake) -> None:
    with pytest.raises(InvalidQuery, match="Could not convert string"):
        sql({"Flights": lake.context}, "select Carrier::int from Flights").read_all()
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
    assert "TABLE_SCAN" in str(plan)


def test_sql_needs_no_datafusion() -> None:
    """The extra `sql` does not install DataFusion."""
    script = (
        "import sys; sys.modules['datafusion'] = None; "
        "import dormouse.reading.sql.statements, dormouse.reading.sql.views"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_constants_need_no_table() -> None:
    assert tuples(sql({}, "select 1 as one, 'x' as x")) == [(1, "x")]
    assert tuples(sql({}, "values (1), (2)")) == [(1,), (2,)]


def test_a_file_that_vanished_is_named(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> None:
    lake = flights(dsn, supplier, tmp_path)
    [gone, *_] = lake.context.store.file_references_in([lake.context.partitions.leaves()[-1].partition_id])
    lake.context.objects.delete([gone.filename])
    with pytest.raises(ObjectNotFound, match=re.escape(gone.filename)):
        sql({"Flights": lake.context}, "select count(leg) from Flights where Carrier = 'UA'")


def test_a_damaged_file_is_named(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> None:
    lake = flights(dsn, supplier, tmp_path)
    [name, *_] = {r.filename for r in lake.context.store.file_references()}
    path = lake.context.objects.local_path(name)
    assert path is not None
    path.write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    with pytest.raises(ObjectStoreError, match=re.escape(name)):
        sql({"Flights": lake.context}, "select sum(flight) from Flights").read_all()


@pytest.mark.parametrize(
    "condition",
    [
        "s is distinct from 'y' or s <= 'B'",
        "s is not distinct from null or s <= 'B'",
        "b is not false or b >= false",
        "not (b is /* or is it? */ true) or b > true",
        "(n is distinct from 1 or n < 0) and k < 9",
        "not (s = 'y') is true or s < 'B'",
    ],
)
def test_a_file_of_nulls_is_read_if_nulls_can_meet_the_condition(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, condition: str
) -> None:
    """DuckDB would wrongly conclude from the file's statistics that no row meets the condition."""
    values = [Field("s", STRING, True), Field("b", BOOLEAN, True), Field("n", LONG, True)]
    lake = Lake(dsn, supplier, tmp_path, Schema([Field("k", LONG)], [], values))
    lake.add([{"k": k, "s": None, "b": None, "n": None} for k in range(3)])
    lake.add([{"k": 3, "s": "x", "b": True, "n": 2}])
    found = tuples(sql({"t": lake.context}, f"select k from t where {condition} order by k"))
    assert found == lake.expect(f"select k from t where {condition} order by k")
    with views.opened(lake.context.objects, {"t": lake.context}, {}) as db:
        assert db.execute(f"select k from t where {condition} order by k").fetchall() == found


@pytest.mark.few(2)
@pytest.mark.parametrize("column", ["k", "x"])
@pytest.mark.parametrize("join", ["full join", "natural  FULL /* both */ outer join"])
def test_a_full_join_with_a_limit_loses_no_skipped_rows(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, column: str, join: str
) -> None:
    """DuckDB wrongly skips row groups of the left side, and returns NULL in place of their values."""
    schema = Schema([Field("k", LONG)], [], [Field("x", DOUBLE)])
    lake = Lake(dsn, supplier, tmp_path, schema, name="t")
    for first in range(0, 25_000, 5_000):
        lake.add([{"k": k, "x": float(k)} for k in range(first, first + 5_000)])
    on = "" if join.startswith("natural") else f"on l.{column} = r.{column}"
    statement = f"select l.{column} from t l {join} t r {on} order by 1 nulls first limit 3"
    assert [int(row[0]) for row in tuples(sql({"t": lake.context}, statement))] == [0, 1, 2]


@pytest.mark.few(2)
@pytest.mark.parametrize("column", ["k", "x"])
@pytest.mark.parametrize(
    "join", ["small s left join t on s.k = t.k", "t right  OUTER join small s using (k)"]
)
def test_an_outer_join_with_a_limit_loses_no_skipped_rows(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, column: str, join: str
) -> None:
    """DuckDB reads the larger side last, and must not skip row groups that match rows of the smaller side."""
    schema = Schema([Field("k", LONG)], [], [Field("x", DOUBLE)])
    large, small = (Lake(dsn, supplier, tmp_path, schema, name=name) for name in ("t", "small"))
    for first in range(0, 30_000, 5_000):
        large.add([{"k": k, "x": float(k)} for k in range(first, first + 5_000)])
    small.add([{"k": k, "x": float(k)} for k in range(15_000, 25_000)])
    tables = {"t": large.context, "small": small.context}
    statement = f"select t.{column} from {join} order by t.{column} nulls first limit 3"
    with views.opened(large.context.objects, tables, {}) as db:
        for rows in (tuples(sql(tables, statement)), db.execute(statement).fetchall()):
            assert [row[0] for row in rows] == [15_000, 15_001, 15_002]


def test_a_leaf_that_reaches_beyond_a_page_of_a_plan_is_read_once(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root was split by the second key, and one half by the first key.

    So the other half, a leaf, covers all values of the first key.
    """
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 1)
    schema = Schema([Field("k", LONG), Field("j", LONG)])
    lake = Lake(dsn, supplier, tmp_path, schema, name="t")
    left, _ = lake.context.partitions.split("root", 5, "j")
    lake.context.partitions.split(left.partition_id, 10, "k")
    for one_file in (False, True):
        lake.add([{"k": k, "j": j} for k in range(20) for j in range(10)], one_file=one_file)
    for limit in (1, 150, 399, 400, 1_000):
        rows = tuples(sql({"t": lake.context}, f"select k, j from t limit {limit}"))
        assert (len(rows), max(Counter(rows).values()) <= 2) == (min(limit, 400), True)
        ordered = tuples(sql({"t": lake.context}, f"select k, j from t order by k, j limit {limit}"))
        assert ordered == sorted([(k, j) for k in range(20) for j in range(10)] * 2)[:limit]
