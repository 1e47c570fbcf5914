"""Tables as views of a DuckDB connection: all rows of one moment, with values as DuckDB treats them."""

from __future__ import annotations

import math
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pytest
from query_lake import COUNTS, NOON, SCHEMA, Lake, four_leaves, ordered, row

import dormouse as dm
from dormouse.errors import InvalidQuery
from dormouse.postgres import ConnectionSupplier
from dormouse.reading.sql import views
from dormouse.reading.where import Where
from tests.standard import OF_K
from tests.support.model import BOOLEAN, BYTES, DOUBLE, LONG, MAP, STRING, TIMESTAMP, Field, Range, Schema
from tests.support.objects import ObjectStore
from tests.support.reading import query

NUMBERS = [None, -math.inf, -2.5, -0.0, 0.0, 1.0, 2.0, math.inf, math.nan]


def opened(lake: Lake, where: Where = None) -> duckdb.DuckDBPyConnection:
    return views.opened(lake.context.objects, {"t": lake.context}, {} if where is None else {"t": where})


@pytest.fixture
def new_lake(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> Callable[..., Lake]:
    return lambda schema=SCHEMA, **more: Lake(dsn, supplier, tmp_path / "a=b [c]*?%20é'", schema, **more)


@pytest.fixture(scope="module")
def lake(own_database: tuple[str, ConnectionSupplier], tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Returns the table that all tests of this module read and none changes."""
    folder = tmp_path_factory.mktemp("lake") / "k=v [b]*?%20é'"
    return four_leaves(lambda **more: Lake(*own_database, folder, SCHEMA, **more))


@pytest.mark.slow
def test_a_view_has_all_rows_once_with_their_types(lake: Lake) -> None:
    with opened(lake) as db:
        found = db.execute("select * from t").fetchall()
        assert ordered(found) == ordered([tuple(one.values()) for one in lake.all.to_pylist()])
        assert [str(kind) for _, kind, *_ in db.execute("describe t").fetchall()] == [
            "VARCHAR", "BIGINT", "INTEGER", "BLOB", "DOUBLE", "BOOLEAN", "TIMESTAMP WITH TIME ZONE",
            "VARCHAR[]",
        ]  # fmt: skip
        assert db.execute("select current_setting('TimeZone')").fetchall() == [("UTC",)]


@pytest.mark.parametrize(
    "where",
    [
        {"Name": "a\x00"},
        {"Name": ["", "o'\"", "😀"], "number": [-(2**63), 2**63 - 1]},
        {"Name": Range("g", "p"), "number": Range(-50, 50, min_inclusive=False, max_inclusive=True)},
        {"Name": []},
        {"number": [Range(-60, 0), -1, 50], "time": -(2**31)},
        {"code": [b"\x00", b"\xff"]},
        {"score": [None, 2.0], "good": True},
        {"score": Range(None, 0.0)},
        {"at": NOON},
        {"at": None, "tags": [None]},
    ],
)
def test_a_view_has_the_rows_of_a_query(lake: Lake, where: dict[str, Any]) -> None:
    with opened(lake, where) as db:
        found = db.execute("select * from t").fetchall()
    rows = [tuple(one.values()) for one in query(lake.context, where).read_all().to_pylist()]
    assert ordered(found) == ordered(rows)


@pytest.mark.parametrize(
    "condition",
    [
        "x > 5", "x >= 'nan'", "x = 'nan'", "not x <= 2", "x < 0", "x = 0", "x in (0.0, 1, 2, 3)", "x <> 1",
        "isnan(x)", "x between -3 and 'inf'", "x is not distinct from 'nan'::double", "x <= '-inf'",
        "x in (select max(x) from t)", "x = any(select 'nan'::double)",
    ],
)  # fmt: skip
def test_nan_is_the_largest_number_even_if_statistics_lack_it(numbers: Lake, condition: str) -> None:
    statement = f"select k from t where {condition} order by k"
    with opened(numbers) as db:
        assert db.execute(statement).fetchall() == numbers.expect(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "select x from t order by x desc limit 3",
        "select min(x), max(x), sum(x) filter (x < 9) from t",
        "select x, count(*) from t group by x order by x",
        "select count(*) from t a join t b using (x)",
    ],
)
def test_nan_in_orders_groups_and_joins(numbers: Lake, statement: str) -> None:
    with opened(numbers) as db:
        assert repr(db.execute(statement).fetchall()) == repr(numbers.expect(statement))


@pytest.fixture(scope="module")
def numbers(lake: Lake) -> Lake:
    """Returns a table with one file for each value of `NUMBERS`, and one file with all these values."""
    schema = Schema([Field("k", LONG)], [], [Field("x", DOUBLE, nullable=True)])
    context = lake.context
    made = Lake(context.dsn, context.supplier, Path(), schema, objects=context.objects, name="numbers")
    for n, x in enumerate(NUMBERS):
        made.add([{"k": n, "x": x}, {"k": 100 + n, "x": 1.5}])
    made.add([{"k": 1000 + n, "x": x} for n, x in enumerate(NUMBERS)])
    return made


def test_rows_of_equal_keys_are_aggregated_after_the_filter(new_lake: Callable[..., Lake]) -> None:
    lake = new_lake(COUNTS, aggregate="sum(n), min(low), max(last)", split_points=["m"])
    rng = random.Random(3)
    for n in range(4):
        rows = [
            {
                "word": rng.choice("abyz"),
                "seen": rng.randrange(3),
                "n": 2**61 - n,
                "low": low,
                "last": rng.choice("ab"),
            }
            for low in NUMBERS
        ]
        lake.add(rows[: 3 if n else 1], one_file=n == 1)
    merged = """select word, seen, sum(n)::bigint, min(low), max(last) from t
                group by word, seen order by word, seen"""
    with opened(lake) as db:
        assert repr(db.execute("select * from t order by word, seen").fetchall()) == repr(lake.expect(merged))
        part = db.execute("select sum(n) from t where word = 'a'").fetchall()
    assert part == lake.expect("select sum(n) from t where word = 'a'")
    # the condition applies to the merged row, not to the rows merged into it
    with opened(lake, {"n": Range(2**61 + 1, None)}) as db:
        found = db.execute("select word, seen from t order by word, seen").fetchall()
    assert found == lake.expect(
        "select word, seen from t group by all having sum(n) > 2::hugeint**61 order by all"
    )


def test_a_sum_that_is_too_large_is_an_error(new_lake: Callable[..., Lake]) -> None:
    lake = new_lake(COUNTS, aggregate="sum(n), min(low), max(last)")
    for _ in range(2):
        lake.add([{"word": "a", "seen": 1, "n": 2**62, "low": None, "last": ""}])
    with opened(lake) as db, pytest.raises(duckdb.ConversionException):
        db.execute("select * from t").fetchall()


@pytest.mark.parametrize(("kind", "unit"), [(LONG, 1), (TIMESTAMP, 1000)])
def test_old_rows_are_left_out(new_lake: Callable[..., Lake], kind: Any, unit: int) -> None:
    schema = Schema([Field("k", LONG)], [], [Field("time", kind, nullable=True)])
    lake = new_lake(schema, filter="age_off(time, 86400000)")
    lake.add([{"k": 1, "time": 0}, {"k": 2, "time": 4_000_000_000_000 * unit}, {"k": 3, "time": None}])
    with opened(lake) as db:
        assert db.execute("select k from t order by k").fetchall() == [(2,), (3,)]


def test_a_folder_named_like_a_hive_partition_adds_no_column(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    lake = Lake(dsn, supplier, tmp_path / "k=5", OF_K)
    lake.add([{"k": 1}])
    with opened(lake) as db:
        assert db.execute("from t").fetchall() == [(1,)]


def test_a_table_without_rows_has_its_columns(new_lake: Callable[..., Lake]) -> None:
    schema = Schema([Field("k", BYTES)], [], [Field("m", MAP(STRING, BOOLEAN), nullable=True)])
    with opened(new_lake(schema)) as db:
        assert db.execute("select * from t").fetchall() == []
        assert [one[1] for one in db.execute("describe t").fetchall()] == ["BLOB", "MAP(VARCHAR, BOOLEAN)"]


def test_a_table_of_too_many_files_is_an_error_when_it_is_used(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "FILES_MAX", 1)
    with opened(lake, {"Name": [Range("a", "h"), "p"]}) as db:
        assert db.execute("select 1").fetchall() == [(1,)]
        with pytest.raises(duckdb.Error, match=r"table 't' has .*files, more than 1: bound it by where="):
            db.execute("select * from t").fetchall()
        for statement in ("select count(*) from t", "select count(*) from t where Name = 'a' and time = 1"):
            with pytest.raises(duckdb.Error, match="more than 1"):
                db.execute(statement).fetchall()
    with opened(lake, {"Name": []}) as db:
        assert db.execute("select count(*) from t").fetchall() == [(0,)]


def test_a_lost_or_damaged_file_is_named_when_its_table_is_used(
    new_lake: Callable[..., Lake],
) -> None:
    schema = OF_K
    good, lost, damaged = (new_lake(schema, name=name) for name in ("good", "lost", "damaged"))
    contexts = {lake.context.table.name: lake.context for lake in (good, lost, damaged)}
    names = [lake.add([{"k": 1}])[0] for lake in (good, lost, damaged)]
    objects = good.context.objects
    # a missing file's path, taken as a pattern, must not find other files
    like_it = Path(str(objects.local_path(names[1])).replace("[c]*?", "c--"))
    like_it.parent.mkdir(parents=True)
    shutil.copy(str(objects.local_path(names[1])), like_it)
    with views.opened(objects, contexts, {}) as db:
        objects.delete([names[1]])
        path = objects.local_path(names[2])
        assert path is not None
        path.write_bytes(b"")
        assert db.execute("from good").fetchall() == [(1,)]
        with pytest.raises(duckdb.IOException, match=names[1]):
            db.execute("from lost").fetchall()
    with views.opened(objects, contexts, {}) as db:
        assert db.execute("from good").fetchall() == [(1,)]
        for name, filename in (("lost", names[1]), ("damaged", names[2])):
            with pytest.raises(duckdb.Error, match=f"table '{name}' cannot be read: .*{filename}"):
                db.execute(f"select count(*) from {name}").fetchall()


def test_a_file_collected_while_views_are_made_is_replaced_by_its_successor(
    new_lake: Callable[..., Lake], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(OF_K)
    [old] = lake.add([{"k": 1}])
    plan_tables = views.plan_tables

    def and_replaced(*asked: Any, **moment: Any) -> Any:
        found = plan_tables(*asked, **moment)
        if lake.context.objects.delete([old]) == []:
            monkeypatch.setattr(views, "plan_tables", plan_tables)
            lake.context.store.clear()
            lake.add([{"k": 1}])
        return found

    monkeypatch.setattr(views, "plan_tables", and_replaced)
    with opened(lake) as db:
        assert db.execute("from t").fetchall() == [(1,)]


@pytest.mark.slow
def test_a_connection_opens_while_tables_are_created_and_dropped_and_files_collected(
    dsn: str, tmp_path: Path
) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        properties = dm.TableProperties(gc_delay_seconds=0, compaction_batch_files=2)
        table = instance.create_table("stays", OF_K, properties=properties)
        table.ingest(pa.table({"k": [0]}))
        over = threading.Event()

        def change() -> None:
            for n in count(1):
                instance.create_table(f"goes_{n}", OF_K)
                table.ingest(pa.table({"k": [n]}))
                table.compact()
                table.collect_garbage()
                instance.drop_table(f"goes_{n}")
                if over.is_set():
                    return

        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(change)
            before = 0
            try:
                for _ in range(15):
                    # the file was collected before it was read
                    with instance.duckdb() as db, suppress(duckdb.IOException):
                        rows = db.execute("select count(*), max(k) + 1 from stays").fetchall()[0]
                        assert rows[0] == rows[1] >= before
                        before = rows[0]
            finally:
                over.set()
            changing.result()
        with instance.duckdb() as db:
            assert db.execute("select count(*) from stays").fetchall()[0][0] > 1


def test_views_read_files_in_s3(dsn: str, supplier: ConnectionSupplier, s3_store: ObjectStore) -> None:
    lake = Lake(dsn, supplier, Path(), SCHEMA, split_points=["g"], objects=s3_store)
    rng = random.Random(5)
    for n in range(2):
        lake.add([row(rng) for _ in range(50)], one_file=n == 1)
    with opened(lake, {"Name": Range("a", "p")}) as db:
        found = db.execute("select count(*), min(number) from t").fetchall()
    assert found == lake.expect("select count(*), min(number) from t where Name >= 'a' and Name < 'p'")


def test_an_instance_shows_all_its_tables_at_one_moment(dsn: str, tmp_path: Path) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        for name in ("One", "two", "select"):
            table = instance.create_table(name, OF_K)
            table.ingest(pa.table({"k": [1, 2]}))
        with instance.duckdb(where={"two": {"k": 2}}) as db:
            instance.table("One").ingest(pa.table({"k": [3]}))
            frame = pa.table({"k": [2, 3]})  # noqa: F841 DuckDB finds it by its name
            assert db.execute(
                'select * from one join "select" using (k) join frame using (k)'
            ).fetchall() == [(2,)]
            assert db.execute("from two").fetchall() == [(2,)]
            assert sorted(db.execute("show tables").fetchall()) == [("One",), ("select",), ("two",)]
        with instance.duckdb() as db:
            assert db.execute("select count(*) from One").fetchall() == [(3,)]
        for wrong, said in (
            ({"where": {"tow": {}}}, "unknown table 'tow'; did you mean 'two'"),
            ({"where": {"two": {"kk": 1}}}, "unknown column 'kk'"),
            ({"where": ["two"]}, "where must be a dict of tables"),
        ):
            with pytest.raises(InvalidQuery, match=said):
                instance.duckdb(**wrong)
        # a name that earlier releases allowed
        with psycopg.connect(dsn) as conn:
            conn.execute("update tables set name = 'TWO' where name = 'One'")
        with pytest.raises(InvalidQuery, match="differs in upper and lower case only: rename one"):
            instance.duckdb()
