"""Failures during a Spark job: the driver raises an error of one clear line, and nothing is committed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import dormouse as dm
import dormouse.spark
from dormouse.errors import ObjectStoreError
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.spark.worker import check_arrived
from tests.small_tables import SCHEMA, add, keys, made
from tests.support.api import Instance, Table
from tests.support.objects import open_store

Change = Callable[[Instance], object]
SECONDS_MAX = 300


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def instance(dsn: str, url: str) -> Iterator[Instance]:
    with dm.connect(dsn, url) as opened:
        yield opened


def meanwhile(frame: DataFrame, dsn: str, url: str, change: Change) -> DataFrame:
    """Returns the frame, changed so that each task first makes a change. Tasks accept only a local
    function.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with dm.connect(dsn, url) as opened:
            change(opened)
        yield from batches

    return frame.mapInArrow(run, frame.schema)


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, 100, 1, 1).selectExpr("id as k", "id as v")


def written(frame: DataFrame, table: Table, options: dict[str, str], by: str) -> None:
    if by == "sink":
        frame.write.format("dormouse").options(**options, table="t").mode("append").save()
    else:
        dormouse.spark.write(frame, table)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("by", ["sink", "function"])
def test_dropping_a_table_while_rows_are_written_is_reported_and_leaves_no_files(
    spark: SparkSession, instance: Instance, dsn: str, url: str, by: str
) -> None:
    table = made(instance)
    frame = meanwhile(rows(spark), dsn, url, lambda opened: opened.drop_table("t"))
    with pytest.raises(Exception) as raised:
        written(frame, table, {"dsn": dsn, "objects": url}, by)
    reported = f"{type(raised.value).__name__}: {raised.value}"
    message = r"(TableNotFound: table 't' |AttemptAbandoned: attempt \w+ .*its table was dropped)"
    assert re.search(message, reported), reported
    # a task may still write when its job is given up
    instance._attempts.collect_abandoned(table.files.table.table_id)
    assert list(instance.orphans(timedelta())) == []


@pytest.mark.slow
@pytest.mark.parametrize("by", ["sink", "function"])
def test_rows_that_are_written_while_a_column_is_added_have_its_default(
    spark: SparkSession, instance: Instance, dsn: str, url: str, by: str
) -> None:
    table = made(instance)
    field = dm.Field("w", dm.LONG)
    frame = meanwhile(rows(spark), dsn, url, lambda opened: opened.table("t").add_column(field, default=1))
    written(frame, table, {"dsn": dsn, "objects": url}, by)
    assert table.query(columns=["k", "w"]).read_all().to_pylist() == [{"k": k, "w": 1} for k in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["copied", "t"])
def test_a_table_that_is_dropped_ends_the_stream(
    spark: SparkSession, instance: Instance, dsn: str, url: str, tmp_path: Path, gone: str
) -> None:
    source = made(instance)
    add(source, 0)
    columns = [*SCHEMA.values, dm.Field("_change", dm.STRING)]
    instance.create_table("copied", dm.Schema(SCHEMA.row_keys, values=columns))
    named = {"dsn": dsn, "objects": url}
    frame = spark.readStream.format("dormouse").options(**named, table="t", changes_after="beginning").load()
    writer = frame.writeStream.format("dormouse").option("checkpointLocation", str(tmp_path / "checkpoint"))
    running = writer.options(**named, table="copied", stream="copy").start()
    try:
        running.processAllAvailable()
        instance.drop_table(gone)
        if gone == "copied":
            add(source, 100)
        with pytest.raises(Exception, match=rf"TableNotFound: table '{gone}' "):
            running.awaitTermination(SECONDS_MAX)
    finally:
        running.stop()


@pytest.fixture
def unseen(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """Yields an instance whose store has a relative path, so that each process finds another folder."""
    monkeypatch.chdir(tmp_path)
    with dm.connect(dsn, "file:///proc/self/cwd/lake") as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs a folder that differs by process")
def test_a_folder_that_workers_do_not_share_is_reported(
    spark: SparkSession, unseen: Instance, tmp_path: Path
) -> None:
    assert not (Path(spark._jvm.System.getProperty("user.dir")) / "lake").exists()  # type: ignore[union-attr]
    table = made(unseen)
    message = "driver and workers must see one folder file:///proc/self/cwd/lake, but the worker "
    with pytest.raises(ObjectStoreError, match=message):
        dormouse.spark.write(rows(spark), table)
    assert keys(table) == []
    for first in (0, 0):
        add(table, first)
    report = table.compact(engine="spark")
    assert (report.jobs_run, report.given_up) == (0, 1)
    assert report.errors[0].startswith(message)
    assert keys(table) == sorted([*range(20)] * 2)
    with pytest.raises(Exception, match=f"ObjectStoreError: {message}"):
        merged(spark, unseen).count()


def merged(spark: SparkSession, instance: Instance) -> DataFrame:
    """Returns the rows of a table, which tasks of Dormouse must merge."""
    properties = dm.TableProperties(keep="newest_row")
    table = instance.create_table("merged", SCHEMA, properties=properties)
    add(table, 0)
    return dormouse.spark.read(spark, table)


def test_files_in_a_folder_of_another_machine_are_not_committed(tmp_path: Path) -> None:
    """The worker has its own folder with the same path."""
    objects = open_store(tmp_path)
    reference = FileReference(filename="data/t1/a.v2.parquet", partition_id="root", row_count=1)
    with pytest.raises(ObjectStoreError, match=r"'data/t1/a\.v2\.parquet', which a worker wrote, is not"):
        check_arrived(objects, [FileWithReferences(filename=reference.filename, references=(reference,))])


@pytest.mark.slow
def test_a_missing_file_is_an_error_with_any_setting_of_the_session(
    spark: SparkSession, instance: Instance
) -> None:
    table = made(instance)
    add(table, 0)
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        frame = dormouse.spark.read(spark, table)
        instance._tables.objects.delete([file.filename for file in table.file_page()][:1])
        with pytest.raises(Exception, match=r"FILE_NOT_EXIST|does not exist"):
            frame.count()
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")
