"""`format("dormouse")` and `dormouse.spark`: Spark reads the same rows as queries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit, raise_error, when

import dormouse as dm
import dormouse.spark
from dormouse.errors import InvalidCut
from tests.inlining import INLINED_BYTES
from tests.small_tables import clock
from tests.standard import OF_K
from tests.stored import query, wait_until
from tests.support.api import Instance, Table
from tests.support.model import is_inlined, json_value

SCHEMA = dm.Schema(
    row_keys=[dm.Field("k", dm.LONG), dm.Field("name", dm.STRING)],
    values=[
        dm.Field("x", dm.DOUBLE, nullable=True),
        dm.Field("day", dm.DATE),
        dm.Field("at", dm.TIMESTAMP, nullable=True),
        dm.Field("cost", dm.DECIMAL(20, 2), nullable=True),
        dm.Field("raw", dm.BYTES),
        dm.Field("tags", dm.LIST(dm.STRING)),
    ],
)
DOUBLES = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, None]
ROWS = 300
Load = Callable[..., DataFrame]


def rows(first: int = 0, count: int = ROWS) -> pa.Table:
    """Returns rows with dates before the calendar reform, and texts with line breaks and NUL characters."""
    numbers = range(first, first + count)
    return pa.table(
        {
            "k": [number // 2 for number in numbers],
            "name": [("é\0", "a'b`", "")[number % 3] + str(number) for number in numbers],
            "x": [DOUBLES[number % 7] for number in numbers],
            "day": [date(1, 1, 1 + number % 20) if number % 2 else date(2026, 1, 1) for number in numbers],
            "at": [datetime(1500, 1, 1, 1, tzinfo=UTC) if number % 5 else None for number in numbers],
            "cost": [Decimal(number) / 100 for number in numbers],
            "raw": [bytes([number % 256, 0]) for number in numbers],
            "tags": [["a", str(number)][: number % 3] for number in numbers],
        },
        schema=pa.schema(
            [
                ("k", pa.int64()),
                ("name", pa.string()),
                ("x", pa.float64()),
                ("day", pa.date32()),
                ("at", pa.timestamp("us", "UTC")),
                ("cost", pa.decimal128(20, 2)),
                ("raw", pa.binary()),
                ("tags", pa.list_(pa.string())),
            ]
        ),
    )


@pytest.fixture
def instance(dsn: str, tmp_path: Path) -> Iterator[Instance]:
    # Spark must not take the name of such a folder for a column
    with dm.connect(dsn, (tmp_path / "k=7 a" / "objects").as_uri().replace("%20", " ")) as opened:
        yield opened


@pytest.fixture
def table(instance: Instance) -> Table:
    """Makes a table with files of one leaf and of several, deletions by key and by value, and a cut."""
    made = instance.create_table(
        "t", SCHEMA, properties=dm.TableProperties(split_threshold_rows=60, split_min_rows=2)
    )
    made.ingest(rows())
    for _ in range(3):
        made.split()
    made.history.record_cut("before")
    made.ingest(rows(ROWS, 20))
    made.delete({"k": dm.Range(10, 20)})
    made.delete({"x": 1.5, "k": dm.Range(0, 60)})
    made.delete({"x": None, "cost": dm.Range(Decimal("0.50"), Decimal("2.50"))})
    return made


@pytest.fixture
def load(spark: SparkSession, instance: Instance, dsn: str) -> Load:
    reader = spark.read.format("dormouse").options(dsn=dsn, objects=instance._tables.objects.url, table="t")
    return lambda **options: reader.options(split_bytes="1", **options).load()


def exact(value: Any) -> Any:
    """Returns a value in a form in which NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(value, float):
        return repr(value)
    return bytes(value) if isinstance(value, bytearray) else value


def of_spark(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Returns Spark's rows in Arrow's form, because Python's datetime would have the time zone of this
    machine.
    """
    found = frame.toArrow()
    return ordered(found)


def ordered(table: pa.Table) -> list[tuple[Any, ...]]:
    plain = [column.to_pylist() for column in table.columns]
    return sorted((tuple(map(exact, row)) for row in zip(*plain, strict=True)), key=repr)


QUESTIONS: list[dict[str, Any]] = [
    {},
    {"columns": ["tags", "k"]},
    {"where": {"k": dm.Range(5, 70)}},
    {"where": {"k": [3, 150, 151, 10_000], "name": ["a'b`301", "é\x00303", "é\x006"]}},
    {"where": {"x": [math.nan, None]}},
    {"where": {"x": dm.Range()}},
    {"where": {"x": dm.Range(max=0.0, max_inclusive=True)}},
    {"where": {"day": dm.Range(date(1, 1, 3), date(1, 1, 9)), "raw": dm.Range(b"\x05", b"\xf0")}},
    {"where": {"at": [datetime(1500, 1, 1, 1, tzinfo=UTC)], "cost": dm.Range(Decimal("1.05"))}},
    {"where": {"k": [10_000]}},
    {"as_of": "before", "where": {"k": dm.Range(0, 100)}},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("query", QUESTIONS, ids=repr)
def test_spark_reads_what_a_query_reads(
    spark: SparkSession, table: Table, load: Load, query: dict[str, Any]
) -> None:
    expected = ordered(table.query(**query).read_all())
    options = {
        **(
            {"where": json.dumps({k: _json(v) for k, v in query["where"].items()})}
            if "where" in query
            else {}
        ),
        **({"columns": ",".join(query["columns"])} if "columns" in query else {}),
        **({"as_of": query["as_of"]} if "as_of" in query else {}),
    }
    assert of_spark(load(**options)) == expected
    assert of_spark(dormouse.spark.read(spark, table, **query)) == expected


def _json(wanted: Any) -> Any:
    return [json_value(one) for one in (wanted if isinstance(wanted, list) else [wanted])]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "properties",
    [{"filter": "age_off(at, 1)"}, {"aggregate": "max(x), max(day), max(at), max(cost), max(raw)"}],
)
def test_rows_are_filtered_and_merged_first(
    spark: SparkSession, instance: Instance, load: Load, properties: dict[str, Any]
) -> None:
    schema = dm.Schema(SCHEMA.row_keys, values=SCHEMA.values[:-1])
    table = instance.create_table("t", schema, properties=dm.TableProperties(**properties))
    for _ in range(2):
        table.ingest(rows().drop(["tags"]))
    expected = ordered(table.query().read_all())
    assert of_spark(load()) == expected
    assert of_spark(dormouse.spark.read(spark, table)) == expected


def test_a_leaf_is_a_partition_of_spark_until_they_reach_split_bytes(table: Table, load: Load) -> None:
    leaves = len(table.partitions.leaves())
    assert leaves > 3
    assert load().rdd.getNumPartitions() == leaves
    assert load().select("k").rdd.getNumPartitions() == leaves


@pytest.mark.slow
def test_each_action_reads_the_newest_rows_and_a_frame_of_a_moment_does_not_change(
    spark: SparkSession, table: Table, load: Load
) -> None:
    fresh, later, before, kept = load(), load(), load(as_of="before"), dormouse.spark.read(spark, table)
    counts = [frame.count() for frame in (fresh, before, kept)]
    table.ingest(rows(1_000, 10))
    table.compact()
    table.collect_garbage()
    counts[0] += 10 * (spark.version < "4.1")  # Spark plans a frame once, at its first action
    assert [frame.count() for frame in (fresh, before, kept, later)] == [*counts, counts[2] + 10]


@pytest.mark.slow
@pytest.mark.parametrize("pushes", ["false", "true"])
def test_a_query_applies_only_its_own_filter(
    spark: SparkSession, table: Table, load: Load, pushes: str
) -> None:
    """Spark 4.1 caches a reader with its filters, and uses the reader again for a later query without
    filters.
    """
    frame, count = load(), table.query(columns=["k"]).read_all().num_rows
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushes)
    try:
        low = frame.where(col("k") < 10).count()
        assert low == table.query({"k": dm.Range(max=10)}).read_all().num_rows
        assert (frame.count(), frame.where("k % 2 < 2").count()) == (count, count)
        assert frame.where(col("k") < 10).unionAll(frame).count() == low + count
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.slow
def test_view_makes_a_view_of_each_table(spark: SparkSession, instance: Instance, table: Table) -> None:
    other = instance.create_table("other", OF_K, split_points=[1])
    other.ingest(pa.table({"k": [0, 1, 2]}))
    assert sorted(dormouse.spark.view(spark, instance)) == ["other", "t"]
    counted = spark.sql("select count(*), (select sum(k) from other) from t").collect()
    assert [tuple(row) for row in counted] == [(table.query(columns=["k"]).read_all().num_rows, 3)]


@pytest.mark.slow
def test_inlined_files_are_read_beside_objects(
    spark: SparkSession, instance: Instance, table: Table, load: Load
) -> None:
    table.compact(full=True)
    table.set_properties(inline_bytes_max=INLINED_BYTES)
    table.ingest(rows(ROWS + 20, 5))
    table.delete({"k": (ROWS + 20) // 2})
    names = [one.filename for one in table.files.file_references()]
    assert {*map(is_inlined, names)} == {False, True}
    expected = ordered(table.query().read_all())
    assert of_spark(load()) == of_spark(dormouse.spark.read(spark, table)) == expected
    assert dormouse.spark.view(spark, instance) == ["t"]
    assert of_spark(spark.sql("select * from t")) == expected
    where = {"k": dm.Range(ROWS // 2)}
    expected = ordered(table.query(where, ["name"]).read_all())
    assert of_spark(dormouse.spark.read(spark, table, where, ["name"])) == expected


def test_changes_after_a_cut_are_read(table: Table, load: Load) -> None:
    found = load(changes_after="before", columns="k,name")
    assert found.columns == ["k", "name", "_change"]
    assert of_spark(found) == ordered(table.changes("before", columns=["k", "name"]).read_all())
    assert load(changes_after="beginning", changes_till="before").count() == ROWS


@pytest.mark.slow
def test_changes_are_read_by_several_tasks_in_their_order(table: Table, load: Load) -> None:
    found = load(changes_after="beginning", columns="k,name")
    assert found.rdd.getNumPartitions() == 5
    changes = [row["_change"] for row in table.changes(None, columns=["k", "name"]).read_all().to_pylist()]
    assert [row["_change"] for row in found.collect()] == changes
    assert of_spark(found) == ordered(table.changes(None, columns=["k", "name"]).read_all())
    assert load(changes_after="before", changes_till="before").count() == 0


@pytest.mark.slow
def test_changes_of_many_inlined_files_and_deletions_are_read(table: Table, load: Load) -> None:
    table.set_properties(inline_bytes_max=INLINED_BYTES)
    for number in range(30):
        table.ingest(rows(ROWS + number, 3))
        if number % 3 == 2:
            table.delete({"k": (ROWS + number) // 2})
    found = load(changes_after="before", columns="k,name")
    expected = ordered(table.changes("before", columns=["k", "name"]).read_all())
    assert of_spark(found) == expected
    deleted = [row for row in found.collect() if row["_change"] == "delete"]
    assert len({row["k"] for row in deleted if row["k"] >= ROWS // 2}) == 10


@pytest.mark.slow
def test_metadata_are_rows(instance: Instance, table: Table, load: Load) -> None:
    table.consumer("etl", from_="before")
    files = load(metadata="files").collect()
    assert {row.filename: row.row_count for row in files} == {
        f.filename: f.row_count for f in table.file_page()
    }
    partitions = {row.partition_id: row for row in load(metadata="partitions").collect()}
    assert sum(row.is_leaf for row in partitions.values()) == len(table.partitions.leaves())
    assert json.loads(partitions["root"].region) == {}
    jobs = table.context.jobs
    jobs.create_of_shared([leaf.partition_id for leaf in table.partitions.leaves()])
    taken = jobs.take(1)
    reported = {row.job_id: row for row in load(metadata="jobs").collect()}
    assert len(reported) == jobs.count()[0] > 1
    assert [one.job_id for one in reported.values() if one.is_running] == [job.job_id for job in taken]
    assert (reported[taken[0].job_id].attempts, reported[taken[0].job_id].partition_id) == (
        1,
        taken[0].partition_id,
    )
    [cut] = load(metadata="cuts").collect()
    assert (cut.name, cut.recorded_at.timestamp()) == (
        "before",
        table.history.cut("before").recorded_at.timestamp(),
    )
    [consumer] = load(metadata="consumers").collect()
    assert (consumer.name, consumer.rows_behind) == ("etl", 20)


@pytest.mark.slow
def test_a_read_whose_file_was_collected_names_the_file(instance: Instance, table: Table, load: Load) -> None:
    frame = load(as_of="before")
    table.context.objects.delete([file.filename for file in table.file_page()])
    query(instance._supplier, f"delete from file_content_{table.context.table.table_id}")
    with pytest.raises(Exception, match=r"ObjectNotFound: file 'data/.*' of table 't' was deleted"):
        frame.collect()


def writer(frame: DataFrame, instance: Instance, dsn: str, **options: str) -> Any:
    named = {"dsn": dsn, "objects": instance._tables.objects.url, "table": "t"}
    return frame.write.format("dormouse").options(**named, **options).mode("append")


def frame_of(spark: SparkSession, first: int, count: int) -> DataFrame:
    return spark.createDataFrame(rows(first, count)).repartition(3)


def test_a_write_adds_its_rows_in_one_commit(
    spark: SparkSession, instance: Instance, dsn: str, table: Table
) -> None:
    before = ordered(table.query().read_all())
    files = {file.filename for file in table.file_page()}
    writer(frame_of(spark, 2_000, 90), instance, dsn).save()
    added = [file for file in table.file_page() if file.filename not in files]
    assert len(added) == 3
    assert sum(file.row_count or 0 for file in added) == 90
    assert ordered(table.query().read_all()) == sorted([*before, *ordered(rows(2_000, 90))], key=repr)
    assert {report.kind for report in instance.check(deep=True).problems} == set()


@pytest.mark.slow
def test_one_ingest_id_adds_once(spark: SparkSession, instance: Instance, dsn: str, table: Table) -> None:
    for _ in range(2):
        writer(frame_of(spark, 2_000, 10), instance, dsn, ingest_id="monday").save()
    assert table.query({"k": dm.Range(1_000)}).read_all().num_rows == 10


@pytest.mark.slow
def test_a_write_that_fails_leaves_nothing(
    spark: SparkSession, instance: Instance, dsn: str, table: Table, tmp_path: Path
) -> None:
    objects = sorted(tmp_path.rglob("data/**/*.parquet"))
    frame = frame_of(spark, 2_000, 90)
    failing = when(col("k") == 1_020, raise_error(lit("no more"))).otherwise(col("name"))
    broken = frame.withColumn("name", failing)
    with pytest.raises(Exception, match="no more"):
        writer(broken, instance, dsn).save()
    assert table.query({"k": dm.Range(1_000)}).read_all().num_rows == 0
    # a task may still write when Spark gives up the others
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    wait_until(lambda: sum(one.numRunningTasks() for one in tracker.getExecutorInfos()) == 0)
    query(instance._supplier, "update write_attempt set finished_at = finished_at - interval '1 week'")
    instance._tables.context(table.files.table).attempts.collect(table.files.table)
    assert sorted(tmp_path.rglob("data/**/*.parquet")) == objects
    assert query(instance._supplier, "select count(*) from write_attempt where table_id > 0")[0][0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tabel": "t"}, r"InvalidInput: unknown option 'tabel'; did you mean 'table'\?"),
        ({"table": "u"}, "TableNotFound: table 'u' does not exist"),
        ({"where": "carrier=UA"}, "InvalidQuery: the option where is JSON"),
        ({"where": '{"kk": 1}'}, "InvalidQuery: unknown column 'kk'; did you mean 'k'"),
        ({"columns": "k,zz"}, "InvalidQuery: unknown column 'zz'"),
        ({"as_of": "2026-01-01T00:00"}, "InvalidCut: the time .* has no zone"),
        ({"as_of": "nothing"}, "InvalidCut: table 't' has no cut 'nothing'"),
        (
            {"as_of": "before", "changes_after": "before"},
            "InvalidInput: the options changes_after and as_of do not",
        ),
        ({"changes_after": "before", "max_rows_per_batch": "9"}, "max_rows_per_batch is for streams"),
        ({"changes_till": "before"}, "InvalidInput: the option changes_till needs changes_after"),
        (
            {"metadata": "file"},
            "InvalidInput: the option metadata is one of files, partitions, cuts, jobs, consumers",
        ),
        (
            {"split_bytes": "1 GB"},
            "InvalidInput: the option split_bytes is a whole number above 0, not '1 GB'",
        ),
        (
            {"instance": "/nowhere"},
            "InvalidInput: give the option instance, or dsn and objects, not both",
        ),
    ],
)
def test_bad_options_are_reported_in_one_line(
    spark: SparkSession, instance: Instance, dsn: str, table: Table, options: dict[str, str], message: str
) -> None:
    named = {"dsn": dsn, "objects": instance._tables.objects.url, "table": "t", **options}
    with pytest.raises(Exception, match=message):
        spark.read.format("dormouse").options(**named).load().count()


@pytest.mark.slow
def test_invalid_writes_are_refused_before_a_task_runs(
    spark: SparkSession, instance: Instance, dsn: str, table: Table
) -> None:
    frame = frame_of(spark, 0, 10)
    for save, message in [
        (lambda: writer(frame.drop("day"), instance, dsn).save(), "InvalidData: column 'day' .* is missing"),
        (lambda: writer(frame, instance, dsn, where="{}").save(), "InvalidInput: unknown option 'where'"),
        (
            lambda: writer(frame, instance, dsn).mode("overwrite").save(),
            "InvalidInput: a write only adds rows",
        ),
        (lambda: writer(frame, instance, dsn).save("somewhere"), "InvalidInput: unknown option 'path'"),
    ]:
        with pytest.raises(Exception, match=message):
            save()
    assert query(instance._supplier, "select count(*) from write_attempt")[0][0] == 0


@pytest.mark.slow
def test_changed_tables_and_missing_folders_are_reported_in_one_line(
    spark: SparkSession, instance: Instance, dsn: str, table: Table, load: Load, tmp_path: Path
) -> None:
    """A table may change between the making of a DataFrame and its use, and a folder may not exist."""
    frame, url = load(), instance._tables.objects.url
    given = spark.read.format("dormouse").schema("k long").options(dsn=dsn, objects=url, table="t")
    with pytest.raises(Exception, match=r"InvalidInput: the columns of the read are not those of table 't'"):
        given.load().count()
    table.rename_column("day", "date")
    with pytest.raises(Exception, match=r"InvalidInput: the columns of the read are not those of table 't'"):
        frame.count()
    instance.drop_table("t")
    with pytest.raises(Exception, match="TableNotFound: table 't' does not exist"):
        frame.count()
    with pytest.raises(Exception, match=r"NotAnInstance: there is no instance in .*nowhere.* each worker"):
        spark.read.format("dormouse").options(instance=str(tmp_path / "nowhere"), table="t").load()


@pytest.mark.slow
def test_read_accepts_the_same_moments_as_queries(
    spark: SparkSession, instance: Instance, table: Table
) -> None:
    at = clock(instance)
    count = table.query().read_all().num_rows
    table.ingest(rows(1_000, 10))
    assert dormouse.spark.read(spark, table, as_of=at).count() == count
    with pytest.raises(InvalidCut):
        dormouse.spark.read(spark, table, as_of="nothing")
