"""Keyed tables on Spark: loads of DataFrames and of files, and compaction as tasks."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_tables import MARKS, data, delete_keys, keyed, seen, upsert
from pyspark.sql import SparkSession

from dormouse.errors import InvalidData, InvalidInput, JobFailed
from dormouse.spark import frames, ingest
from tests.support.api import Instance


@pytest.mark.slow
def test_a_dataframe_brings_rows_and_marks_and_its_later_rows_win(
    spark: SparkSession, instance: Instance
) -> None:
    table = keyed(instance, split_threshold_rows=20, split_min_rows=2)
    upsert(table, *((key, -1) for key in range(60)))
    table.split()
    rows = [(number % 50, number, "x", number % 50 == 7) for number in range(400)]
    frame = spark.createDataFrame(rows, f"k long, v long, s string, {MARKS} boolean").repartition(1)
    frame = spark.createDataFrame(sorted(frame.collect(), key=lambda row: row.v), frame.schema).coalesce(4)
    assert table.upsert(frame, deletes=MARKS).rows == 50
    expected = dict.fromkeys(range(50, 60), -1) | {number % 50: number for number in range(400)}
    del expected[7]
    assert seen(table, instance) == expected
    with pytest.raises(InvalidData, match=f"column '{MARKS}' is not in the schema"):
        table.upsert(frame)


@pytest.mark.slow
def test_an_upsert_that_would_lose_values_names_the_merge(
    spark: SparkSession, instance: Instance, tmp_path: Path
) -> None:
    table = keyed(instance)
    upsert(table, (1, 1))
    pq.write_table(pa.table({"k": [1], "v": [2]}), tmp_path / "part.parquet")
    url = (tmp_path / "part.parquet").as_uri()
    for given in (spark.createDataFrame([(1, 2)], "k long, v long"), url, url.removeprefix("file://")):
        with pytest.raises(InvalidInput, match=r"lacks column 's', .* use dormouse\.spark\.merge"):
            table.upsert(given, engine="spark")
    assert seen(table, instance) == {1: 1}


@pytest.mark.slow
def test_files_are_loaded_and_compacted_by_tasks(
    spark: SparkSession, instance: Instance, tmp_path: Path
) -> None:
    table = keyed(instance)
    folder = tmp_path / "changes"
    folder.mkdir()
    for number in range(3):
        rows = [(key, number) for key in range(number, 30, number + 1)]
        pq.write_table(data(rows, [key == 9 for key, _ in rows]), folder / f"{number}.parquet")
    table.upsert(str(folder), deletes=MARKS, engine="spark")
    delete_keys(table, 4)
    expected = {key: max(n for n in range(3) if key >= n and not (key - n) % (n + 1)) for key in range(30)}
    for key in (4, 9):
        del expected[key]
    assert seen(table, instance) == expected
    assert table.compact(engine="spark").jobs_run == 1
    assert (seen(table, instance), table.status().row_count) == (expected, len(expected))


@pytest.mark.slow
def test_rows_that_the_shuffle_loses_fail_the_load(
    spark: SparkSession, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = keyed(instance)
    blobs_of = ingest._blobs
    rows = spark.range(1_000).selectExpr("id as k", "id as v", "'x' as s")
    monkeypatch.setattr(
        ingest, "_blobs", lambda *given: blobs_of(*given).where("sent is not null or rand(7) < 0.5")
    )
    with pytest.raises(JobFailed, match=r"sent 1,000 rows and received \d+; nothing was added"):
        table.upsert(rows.repartition(8))
    assert table.status().files == 0


@pytest.mark.slow
@pytest.mark.parametrize(("given", "listings"), [("files", 1), ("folder", 1), ("pattern", 2)])
def test_the_later_file_of_urls_wins_even_if_it_is_smaller(
    spark: SparkSession,
    instance: Instance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    listings: int,
) -> None:
    table, days = keyed(instance), [tmp_path / "days" / f"day {number}.parquet" for number in (1, 2)]
    days[0].parent.mkdir()
    pq.write_table(data([(7, 1)]), days[0])
    pq.write_table(data((key, 2) for key in range(2_000)), days[1])
    # Spark reads each file as a partition
    spark.conf.set("spark.sql.files.maxPartitionBytes", "1mb")
    try:
        paths = {"files": days, "folder": [days[0].parent], "pattern": [days[0].parent / "day*"]}[given]
        listed = Mock(side_effect=frames._plain_names)
        monkeypatch.setattr(frames, "_plain_names", listed)
        table.upsert([f"file://{path}" for path in paths], engine="spark")
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert table.query({"k": 7}, ["v"]).read_all()["v"].to_pylist() == [2]
    assert listed.call_count == listings
