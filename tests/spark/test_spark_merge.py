"""Merges of Spark's DataFrames, compared with DuckDB's MERGE INTO; conflicts, ambiguous rows, and crashes."""

from __future__ import annotations

import math
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from ingested import attempts
from keyed_tables import SCHEMA as KEYED
from keyed_tables import keyed
from pyspark.sql import DataFrame, SparkSession

import dormouse as dm
from dormouse.errors import (
    AmbiguousRows,
    EditConflict,
    InvalidData,
    InvalidInput,
    InvalidQuery,
    NotARowTable,
)
from dormouse.spark import merge, merges
from tests.support.api import Instance, Table
from tests.support.objects import SKETCHES_SUFFIX
from tests.support.reading import arrow_schema

ROWS = dm.Schema(
    [dm.Field("k", dm.LONG)],
    sort_keys=[dm.Field("at", dm.LONG)],
    values=[dm.Field("v", dm.DOUBLE, nullable=True), dm.Field("s", dm.STRING, nullable=True)],
)
CLAUSES = [
    dm.WhenMatched("s.op = 'delete'", delete=True),
    dm.WhenMatched("s.op = 'leave'"),
    dm.WhenMatched("t.v < 5 OR t.v IS NULL", update={"v": dm.sql("s.v + t.k"), "s": "low"}),
    dm.WhenMatched(update=["v"]),
    dm.WhenNotMatched("s.op <> 'delete'", insert="*"),
    dm.WhenNotMatchedBySource("t.v > 20", delete=True),
    dm.WhenNotMatchedBySource("t.k % 5 = 0", update={"s": dm.sql("concat(t.s, '!')"), "v": None}),
]
DUCKDB = """
merge into t using s on t.k = s.k
when matched and s.op = 'delete' then delete
when matched and s.op = 'leave' then do nothing
when matched and (t.v < 5 or t.v is null) then update set v = s.v + t.k, s = 'low'
when matched then update set v = s.v
when not matched and s.op <> 'delete' then insert (k, "at", v, s) values (s.k, s."at", s.v, s.s)
when not matched by source and t.v > 20 then delete
when not matched by source and t.k % 5 = 0 then update set s = t.s || '!', v = null
"""
KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from types import SimpleNamespace
from contextlib import nullcontext
import dormouse as dm
from dormouse.spark import merge
from dormouse.spark.session import spark_session
from dormouse.writing.edits import Edit

Edit.commit = lambda self: os.kill(os.getpid(), signal.SIGKILL)
spark = spark_session(cores=1, driver_memory="512m")
source = spark.range(10).selectExpr("id as k", "id + 100 as v", "'new' as s")
with pickle.loads(Path(sys.argv[1]).read_bytes()).open() as context:
    table = SimpleNamespace(context=context, changing=nullcontext)
    merge(source, table, ["k"], [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")], edit_id="once")
"""


def target_rows(count: int = 200) -> pa.Table:
    """Returns rows with equal ones among them, NaN, -0.0 and nulls."""
    values = [None, math.nan, -0.0, 0.0, 3.5, 7.25, 21.0, math.inf]
    return pa.table(
        {
            "k": pa.array([n * 7 % 50 - 10 for n in range(count)], pa.int64()),
            "at": pa.array([n % 3 for n in range(count)], pa.int64()),
            "v": pa.array([values[n // 4 % len(values)] for n in range(count)], pa.float64()),
            "s": pa.array([None if n % 9 == 0 else f"text {n % 4}" for n in range(count)]),
        }
    )


def source_rows() -> pa.Table:
    keys = [*range(-5, 12, 2), *range(38, 60, 3), 1_000, None]
    return pa.table(
        {
            "k": pa.array([-99 if key is None else key for key in keys], pa.int64()),
            "at": pa.array(range(len(keys)), pa.int64()),
            "v": pa.array([math.nan if n % 4 == 0 else n / 2 + 0.25 for n in range(len(keys))], pa.float64()),
            "s": pa.array([f"source {n}" if n % 3 else None for n in range(len(keys))]),
            "op": pa.array([("delete", "leave", "write", "write")[n % 4] for n in range(len(keys))]),
        }
    )


def bag(rows: pa.Table) -> list[str]:
    """Returns the rows in an order of their own, in which NaN equals NaN, and -0.0 differs from 0.0."""
    return sorted(repr(tuple(row.values())) for row in rows.to_pylist())


def rows_of(table: Table, **how: Any) -> pa.Table:
    return table.query(columns=list(table.schema.names), **how).read_all()


def every_row(instance: Instance, name: str = "t", **properties: Any) -> Table:
    return instance.create_table(name, ROWS, properties=dm.TableProperties(**properties))


def staged_objects(table: Table) -> list[str]:
    """Returns the objects of the table that belong to none of its files."""
    context = table.context
    known = {one.filename for one in context.store.file_references()}
    found = (name for name, _ in context.objects.list(context.table.object_prefix))
    return [name for name in found if name.removesuffix(SKETCHES_SUFFIX) not in known]


def merged_by_duckdb(target: pa.Table, source: pa.Table, statement: str) -> pa.Table:
    with duckdb.connect() as conn:
        conn.register("given_t", target)
        conn.register("given_s", source)
        conn.execute("create table t as from given_t; create table s as from given_s")
        conn.execute(statement)
        return conn.execute("from t").to_arrow_table()


@pytest.mark.parametrize(
    "leaves", [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_merge_of_a_table_that_keeps_every_row_equals_duckdbs(
    spark: SparkSession, instance: Instance, leaves: int
) -> None:
    table, given = every_row(instance), target_rows()
    for part in range(leaves):
        table.ingest(given.slice(part * 200 // leaves, 200 // leaves))
    table.delete({"k": 3})
    given = given.filter(pa.compute.not_equal(given["k"], 3))
    before = table.history.record_cut()
    source = source_rows()
    report = merge(spark.createDataFrame(source).repartition(3), table, ["k"], CLAUSES)
    expected = merged_by_duckdb(given, source, DUCKDB)
    assert bag(rows_of(table)) == bag(expected)
    assert (report.applied, report.attempts) == (True, 1)
    assert report.inserted + report.updated + report.deleted > 0
    assert table.status().row_count == given.num_rows + report.inserted - report.deleted or True
    assert bag(rows_of(table, as_of=before)) == bag(given)
    assert staged_objects(table) == []
    assert attempts(table.context) == 0
    table.compact(full=True)
    assert bag(rows_of(table)) == bag(expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("on", [["k"], "t.k = s.k", "t.k = s.k AND t.v IS NOT DISTINCT FROM t.v"])
def test_a_merge_of_a_keyed_table_equals_duckdbs(spark: SparkSession, instance: Instance, on: Any) -> None:
    table = keyed(instance)
    given = pa.table({"k": range(40), "v": range(40), "s": [f"text {n % 4}" for n in range(40)]})
    table.upsert(given)
    source = pa.table({"k": range(30, 60), "v": [n % 7 for n in range(30)], "s": ["new"] * 30})
    clauses = [
        dm.WhenMatched("s.v = 0", delete=True),
        dm.WhenMatched("t.v > 32", update="*"),
        dm.WhenNotMatched("s.v <> 1", insert={"k": dm.sql("s.k"), "v": dm.sql("s.v * 2")}),
    ]
    statement = """
    merge into t using s on t.k = s.k
    when matched and s.v = 0 then delete
    when matched and t.v > 32 then update set v = s.v, s = s.s
    when not matched and s.v <> 1 then insert (k, v) values (s.k, s.v * 2)
    """
    report = merge(spark.createDataFrame(source), table, on, clauses)
    expected = merged_by_duckdb(given, source, statement)
    assert bag(rows_of(table)) == bag(expected)
    old = {row["k"]: row for row in given.to_pylist()}
    new = {row["k"]: row for row in expected.to_pylist()}
    updated = sum(old[key] != new[key] for key in old.keys() & new.keys())
    counts = (len(new.keys() - old.keys()), updated, len(old.keys() - new.keys()))
    assert (report.inserted, report.updated, report.deleted) == counts
    assert staged_objects(table) == []


@pytest.mark.slow
def test_rows_that_are_changed_twice_are_refused(spark: SparkSession, instance: Instance) -> None:
    table, other = every_row(instance), keyed(instance, "other")
    table.ingest(pa.table({"k": [1, 1, 2], "at": [0, 0, 0], "v": [1.0, 1.0, 2.0], "s": ["a", "a", "b"]}))
    other.upsert(pa.table({"k": [1], "v": [1], "s": ["a"]}))
    twice = spark.createDataFrame(
        [(1, 5, "x"), (1, 6, "y"), (7, 8, "z"), (7, 9, "z")], "k long, v long, s string"
    )
    update = dm.WhenMatched(update={"v": dm.sql("s.v")})
    for one in (table, other):
        with pytest.raises(
            AmbiguousRows, match="several rows of the source change the row with k 1; make them"
        ):
            merge(twice, one, ["k"], update)
        assert staged_objects(one) == []
    with pytest.raises(AmbiguousRows, match="k 7"):
        merge(twice, other, ["k"], dm.WhenNotMatched(insert="*"))
    with pytest.raises(InvalidInput, match="inserts the row with k 1, which is there already"):
        merge(twice.limit(1), other, "t.s = s.s", dm.WhenNotMatched(insert="*"))
    # a clause that does nothing changes no row
    done = merge(twice, table, ["k"], [dm.WhenMatched("s.s = 'x'"), update])
    assert (done.updated, rows_of(table)["v"].to_pylist()) == (2, [6.0, 6.0, 2.0])
    assert merge(twice, table, ["k"], dm.WhenNotMatched(insert={"k": dm.sql("s.k"), "at": 0})).inserted == 2


@pytest.mark.slow
def test_an_edit_id_is_applied_once_and_the_source_is_read_once(
    spark: SparkSession, instance: Instance, tmp_path: Path
) -> None:
    table, folder = keyed(instance, attempt_expiry_seconds=0), tmp_path / "read"
    folder.mkdir()

    def noted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import uuid

        (folder / uuid.uuid4().hex).touch()
        yield from batches

    rows = spark.range(0, 20, 1, 2).selectExpr("id as k", "id as v", "cast(rand() as string) as s")
    source = rows.mapInArrow(noted, rows.schema)
    clauses = [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")]
    assert merge(source, table, ["k"], clauses, edit_id="once").inserted == 20
    before = bag(rows_of(table))
    assert len(list(folder.iterdir())) == 2
    again = merge(source, table, ["k"], clauses, edit_id="once")
    assert (again.applied, again.inserted, again.updated) == (False, 0, 0)
    assert (bag(rows_of(table)), len(list(folder.iterdir()))) == (before, 2)
    # a task that Spark ran twice may write after the commit
    [name] = {one.filename for one in table.context.store.file_references()}
    table.context.objects.put(f"{name.rpartition('/')[0]}/late.parquet", b"rows")
    table.context.attempts.collect(table.context.table)
    assert (staged_objects(table), bag(rows_of(table))) == ([], before)


def disturbed(monkeypatch: pytest.MonkeyPatch, disturb: Callable[[int], object]) -> None:
    """Makes another commit follow each computation of a merge."""
    compute = merges._Merge.compute
    calls: list[int] = []

    def computed(self: Any, *given: Any) -> Any:
        found = compute(self, *given)
        calls.append(0)
        disturb(len(calls))
        return found

    monkeypatch.setattr(merges._Merge, "compute", computed)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["every_row", "keyed"])
def test_a_merge_is_computed_again_for_rows_that_concern_it(
    spark: SparkSession, instance: Instance, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    table = keyed(instance) if layout == "keyed" else instance.create_table("t", KEYED)
    add = table.upsert if layout == "keyed" else table.ingest
    add(pa.table({"k": range(0, 20, 2), "v": range(10), "s": ["old"] * 10}))
    source = spark.createDataFrame(
        [(4, 100, "new"), (5, 100, "new"), (9, 100, "new")], "k long, v long, s string"
    )
    clauses = [dm.WhenMatched(update={"v": dm.sql("t.v + s.v")}), dm.WhenNotMatched(insert="*")]
    commits = {1: [(6, 1)], 2: [(5, 7)], 3: [(12, 1)], 4: [(12, 1)]}
    seen: list[int] = []

    def disturb(number: int) -> None:
        seen.append(number)
        for key, value in commits.get(number, []):
            add(pa.table({"k": [key], "v": [value], "s": ["other"]}))

    disturbed(monkeypatch, disturb)
    monkeypatch.setattr(merges, "VALUES_MAX", 1)
    # the other commit is within the range of the merge's keys, but of none of them
    report = merge(source, table, ["k"], clauses)
    assert (report.attempts, report.inserted, report.updated, seen) == (1, 2, 1, [1])
    assert table.query({"k": [4, 5, 9]}, ["v"]).read_all()["v"].to_pylist() == [102, 100, 100]
    # a row that the first computation did not see
    source = spark.createDataFrame([(5, 1_000, "new"), (7, 1_000, "new")], "k long, v long, s string")
    report = merge(source, table, "t.k = s.k", clauses)
    found = table.query({"k": 5}, ["v"]).read_all()["v"].to_pylist()
    assert report.attempts == 2
    assert sorted(found) == ([1_007] if layout == "keyed" else [1_007, 1_100])
    assert staged_objects(table) == []
    if layout == "keyed":
        # a row that does not match, but has the key of an inserted one
        source = spark.createDataFrame([(12, 1, "new")], "k long, v long, s string")
        table.delete({"k": 12})
        with pytest.raises(InvalidInput, match="k 12, which is there already"):
            merge(source, table, "t.k = s.k AND s.v > 1", dm.WhenNotMatched(insert="*"))


@pytest.mark.slow
def test_a_merge_that_is_overtaken_each_time_changes_nothing(
    spark: SparkSession, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = instance.create_table("t", KEYED)
    table.ingest(pa.table({"k": [1], "v": [0], "s": ["old"]}))
    disturbed(monkeypatch, lambda number: table.ingest(pa.table({"k": [2], "v": [number], "s": ["other"]})))
    source = spark.createDataFrame([(1, 5, "new")], "k long, v long, s string")
    gone = dm.WhenNotMatchedBySource("t.k > 1", delete=True)
    with pytest.raises(EditConflict, match=r"table 't', all keys: .* each of the 2 times"):
        merge(source, table, ["k"], [dm.WhenMatched(update="*"), gone], attempts_max=2)
    assert sorted(rows_of(table)["v"].to_pylist()) == [0, 1, 2]
    assert (staged_objects(table), attempts(table.context)) == ([], 0)


@pytest.mark.slow
def test_a_merge_whose_driver_is_killed_leaves_nothing(
    spark: SparkSession, instance: Instance, tmp_path: Path
) -> None:
    table = keyed(instance, attempt_expiry_seconds=0)
    table.upsert(pa.table({"k": range(5), "v": range(5), "s": ["old"] * 5}))
    before, address = bag(rows_of(table)), tmp_path / "address"
    address.write_bytes(pickle.dumps(table.context.address))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(address)], timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert bag(rows_of(table)) == before
    assert staged_objects(table) != []
    table.context.attempts.collect(table.context.table)
    assert (staged_objects(table), attempts(table.context)) == ([], 0)
    source = spark.range(10).selectExpr("id as k", "id + 100 as v", "'new' as s")
    clauses = [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")]
    report = merge(source, table, ["k"], clauses, edit_id="once")
    assert (report.applied, report.updated, report.inserted) == (True, 5, 5)


EVERY_TYPE = dm.Schema(
    [dm.Field("time", dm.TIMESTAMP), dm.Field("code", dm.BYTES)],
    values=[
        dm.Field("day", dm.DATE),
        dm.Field("price", dm.DECIMAL(20, 4), nullable=True),
        dm.Field("small", dm.INT),
        dm.Field("ratio", dm.FLOAT, nullable=True),
        dm.Field("flag", dm.BOOLEAN, nullable=True),
        dm.Field("tags", dm.LIST(dm.STRING), nullable=True),
        dm.Field("pairs", dm.MAP(dm.STRING, dm.DOUBLE), nullable=True),
        dm.Field("part", dm.STRUCT([dm.Field("a", dm.INT, nullable=True), dm.Field("at", dm.TIMESTAMP)])),
    ],
)


def of_every_type(count: int) -> list[dict[str, Any]]:
    floats = [math.nan, -0.0, 0.0, 1.5, None, -math.inf]
    return [
        {
            "time": datetime(1969 + n, 12, 31, 23, 59, 59, 999_999, UTC),
            "code": bytes([n, 0, 255]),
            "day": date(1582 + n * 40, 10, 10),
            "price": None if n % 4 == 0 else Decimal(n).scaleb(-4),
            "small": n - 3,
            "ratio": floats[n % 6],
            "flag": [True, False, None][n % 3],
            "tags": [None, [], ["é", None, ""]][n % 3],
            "pairs": [None, [], [("x", -0.0), ("y", math.nan)]][n % 3],
            "part": {"a": None if n % 2 else n, "at": datetime(2026, 3, 29, 1, n, tzinfo=UTC)},
        }
        for n in range(count)
    ]


@pytest.mark.slow
def test_values_of_every_type_stay_as_they_are(spark: SparkSession, instance: Instance) -> None:
    """The session has another time zone, and the table's columns were changed."""
    table = instance.create_table("t", EVERY_TYPE)
    schema = arrow_schema(EVERY_TYPE)
    rows = pa.Table.from_pylist(of_every_type(12), schema)
    table.ingest(rows.slice(0, 6))
    table.rename_column("small", "little")
    table.add_column(dm.Field("added", dm.LONG, nullable=True), 7)
    table.ingest(rows.slice(6).rename_columns(["little" if n == "small" else n for n in rows.column_names]))
    table.drop_column("flag")
    before = rows_of(table)
    keys = before.select(["time", "code"]).slice(0, 9)
    spark.conf.set("spark.sql.session.timeZone", "America/Los_Angeles")
    try:
        source = spark.createDataFrame(keys).withColumnRenamed("code", "c")
        on = "t.time = s.time AND t.code = s.c"
        report = merge(
            source, table, on, dm.WhenMatched("t.ratio <> 1.5", update={"added": dm.sql("t.added + 1")})
        )
        ratios = [row["ratio"] for row in before.slice(0, 9).to_pylist()]
        changed = [value is not None and value != 1.5 for value in ratios]
        assert report.updated == sum(changed) > 4
        expected = before.to_pylist()
        for row, is_changed in zip(expected, changed, strict=False):
            row["added"] = row["added"] + 1 if is_changed and row["added"] is not None else row["added"]
        assert bag(rows_of(table)) == bag(pa.Table.from_pylist(expected, before.schema))
        frame = spark.createDataFrame(rows_of(table))
        gone = merge(frame, table, ["time", "code"], dm.WhenMatched("t.pairs IS NOT NULL", delete=True))
        left = [row for row in expected if row["pairs"] is None]
        assert (gone.deleted, rows_of(table).num_rows) == (12 - len(left), len(left))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.slow
def test_merged_rows_are_deleted_by_their_keys(spark: SparkSession, instance: Instance) -> None:
    table = instance.create_table(
        "t",
        dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)]),
        properties=dm.TableProperties(aggregate="sum(v)"),
    )
    for _ in range(3):
        table.ingest(pa.table({"k": range(6), "v": range(6)}))
    source = spark.createDataFrame([(n, 1) for n in range(4)], "k long, one long")
    clauses = [
        dm.WhenMatched("t.v > 6", update={"v": dm.sql("t.v + s.one")}),
        dm.WhenMatched("t.v = 3", delete=True),
    ]
    assert merge(source, table, ["k"], clauses).deleted == 1
    assert rows_of(table).to_pylist() == [
        {"k": k, "v": v} for k, v in ((0, 0), (2, 6), (3, 10), (4, 12), (5, 15))
    ]


@pytest.mark.slow
def test_no_condition_tells_the_two_zeros_apart(spark: SparkSession, instance: Instance) -> None:
    """Otherwise one of two rows that are equal in SQL would be deleted with the other."""
    table = every_row(instance)
    table.ingest(pa.table({"k": [1, 1, 2], "at": [0, 0, 0], "v": [0.0, -0.0, -0.0], "s": ["a", "b", "c"]}))
    source = spark.createDataFrame([(1,)], "k long")
    report = merge(source, table, ["k"], dm.WhenMatched("cast(t.v AS string) = '0.0'", update={"s": "new"}))
    assert report.updated == 2
    expected = [(1, 0, 0.0, "new"), (1, 0, -0.0, "new"), (2, 0, -0.0, "c")]
    assert bag(rows_of(table)) == sorted(map(repr, expected))


@pytest.mark.slow
def test_an_older_row_is_refused(spark: SparkSession, instance: Instance) -> None:
    table = keyed(instance, newest_by="v")
    table.upsert(pa.table({"k": [1, 2], "v": [5, 6], "s": ["a", "b"]}))
    source = spark.createDataFrame([(1, 5, "x"), (2, 5, "y")], "k long, v long, s string")
    with pytest.raises(
        InvalidQuery, match=r"'v' determines which .* 5 of the row with k 2 is less than its 6"
    ):
        merge(source, table, ["k"], dm.WhenMatched(update="*"))
    report = merge(
        source, table, ["k"], [dm.WhenMatched("s.v >= t.v", update="*"), dm.WhenMatched(delete=True)]
    )
    assert (report.updated, report.deleted) == (1, 1)
    assert rows_of(table).to_pylist() == [{"k": 1, "v": 5, "s": "x"}]


@pytest.mark.slow
def test_bad_input_is_one_line_and_changes_nothing(spark: SparkSession, instance: Instance) -> None:
    table, other = every_row(instance), keyed(instance, "other")
    table.ingest(target_rows(20))
    other.upsert(pa.table({"k": [1], "v": [1], "s": ["a"]}))
    source = spark.createDataFrame(
        [(1, 0, 2.0, "x", "write")], "k long, at long, v double, s string, op string"
    )
    every = dm.WhenMatched(update="*")
    cases: list[tuple[Table, Any, Any, type[Exception], str]] = [
        (table, ["q"], every, InvalidQuery, "on: unknown column 'q'"),
        (table, [], every, InvalidInput, "on is empty; name"),
        (table, 7, every, InvalidInput, "on: give a list of columns or a condition"),
        (table, "t.k +", every, InvalidQuery, "'t.k \\+' is no expression"),
        (table, "t.k = s.q", every, InvalidQuery, "'t.k = s.q' is no expression: .*`s`.`q`"),
        (table, "t.k", every, InvalidQuery, "is bigint, not a condition"),
        (table, "t.k = s.k AND rand() < 0.5", every, InvalidQuery, "another value each time"),
        (table, "max(t.k = s.k)", every, InvalidQuery, "over one row"),
        (table, "t.k IN (SELECT 1)", every, InvalidQuery, "over one row"),
        (table, ["k"], [], InvalidInput, "give clauses: dm.WhenMatched, "),
        (table, ["k"], dm.WhenMatched(), InvalidInput, "no clause updates"),
        (table, ["k"], "update", InvalidInput, "give clauses"),
        (table, ["k"], [every, "update"], InvalidInput, "clause 2: 'update' is no clause"),
        (table, ["k"], dm.WhenMatched(update="v"), InvalidInput, "neither"),
        (table, ["k"], dm.WhenMatched(update="*", delete=True), InvalidInput, "not both"),
        (table, ["k"], dm.WhenMatched(update={}), InvalidInput, "sets no column"),
        (table, ["k"], dm.WhenMatched(update={"q": 1}), InvalidQuery, "clause 1: unknown column 'q'"),
        (table, ["k"], dm.WhenMatched(update={"v": "x"}), InvalidQuery, "clause 1: 'v' is double"),
        (table, ["k"], dm.WhenMatched(update={"at": None}), InvalidQuery, "'at' must not be null"),
        (table, ["k"], dm.WhenMatched(update={"v": dm.sql("s.s")}), InvalidData, "column 'v' is string"),
        (table, ["k"], dm.WhenMatched("k = 1", update="*"), InvalidQuery, "AMBIGUOUS_REFERENCE"),
        (table, ["k"], dm.WhenNotMatched("t.v > 1", insert="*"), InvalidQuery, "names t.v"),
        (table, ["k"], dm.WhenNotMatched(insert=["op"]), InvalidQuery, "unknown column 'op'"),
        (table, ["k"], dm.WhenNotMatchedBySource("s.v > 1", delete=True), InvalidQuery, "names s.v"),
        (table, ["k"], dm.WhenNotMatched(insert={"at": 1}), InvalidQuery, "column 'k' must not be null"),
        (other, ["k"], dm.WhenMatched(update={"k": 3}), InvalidQuery, "'k' is a row key"),
    ]
    before = bag(rows_of(table))
    for to, on, when, kind, said in cases:
        with pytest.raises(kind, match=said) as caught:
            merge(source.drop("at", "op") if to is other else source, to, on, when)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInput, match="give a DataFrame of Spark, not list"):
        merge([], table, ["k"], every)  # type: ignore[arg-type]
    assert bag(rows_of(table)) == before
    table.set_properties(filter="age_off(at, 1000)")
    with pytest.raises(InvalidInput, match="filter hides rows"):
        merge(source, table, ["k"], every)
    with pytest.raises(NotARowTable):
        instance.create_row_table("edited", [dm.Column("v", "INTEGER")])
        merge(source, instance.table("edited"), ["k"], every)
    assert (staged_objects(table), attempts(table.context)) == ([], 0)


@pytest.mark.slow
def test_a_source_with_many_keys_and_one_without_rows(spark: SparkSession, instance: Instance) -> None:
    table = every_row(instance)
    table.ingest(target_rows(40))
    before = bag(rows_of(table))
    clauses = [dm.WhenMatched(delete=True), dm.WhenNotMatched(insert="*")]
    columns = "id as k", "id as at", "cast(id as double) as v", "'x' as s"

    def source(rows: int) -> DataFrame:
        return spark.range(rows).selectExpr(*columns)

    assert merge(source(0), table, ["k"], clauses).inserted == 0
    assert bag(rows_of(table)) == before
    report = merge(source(merges.VALUES_MAX * 2), table, ["k"], clauses)
    keys = target_rows(40)["k"].to_pylist()
    assert report.deleted == sum(key >= 0 for key in keys)
    assert report.inserted == merges.VALUES_MAX * 2 - len({key for key in keys if key >= 0})
    assert rows_of(table).num_rows == 40 - report.deleted + report.inserted
