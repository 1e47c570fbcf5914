"""A driver that tests run on a Spark cluster. It does the work of each line of its standard input.

A line is JSON: the fields of `Work`. The environment names the instance and the cluster.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import dormouse as dm
from dormouse.settings import load_settings
from dormouse.spark.session import spark_session
from tests.held import WRITES, reading
from tests.support.api import Instance

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
    "spark.task.maxFailures": os.environ.get("TASK_FAILURES_MAX", "4"),
    "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", ""),
    f"spark.executorEnv.{WRITES}": os.environ.get(WRITES, ""),
}


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, TASKS).selectExpr("id as k", "id * 2 as v")


@dataclass(frozen=True)
class Work:
    """A kind of work on a table. Its result is written to `folder` as JSON."""

    kind: str
    table: str
    folder: str
    reading: str = ""
    """The file for `held.reading`, which then precedes the writes."""

    def do(self, spark: SparkSession, instance: Instance) -> Any:
        if self.kind == "ingest":
            frame = self._through(rows(spark))
            return instance.table(self.table).ingest(frame, ingest_id=f"once into {self.table}").rows
        if self.kind == "compaction":
            report = instance.table(self.table).compact(engine="spark")
            return [report.jobs_run, report.given_up, *report.errors]
        if self.kind == "source":
            read = spark.read.format("dormouse").options(table=self.table, split_bytes="1").load()
            return sorted(row.k for row in self._through(read).select("k").collect())
        if self.kind == "sink":
            writer = self._through(rows(spark)).write.format("dormouse")
            return writer.options(table=self.table).mode("append").save()
        return self._stream(spark)

    def _stream(self, spark: SparkSession) -> None:
        changes = spark.readStream.format("dormouse").options(table=self.table, changes_after="beginning")
        writer = self._through(changes.load()).writeStream.format("dormouse")
        writer = writer.option("checkpointLocation", f"{self.folder}/checkpoint")
        writer = writer.options(table=f"{self.table}_copied", stream="copy")
        writer.trigger(availableNow=True).start().awaitTermination()

    def _through(self, frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(reading(self.reading), frame.schema) if self.reading else frame


def result_in(folder: Path) -> Path:
    return folder / "found.json"


def main() -> None:
    spark = spark_session(config=CONFIG)
    settings = load_settings()
    assert settings.dsn and settings.objects
    with dm.connect(settings.dsn, settings.objects) as instance:
        for line in sys.stdin:
            work = Work(**json.loads(line))
            unfinished = Path(work.folder) / "unfinished.json"
            unfinished.write_text(json.dumps(work.do(spark, instance)))
            unfinished.rename(result_in(Path(work.folder)))


if __name__ == "__main__":
    main()
