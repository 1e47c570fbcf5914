"""Files at URLs, read by Spark, that lack columns of the table or have additional ones."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import dormouse as dm
from dormouse.datasource import job
from dormouse.errors import InvalidData, JobFailed
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance, Table

SCHEMA = OF_K_AND_TEXTS
FED = pa.table({"k": [1], "v": ["a"]})
DEFAULTS: dict[str, tuple[dm.DataType, Any, Any]] = {
    "text": (dm.STRING, "it's \\ \0 é ${x}", "x"),
    "whole": (dm.INT, -7, 1),
    "large": (dm.LONG, 1 << 62, 2),
    "real": (dm.DOUBLE, -0.0, 0.5),
    "small": (dm.FLOAT, 0.1, 0.5),
    "price": (dm.DECIMAL(9, 2), Decimal("1.50"), Decimal("0.01")),
    "at": (dm.TIMESTAMP, datetime(1066, 1, 2, 3, 4, 5, 6, UTC), datetime(2024, 1, 2, tzinfo=UTC)),
    "day": (dm.DATE, date(33, 4, 3), date(2024, 1, 2)),
    "yes": (dm.BOOLEAN, True, False),
    "bytes": (dm.BYTES, b"\0\xff'", b"x\xfe"),
}


def with_columns(instance: Instance, columns: dict[str, tuple[dm.DataType, Any, Any]], **more: Any) -> Table:
    table = instance.create_table("t", SCHEMA, **more)
    for number, (name, (kind, default, _)) in enumerate(columns.items()):
        table.add_column(dm.Field(name, kind, nullable=number % 2 == 0), default)
    return table


def written(folder: Path, **files: pa.Table) -> str:
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        pq.write_table(rows, folder / f"{name}.parquet")
    return folder.as_uri()


def shown(table: Table) -> list[dict[str, Any]]:
    return list(table.query().read_all().to_pylist())


@pytest.mark.slow
@pytest.mark.parametrize("is_vectorized", ["true", "false"])
def test_files_that_lack_a_column_have_its_default(
    spark: SparkSession, instance: Instance, tmp_path: Path, is_vectorized: str
) -> None:
    """A null in a file stays null, whichever Parquet reader the session uses."""
    setting, columns = "spark.sql.parquet.enableVectorizedReader", DEFAULTS
    table = with_columns(instance, columns)
    whole = {name: pa.array([value]) for name, (_, _, value) in columns.items()}
    url = written(
        tmp_path / "in",
        old=FED,
        new=pa.table({"k": [2], "v": ["b"], **whole}).select(["v", *whole, "k"]),
        nulls=pa.table({"k": [3], "v": ["c"], "text": pa.nulls(1, pa.string())}),
    )
    spark.conf.set(setting, is_vectorized)
    try:
        assert table.ingest(url, engine="spark").rows == 3
    finally:
        spark.conf.unset(setting)
    defaults = {name: default for name, (_, default, _) in columns.items()}
    old, new, nulls = shown(table)
    assert old == {"k": 1, "v": "a", **defaults, "small": float(np.float32(0.1))}
    assert math.copysign(1, old["real"]) == -1
    assert new == {"k": 2, "v": "b", **{name: value for name, (_, _, value) in columns.items()}}
    assert nulls == {**old, "k": 3, "v": "c", "text": None}


@pytest.mark.slow
def test_numbers_that_are_narrower_in_files_have_a_default_that_is_wider(
    spark: SparkSession, instance: Instance, tmp_path: Path
) -> None:
    table = instance.create_table("t", SCHEMA)
    table.add_column(dm.Field("n", dm.LONG), 1 << 62)
    table.add_column(dm.Field("r", dm.DOUBLE), 0.1)
    table.add_column(dm.Field("d", dm.DECIMAL(12, 2)), Decimal("1234567.89"))
    new = FED.set_column(0, "k", pa.array([2]))
    for name, values in {
        "n": pa.array([5], pa.int32()),
        "r": pa.array([0.5], pa.float32()),
        "d": pa.array([Decimal("2.50")], pa.decimal128(5, 2)),
    }.items():
        new = new.append_column(name, values)
    table.ingest(written(tmp_path / "in", old=FED, new=new), engine="spark")
    assert shown(table) == [
        {"k": 1, "v": "a", "n": 1 << 62, "r": 0.1, "d": Decimal("1234567.89")},
        {"k": 2, "v": "a", "n": 5, "r": 0.5, "d": Decimal("2.50")},
    ]


@pytest.mark.slow
def test_an_upsert_of_such_files_keeps_their_order(
    spark: SparkSession, instance: Instance, tmp_path: Path
) -> None:
    properties = dm.TableProperties(keep="newest_row")
    table = with_columns(instance, {"text": DEFAULTS["text"]}, properties=properties)
    new = FED.append_column("text", pa.array(["x"]))
    for old, text in (("1", "x"), ("3", DEFAULTS["text"][1])):
        table.upsert(written(tmp_path / old, **{old: FED, "2": new}), engine="spark")
        assert shown(table) == [{"k": 1, "v": "a", "text": text}]


@pytest.mark.slow
def test_columns_of_files_at_urls_are_added(spark: SparkSession, instance: Instance, tmp_path: Path) -> None:
    table = instance.create_table("t", SCHEMA)
    more = pa.table({"k": [2], "v": ["b"], "n": [1], "tags": [["x"]]})
    url = written(tmp_path / "in", old=FED, new=more)
    with pytest.raises(InvalidData, match=r"column 'n' is not in the schema; .*evolve=\"add\""):
        table.ingest(url, engine="spark")
    assert table.ingest(url, engine="spark", evolve="add").rows == 2
    assert shown(table) == [
        {"k": 1, "v": "a", "n": None, "tags": None},
        {"k": 2, "v": "b", "n": 1, "tags": ["x"]},
    ]
    with pytest.raises(JobFailed, match="PATH_NOT_FOUND"):
        table.ingest((tmp_path / "nothing").as_uri(), engine="spark", evolve="add")


@pytest.mark.slow
def test_a_job_of_spark_submit_adds_columns(
    spark: SparkSession, instance: Instance, dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = instance.create_table("t", SCHEMA)
    more = pa.table({"k": [2], "v": ["b"], "n": [1]})
    of = ("--dsn", dsn, "--objects", instance.objects.url)
    url = written(tmp_path / "in", old=FED, new=more)
    for number, path in enumerate((url, str(tmp_path / "in"))):
        assert job.main(["ingest", "t", path, *of]) == (2 if number == 0 else 0)
        assert job.main(["ingest", "t", path, *of, "--add-columns"]) == 0
    capsys.readouterr()
    assert [row["n"] for row in shown(table)] == [None, None, None, 1, 1, 1]
