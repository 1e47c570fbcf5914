"""Times, dates, decimals, floats and structs as keys and values, compared with DuckDB in every reader."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.sources.infer import schema_like
from tests.serving import ARROW as ARROW_STREAM
from tests.serving import CSV, JSON_LINES, http_post, serving

ROWS = 2_000
FIRST = datetime(2020, 1, 1, tzinfo=UTC)
STRUCT = dm.STRUCT([dm.Field("x", dm.DOUBLE, True), dm.Field("l", dm.LIST(dm.DATE), True)])
SCHEMA = dm.Schema(
    row_keys=[dm.Field("t", dm.TIMESTAMP), dm.Field("d", dm.DATE)],
    sort_keys=[dm.Field("s", dm.DATE)],
    values=[
        dm.Field("f", dm.FLOAT, nullable=True),
        dm.Field("n", dm.DECIMAL(15, 2), nullable=True),
        dm.Field(
            "st", dm.STRUCT([dm.Field("x", dm.DOUBLE, True), dm.Field("l", dm.LIST(dm.DATE), True)]), True
        ),
        dm.Field("day", dm.DATE, nullable=True),
    ],
)
ARROW = pa.schema(
    [
        ("t", pa.timestamp("us", "UTC")), ("d", pa.date32()), ("s", pa.date32()), ("f", pa.float32()),
        ("n", pa.decimal128(15, 2)), ("st", pa.struct([("x", pa.float64()), ("l", pa.list_(pa.date32()))])),
        ("day", pa.date32()),
    ]
)  # fmt: skip


def _row(draw: random.Random, number: int) -> dict[str, Any]:
    nan, struct = math.nan, {"x": draw.choice([None, math.nan, 1.0 * number]), "l": [date(2020, 1, 1), None]}
    return {
        "t": FIRST + timedelta(minutes=draw.randrange(-(10**7), 10**7), microseconds=draw.randrange(10**6)),
        "d": FIRST.date() + timedelta(days=draw.randrange(-9_000, 9_000)),
        "s": date(2000, 1, 1) + timedelta(days=draw.randrange(100)),
        "f": draw.choice([None, 1.5, -0.0, nan, math.inf, draw.randrange(100) / 4]),
        "n": draw.choice([None, Decimal(draw.randrange(10**6)) / 100]),
        "st": draw.choice([None, struct]),
        "day": draw.choice([None, date(1999, 12, 31) + timedelta(days=number)]),
    }


@pytest.fixture(scope="module")
def data() -> pa.Table:
    draw = random.Random(1)
    return pa.Table.from_pylist([_row(draw, n) for n in range(ROWS)], schema=ARROW)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dm.Instance]:
    with dm.local(tmp_path_factory.mktemp("types") / "lake") as instance:
        yield instance


@pytest.fixture(scope="module")
def table(lake: dm.Instance, data: pa.Table) -> dm.Table:
    """Returns a table with several files in each leaf. Some leaves were divided at a time or at the
    median.
    """
    table = lake.create_table("t", SCHEMA, split_points=[datetime(2020, 1, 1), FIRST.replace(year=2030)])
    for start in range(0, ROWS, ROWS // 4):
        table.ingest(data.slice(start, ROWS // 4))
    table.set_properties(split_threshold_rows=400, split_min_rows=50)
    assert table.split().partitions_split
    return table


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    return [repr(row) for row in sorted(rows, key=lambda row: (row["t"], row["d"], row["s"], repr(row)))]


def _meets(row: dict[str, Any], name: str, wanted: Any) -> bool:
    found = row[name]
    if found is None or wanted is None:
        return found is wanted
    if isinstance(wanted, dm.Range):
        low, high = (_aware(end) for end in (wanted.min, wanted.max))
        is_nan = isinstance(found, float) and math.isnan(found)
        if is_nan:
            return high is None  # NaN is the largest value
        return (low is None or found >= low) and (high is None or found < high)
    return found == wanted or (found != found and wanted != wanted)


def _count(table: dm.Table) -> int:
    return int(table.query(columns=["t"]).read_all().num_rows)


def _aware(end: Any) -> Any:
    return end.replace(tzinfo=UTC) if isinstance(end, datetime) and end.tzinfo is None else end


WHERES: list[dict[str, Any]] = [
    {"t": dm.Range(datetime(2020, 6, 1), datetime(2029, 6, 1, tzinfo=timezone(timedelta(hours=5))))},
    {"d": dm.Range(date(2000, 1, 1), date(2010, 1, 1)), "t": dm.Range(FIRST, None)},
    {"n": dm.Range(Decimal("10"), Decimal("2000.50"))},
    {"f": dm.Range(2.0, None)},
    {"f": math.nan},
    {"f": [-0.0, 1.5]},
    {"day": [date(2000, 1, 1), None]},
    {"s": date(2000, 1, 2)},
]


@pytest.mark.slow
def test_all_rows_come_back_in_key_order(table: dm.Table, data: pa.Table) -> None:
    found = table.query().read_all()
    keys = [(row["t"], row["d"], row["s"]) for row in found.to_pylist()]
    assert keys == sorted(keys)
    assert _sorted(found.to_pylist()) == _sorted(data.to_pylist())


@pytest.mark.parametrize("where", WHERES, ids=repr)
def test_conditions_find_their_rows(table: dm.Table, data: pa.Table, where: dict[str, Any]) -> None:
    wanted = [
        row
        for row in data.to_pylist()
        if all(
            any(_meets(row, name, item) for item in (items if isinstance(items, list) else [items]))
            for name, items in where.items()
        )
    ]
    assert wanted
    assert _sorted(table.query(where=where).read_all().to_pylist()) == _sorted(wanted)


STATEMENTS = [
    "select count(*), sum(n), min(f), max(f), max(day), min(t) from t",
    "select count(*) from t where t >= timestamptz '2020-06-01' and d < date '2015-01-01'",
    "select count(*) from t where t between '2001-01-01' and '2011-01-01'",
    "select count(*) from t where st.x > 100",
    "select f, count(*) from t group by 1 order by 1",
    "select count(*) from t where f > 3",
    "select d, count(*) from t where d in (date '2020-01-01', date '2019-05-05') group by 1 order by 1",
    "select count(*) from t where n between 5 and 100.5",
    "select count(*) from t where t::date = date '2020-03-03'",
    "select count(*) from t where t = 'infinity' or d > 'infinity'",
    "select count(*) from t where d > timestamp '2020-01-01 12:00'",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_sql_answers_are_those_of_duckdb(table: dm.Table, data: pa.Table, statement: str) -> None:
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.register("rows", data)
        connection.execute("create table t as from rows")
        wanted = connection.execute(statement).to_arrow_table().to_pylist()
    assert repr(table.sql(statement).read_all().to_pylist()) == repr(wanted)


def test_ranges_of_times_prune_files(table: dm.Table) -> None:
    day = table.explain({"t": dm.Range(datetime(2020, 6, 1), datetime(2020, 6, 2))})
    assert (day.partitions, day.partitions_total > 3) == (1, True)


@pytest.mark.slow
def test_compaction_keeps_every_value(lake: dm.Instance, data: pa.Table) -> None:
    table = lake.create_table("compacted", SCHEMA)
    for start in range(0, ROWS, ROWS // 2):
        table.ingest(data.slice(start, ROWS // 2))
    table.set_properties(compaction_strategy="basic", compaction_batch_files=2)
    table.compact()
    assert table.status().files == 1
    assert _sorted(table.query().read_all().to_pylist()) == _sorted(data.to_pylist())
    # NaN is the largest value also in a struct, where Parquet's statistics ignore it
    wanted = sum(1 for x in _xs(data) if x != x or x > ROWS - 10)
    found = table.sql(f"select count(*) as n from compacted where st.x > {ROWS - 10}").read_all()
    assert found.to_pylist() == [{"n": wanted}]


def _xs(data: pa.Table) -> list[float]:
    found = (row["st"] and row["st"]["x"] for row in data.to_pylist())
    return [x for x in found if x is not None]


def test_a_table_gets_the_schema_of_a_parquet_file(tmp_path: Path, lake: dm.Instance, data: pa.Table) -> None:
    pq.write_table(data, tmp_path / "like.parquet")
    table = lake.create_table("like", schema_like(tmp_path / "like.parquet", ["t", "d"], ["s"]))
    assert [str(field.type) for field in table.schema.values] == [
        "float", "decimal(15,2)", "struct<x:double?,l:list<date>?>", "date",
    ]  # fmt: skip
    table.ingest(tmp_path / "like.parquet")
    assert _count(table) == ROWS


def test_dates_and_decimals_are_read_from_csv(tmp_path: Path, lake: dm.Instance) -> None:
    schema = dm.Schema(
        [dm.Field("d", dm.DATE)], values=[dm.Field("n", dm.DECIMAL(10, 3)), dm.Field("f", dm.FLOAT)]
    )
    (tmp_path / "a.csv").write_text("d,n,f\n2020-01-02,1.5,0.25\n1999-12-31,-7.125,1e10\n")
    table = lake.create_table("csv", schema)
    table.ingest(tmp_path / "a.csv")
    assert table.query().read_all().to_pylist() == [
        {"d": date(1999, 12, 31), "n": Decimal("-7.125"), "f": 1e10},
        {"d": date(2020, 1, 2), "n": Decimal("1.500"), "f": 0.25},
    ]


def _one(name: str, kind: pa.DataType, value: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda row: row.set_column(row.column_names.index(name), name, pa.array([value], kind))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_one("f", pa.float64(), 0.1), "column 'f' does not fit float: 0.1 is not exact in 32 bits"),
        (_one("f", pa.int64(), 16_777_217), "column 'f' does not fit float"),
        (_one("n", pa.decimal128(20, 3), Decimal("0.125")), "column 'n' does not fit decimal(15,2)"),
        (_one("n", pa.int64(), 10**14), "column 'n' does not fit decimal(15,2)"),
        (_one("n", pa.float64(), 0.5), "column 'n' is double in the data; the schema says decimal(15,2)"),
        (_one("t", pa.timestamp("ns", "UTC"), 1), "column 't' does not fit timestamp"),
        (_one("t", pa.timestamp("us"), -(1 << 62)), "and has a timestamp not of the years 1 to 9999"),
        (_one("d", pa.date32(), 10**7), "'d' is a key, and has a date not of the years 1 to 9999"),
        (_one("d", pa.timestamp("us"), 0), "column 'd' is timestamp[us] in the data; the schema says date"),
        (_one("st", pa.struct([("x", pa.float64())]), {"x": 1.0}), "column 'st' is struct<x: double>"),
    ],
)  # fmt: skip
def test_a_conversion_that_would_change_a_value_is_refused(
    table: dm.Table, data: pa.Table, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    with pytest.raises(dm.errors.InvalidData) as raised:
        table.ingest(change(data.slice(0, 1)))
    assert words in str(raised.value)
    assert _count(table) == ROWS


@pytest.mark.parametrize(
    "where",
    [{"d": FIRST}, {"t": date(2020, 1, 1)}, {"t": "2020-01-01"}, {"n": "x"}, {"st": {"x": 1.0}}, {"d": 5}],
)
def test_conditions_with_values_of_another_type_are_refused(table: dm.Table, where: dict[str, Any]) -> None:
    with pytest.raises(dm.errors.InvalidQuery):
        table.query(where=where).read_all()


def test_a_condition_with_more_digits_than_the_column_is_refused(table: dm.Table) -> None:
    with pytest.raises(dm.errors.InvalidQuery, match=r"'n' is decimal\(15,2\); 0\.125 does not fit"):
        table.delete({"n": Decimal("0.125")})


@pytest.mark.slow
def test_the_service_has_all_types_in_conditions_and_in_each_format(lake: dm.Instance) -> None:
    table = lake.create_table("served", SCHEMA)
    at = datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    row = {"t": at, "d": date(1969, 12, 31), "s": date(2000, 1, 1), "f": -0.5, "n": Decimal("0.10")}
    row |= {"st": {"x": math.nan, "l": [date(1, 1, 1), None]}, "day": date(9999, 12, 31)}
    other = {**row, "d": date(1970, 1, 1), "f": math.inf, "n": None, "st": None, "day": None}
    given = pa.Table.from_pylist([row, other], schema=ARROW)
    table.ingest(given, engine="local")
    where = {"t": "2020-01-02T03:04:05.000006Z", "d": {"min": "1969-12-31"}, "n": ["0.10", None]}
    where |= {"day": [None, "9999-12-31"], "f": [-0.5, "Infinity"]}
    with serving(lake) as url:

        def answer(accept: str) -> bytes:
            found = http_post(
                f"{url}/v1/tables/served/query", json={"where": where}, headers={"accept": accept}
            )
            return bytes(found.raise_for_status().content)

        lines = [json.loads(line) for line in answer(JSON_LINES).splitlines()]
        rows = list(csv.DictReader(answer(CSV).decode().splitlines()))
        arrow = pa.ipc.open_stream(answer(ARROW_STREAM)).read_all()
    assert _sorted(arrow.to_pylist()) == _sorted(given.to_pylist())
    keys = {"t": "2020-01-02T03:04:05.000006Z", "s": "2000-01-01"}
    struct = {"x": "NaN", "l": ["0001-01-01", None]}
    first = {**keys, "d": "1969-12-31", "f": -0.5, "n": "0.10", "st": struct, "day": "9999-12-31"}
    empty = {"n": None, "st": None, "day": None}
    assert lines == [first, {**keys, "d": "1970-01-01", "f": "Infinity", **empty}]
    assert json.loads(rows[0].pop("st")) == first.pop("st")
    assert rows[0] == {**first, "f": "-0.5"}
    assert rows[1] == {**keys, "d": "1970-01-01", "f": "inf", **dict.fromkeys(empty, "")}


@pytest.mark.slow
def test_every_door_exports_times_of_years_that_python_lacks(
    lake: dm.Instance, cli: Callable[..., tuple[int, str, str]]
) -> None:
    fields = [dm.Field("d", dm.DATE), dm.Field("t", dm.TIMESTAMP)]
    table = lake.create_table("far", dm.Schema([dm.Field("k", dm.LONG)], [], fields))
    days = pa.array([-800_000, 5_000_000], pa.int32()).cast(pa.date32())
    times = pa.array([-(7 * 10**16), 3 * 10**17], pa.int64()).cast(pa.timestamp("us", "UTC"))
    table.ingest(pa.table({"k": [1, 2], "d": days, "t": times}), engine="local")
    rows = [
        {"k": 1, "d": "-0221-09-04", "t": "-0249-10-15T19:33:20.000000Z"},
        {"k": 2, "d": "15659-07-15", "t": "11476-08-15T05:20:00.000000Z"},
    ]
    statement = "select * from far order by k"
    with serving(lake) as url:
        for path, body in (("tables/far/query", {}), ("sql", {"statement": statement})):
            found = http_post(f"{url}/v1/{path}", json=body, headers={"accept": JSON_LINES})
            assert [*map(json.loads, found.raise_for_status().content.splitlines())] == rows
    place = ("--instance", str(Path(lake.objects.url.removeprefix("file://")).parent))
    for command in (("query", "far"), ("sql", statement), ("changes", "far", "--after", "beginning")):
        code, out, _ = cli(*command, *place, "--format", "json")
        assert (code, [{name: row[name] for name in rows[0]} for row in json.loads(out)]) == (0, rows)
    code, out, _ = cli("query", "far", *place)
    assert code == 0 and all(value in out for row in rows for value in (row["d"], row["t"]))
