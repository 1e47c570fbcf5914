"""Ingest with Spark: DataFrames and files, skew, many leaves, repeated tasks, and errors in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingested import (
    PLAIN,
    SCHEMA,
    attempts,
    check_holds,
    check_untouched,
    column_set,
    flights,
    flights_table,
    nulled,
)
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, expr, lit, when

from dormouse.errors import InvalidData, JobFailed, ObjectStoreError
from dormouse.model.region import KeyValue
from dormouse.sources.data_files import find_files
from dormouse.sources.source_files import prepared, read_file
from dormouse.spark import ingest, shuffle
from dormouse.spark.frames import rows_at
from dormouse.spark.ingest import TASK_ROWS_DRAWN, Draw, ingest_with_spark, split_points
from dormouse.spark.shuffle import keys_of_partitions
from dormouse.writing import ingest as ingest_module
from tests.small_tables import made
from tests.support.api import Instance
from tests.support.model import LONG, STRING, Field, Schema, encode_value
from tests.support.state import TableContext

NewTable = Callable[..., TableContext]


@pytest.fixture
def new_flights(dsn: str, supplier: object, tmp_path: Path) -> NewTable:
    return lambda **options: flights_table(dsn, supplier, tmp_path, **options)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def written(rows: pa.Table, folder: Path, parts: int = 2) -> Path:
    step = -(-rows.num_rows // parts)
    for part in range(parts):
        pq.write_table(rows.slice(part * step, step), folder / f"{part}.parquet", row_group_size=1_000)
    return folder


@pytest.mark.slow
def test_each_target_has_a_key_that_spark_hashes_to_it(spark: SparkSession) -> None:
    hashes = spark.range(2_000).select(expr("hash(cast(id as int))")).collect()
    for partitions in (1, 7, 200):
        keys = keys_of_partitions(partitions)
        assert [hashes[key][0] % partitions for key in keys] == list(range(partitions))


@pytest.mark.few(1)
@pytest.mark.parametrize("writing", ["one_file_per_leaf", "one_reference_per_leaf"])
def test_rows_of_a_dataframe_and_of_files_reach_their_leaves(
    spark: SparkSession, new_flights: NewTable, files: Path, writing: str
) -> None:
    """There are more leaves than tasks, divided by both row keys. Most leaves are empty."""
    points: list[KeyValue] = [f"Z{number:03}" for number in range(100)]
    table = new_flights(split_points=["B6", "DL", "UA", *points], ingest_file_writing=writing)
    leaf = table.partitions.leaves()[2].partition_id
    table.partitions.split(leaf, 0, field="flight")
    rows = flights(10_000)
    frame = spark.read.parquet(str(written(rows, files)))
    seen: list[tuple[int, int | None]] = []
    report = ingest_with_spark(
        table, frame, ingest_id="july", progress=lambda done, total: seen.append((done, total))
    )
    assert (report.rows, report.references, report.applied) == (10_000, 6, True)
    assert seen == [(10_000, 10_000)]
    check_holds(table, rows)
    assert not ingest_with_spark(table, frame, ingest_id="july").applied
    assert ingest_with_spark(table, files, spark=spark).rows == 10_000
    check_holds(table, rows, rows)
    assert attempts(table) == 0


@pytest.mark.slow
def test_one_leaf_may_receive_all_rows_and_an_empty_frame_adds_none(
    spark: SparkSession, new_flights: NewTable, files: Path
) -> None:
    table, rows = new_flights(split_points=[]), flights(10_000)
    written(rows, files)
    assert ingest_with_spark(table, str(files / "*.parquet"), spark=spark).files == 1
    check_holds(table, rows)
    empty = spark.createDataFrame([], spark.read.parquet(str(files)).schema)
    assert ingest_with_spark(table, empty).files == 0
    check_holds(table, rows)


@pytest.mark.slow
def test_an_empty_table_is_divided_where_its_rows_will_be(
    spark: SparkSession, new_flights: NewTable, files: Path
) -> None:
    """A sample gives leaves of about equal size. Tables with enough leaves, or with files, are not
    divided.
    """
    schema = Schema([Field("flight", LONG), Field("carrier", STRING)], SCHEMA.sort_keys, SCHEMA.values)
    table = new_flights(schema=schema, split_points=[-49], bulk_ingest_leaves_min=8)  # far from any quantile
    rows = flights(20_000, schema=schema)
    written(rows, files)
    points = split_points(str(files), schema, 8, spark=spark)
    assert points == sorted(points) and len(points) == 7
    frame = spark.read.parquet(str(files))
    assert split_points(frame.where("flight = 7"), schema, 8) == []
    report = ingest_with_spark(table, files, spark=spark)
    leaves = table.partitions.leaves()
    assert report.files == len(leaves) == 8 + 1
    counts = [reference.row_count for reference in table.store.file_references()]
    assert sum(counts) == 20_000 and max(counts) < 5_000
    ingest_with_spark(table, frame)
    assert table.partitions.leaves() == leaves


def test_a_task_draws_a_fixed_number_of_values() -> None:
    batches = [pa.record_batch({"key": range(first, first + 100)}) for first in range(0, 20_000, 100)]
    [drawn] = Draw(Field("key", LONG)).run([pa.record_batch({"key": pa.array([], pa.int64())}), *batches])
    assert drawn.num_rows == len(set(drawn["value"].to_pylist())) == TASK_ROWS_DRAWN
    assert sum(drawn["weight"].to_pylist()) == pytest.approx(20_000)
    low = sum(value < encode_value(LONG, 5_000) for value in drawn["value"].to_pylist())
    assert low / TASK_ROWS_DRAWN == pytest.approx(0.25, abs=0.08)
    assert list(Draw(Field("key", LONG)).run([])) == []


def test_the_size_of_blobs_is_limited(monkeypatch: pytest.MonkeyPatch, new_flights: NewTable) -> None:
    monkeypatch.setattr(shuffle, "BLOB_BYTES", 10_000)
    monkeypatch.setattr(shuffle, "CHUNK_BYTES", 50_000)
    lookup = ingest.LeafLookup(new_flights().partitions.tree())
    rows = flights(10_000)
    scatter = shuffle.Scatter(SCHEMA, lookup, shuffle.Targets.of(3, 2))
    blobs = list(scatter.run(rows.to_batches(500)))
    assert max(blob.nbytes for blob in blobs) < 20_000
    assert len({blob.column(0)[0].as_py() for blob in blobs}) == 2
    assert [sent for blob in blobs if (sent := blob.column(2)[0].as_py()) is not None] == [10_000]
    moved = [b for blob in blobs[:-1] for b in pa.ipc.open_stream(blob.column(1)[0].as_buffer())]
    assert sum(batch.num_rows for batch in moved) == 10_000


@pytest.mark.slow
def test_files_of_repeated_tasks_are_deleted(
    spark: SparkSession, new_flights: NewTable, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    """A task attempt that Spark ran twice leaves files that the driver does not commit."""
    table, rows = new_flights(), flights(1_000)
    real = ingest_module.commit_files

    def with_leftovers(context: TableContext, attempt: object, *given: object, **more: object) -> bool:
        prefix = attempt.object_prefix  # type: ignore[attr-defined]
        table.objects.put(f"{prefix}0-twice.parquet", b"rows")
        table.objects.put(f"{prefix}0-twice.parquet.sketches", b"keys")
        return real(context, attempt, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ingest_module, "commit_files", with_leftovers)
    ingest_with_spark(table, written(rows, files), spark=spark)
    check_holds(table, rows)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rows", "tally"])
def test_rows_that_the_shuffle_loses_fail_the_ingest(
    spark: SparkSession, new_flights: NewTable, monkeypatch: pytest.MonkeyPatch, files: Path, lost: str
) -> None:
    """Each task of the first stage sends the number of its rows together with the rows."""
    table = new_flights(split_points=[])
    source = written(flights(1_000), files)
    blobs_of = ingest._blobs
    losing = "sent is not null" if lost == "rows" else "sent is null"
    monkeypatch.setattr(ingest, "_blobs", lambda *given: blobs_of(*given).where(losing))
    with pytest.raises(JobFailed, match=r"read 1,000 rows and wrote 0|read 0 rows and wrote 1,000"):
        ingest_with_spark(table, source, spark=spark)
    check_untouched(table)


@pytest.mark.slow
def test_bad_data_is_reported_in_one_line_and_leaves_nothing(
    spark: SparkSession, new_flights: NewTable, files: Path, tmp_path: Path
) -> None:
    table, rows = new_flights(schema=PLAIN), flights(2_000, schema=PLAIN)
    frame = spark.read.parquet(str(written(rows, files)))
    nulls = tmp_path / "nulls.parquet"
    pq.write_table(nulled(rows, "flight", 1_500), nulls)
    text = tmp_path / "text.parquet"
    pq.write_table(column_set(rows, "flight", rows["carrier"]), text)
    cases = [
        (frame.drop("time"), "'time' .* missing"),
        (frame.withColumn("tail", lit(1)), "'tail' is not in the schema"),
        (frame.withColumn("flight", lit("x")), "'flight' is string"),
        (frame.withColumn("flight", when(col("flight") != 7, col("flight"))), "'flight' .*null"),
        (nulls, r"nulls\.parquet.*'flight' .*null"),
        (text, r"text\.parquet.*'flight' is string"),
        (tmp_path / "nowhere", "nowhere.*does not exist"),
        (rows, "Spark cannot ingest Table"),
    ]
    for data, message in cases:
        with pytest.raises(InvalidData, match=message) as raised:
            ingest_with_spark(table, data, spark=spark)
        assert "\n" not in str(raised.value)
        check_untouched(table)


@pytest.mark.slow
def test_all_files_at_urls_are_inspected(spark: SparkSession, instance: Instance, files: Path) -> None:
    """Spark alone would assume that all files have the columns of one. No setting of a session may restore
    that.
    """
    table = made(instance)
    for name, columns in (("a", ("k", "v")), ("b", ("k", "v", "w"))):
        pq.write_table(pa.table({column: [1, 2] for column in columns}), files / f"{name}.parquet")
    urls = [(files / name).as_uri() for name in ("a.parquet", "b.parquet")]
    with pytest.raises(InvalidData, match="column 'w' is not in the schema"):
        table.ingest(urls, engine="spark")
    whole = (files / "a.parquet").read_bytes()
    (files / "b.parquet").write_bytes(whole[: len(whole) // 2])
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with pytest.raises(JobFailed, match=r"b\.parquet"):
            table.ingest(urls, engine="spark")
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
    assert table.status().files == 0


@pytest.mark.slow
def test_whole_numbers_at_urls_are_as_wide_as_the_widest(spark: SparkSession, tmp_path: Path) -> None:
    """Spark alone does not merge INT32 with INT64."""
    for name, kind in (("1 [x]", pa.int32()), ("2", pa.int64())):
        pq.write_table(pa.table({"k": pa.array([int(name[0])], kind)}), tmp_path / f"{name}.parquet")
    frame = rows_at(spark, [f"file://{tmp_path}/*.parquet"])
    assert frame.schema.simpleString() == "struct<k:bigint>"
    assert sorted(row.k for row in frame.collect()) == [1, 2]
    pq.write_table(pa.table({"k": ["x"]}), tmp_path / "3.parquet")
    with pytest.raises(Exception, match="CANNOT_MERGE"):
        rows_at(spark, [f"file://{tmp_path}"])


@pytest.mark.slow
def test_a_task_that_cannot_write_leaves_nothing(
    spark: SparkSession, new_flights: NewTable, files: Path
) -> None:
    table = new_flights()
    root = Path(table.objects.uri("data")).parent
    root.mkdir(parents=True)
    (root / "data").write_text("in the way")
    with pytest.raises(ObjectStoreError) as raised:
        ingest_with_spark(table, written(flights(100), files), spark=spark)
    assert "\n" not in str(raised.value)
    (root / "data").unlink()
    check_untouched(table)


def test_errors_in_a_part_of_a_file_have_row_numbers_of_the_file(tmp_path: Path) -> None:
    rows = nulled(flights(3_000, schema=PLAIN), "flight", 2_500)
    pq.write_table(rows, tmp_path / "parts.parquet", row_group_size=1_000)
    with pytest.raises(InvalidData, match=r"is in row 2,500 \(counted from 0\)"):
        list(read_file(prepared(find_files(tmp_path / "parts.parquet")[0], PLAIN), PLAIN, [1, 2]))
