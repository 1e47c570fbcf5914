"""A driver that tests run on a Spark cluster. It does one kind of work and prints the result as JSON.

python -m tests.on_cluster WORK FOLDER [READING]

The environment names the instance and the cluster. `READING` is the file for `held.reading`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import dormouse as dm
from dormouse.settings import load_settings
from dormouse.spark.session import spark_session
from tests.held import WRITES, reading

ROWS = 40_000
TASKS = 4
CONFIG = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.default.parallelism": "2",
    "spark.sql.shuffle.partitions": str(TASKS),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.network.timeout": "600s",
    "spark.python.daemon.module": "tests.held",
    "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", ""),
    f"spark.executorEnv.{WRITES}": os.environ.get(WRITES, ""),
}


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, TASKS).selectExpr("id as k", "id * 2 as v")


def read(spark: SparkSession) -> DataFrame:
    return spark.read.format("dormouse").options(table="t", split_bytes="1").load()


def stream(frame: DataFrame, folder: str) -> None:
    writer = frame.writeStream.format("dormouse").option("checkpointLocation", f"{folder}/checkpoint")
    query = writer.options(table="copied", stream="copy").trigger(availableNow=True).start()
    query.awaitTermination()


def changes(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("dormouse").options(table="t", changes_after="beginning").load()


def main() -> None:
    work, folder, *held = sys.argv[1:]
    spark = spark_session(config=CONFIG)

    def through(frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(reading(held[0]), frame.schema) if held else frame

    settings = load_settings()
    assert settings.dsn and settings.objects
    found: Any = None
    with dm.connect(settings.dsn, settings.objects) as instance:
        table = instance.table("t")
        if work == "ingest":
            found = table.ingest(through(rows(spark)), ingest_id="once").rows
        elif work == "compaction":
            report = table.compact(engine="spark")
            found = [report.jobs_run, report.given_up, *report.errors]
        elif work == "source":
            found = sorted(row.k for row in through(read(spark)).select("k").collect())
        elif work == "sink":
            through(rows(spark)).write.format("dormouse").options(table="t").mode("append").save()
        else:
            stream(through(changes(spark)), folder)
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
