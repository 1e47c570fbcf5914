"""The speed of reads, writes and streams in Spark: `format("dormouse")` and `dormouse.spark.read`.

The comparison is Spark's Parquet reader on the same files, and its Parquet writer with the same rows.

- A read returns all rows, one column, or the keys of one leaf, from a table with few leaves and from one with
  many. The Parquet reader gets the folder of the files, and uses their statistics.
- A stream's rate is that of a query that reads the table from its beginning. Its latency is the time from the
  end of an ingest of one row until a batch of the query contains the row.
- `divided_vs_whole` compares two ways to compact all rows: by two tasks, one on each of Spark's two cores,
  and by one task.

The page cache is warm.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import dormouse as dm
import dormouse.spark
from benchmarks.compaction import ROUNDS, SCHEMA, make_files
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.report import Grid, median_ratio, percentile, turns, values
from dormouse.api.instance import Instance
from dormouse.api.table import Table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FILES = 4
SUPPLIERS = 10_000
PARTITIONS = 16
COLUMN = "price"
WAIT_SECONDS_MAX = 60.0
Sides = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Plan:
    rows: int = amount(4_000_000, 160_000, help="rows in all [4,000,000]")
    rounds: int = amount(3, 1, help=ROUNDS)
    leaves: int = amount(1_000, 40, help="leaves of the table with many leaves [1,000]")
    ingests: int = amount(30, 3, help="ingests of one row, for the latency of streams [30]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures all reads, writes and streams in this process, because all share the Spark session."""
    from dormouse.spark.session import spark_session

    rows = plan.rows // FILES * FILES
    with temporary_folder() as folder:
        make_files(folder, FILES, rows // FILES)
        spark = spark_session(cores=2, driver_memory="3g")
        with dm.local(folder / "lake") as instance:
            table = _loaded(instance, folder, "lines", PARTITIONS)
            found: Figures = {
                "rows": rows,
                "partitions": PARTITIONS,
                "leaves": plan.leaves,
                "rounds": plan.rounds,
            }
            reads = _Reads(spark, folder, table, PARTITIONS)
            for question in ("all", "column", "small"):
                tell(f"reads: {question}")
                found |= _compared(reads.sides(question), plan.rounds, f"{question}_{{}}")
            tell("reads: range")
            many = _loaded(instance, folder, "many", plan.leaves)
            reads = _Reads(spark, folder, many, plan.leaves)
            found |= _compared(reads.sides("range"), plan.rounds, "range_{}")
            tell("writes")
            frame = spark.read.parquet(str(folder / "in"))
            found |= _compared(_writes(instance, frame, folder), plan.rounds, "write_{}")
            tell("compactions")
            found |= _compacted(instance, folder, plan.rounds)
            tell("streams")
            found |= _streamed(spark, instance, folder, plan.ingests)
    names = {"read": "all_source", "column": "column_source", "range_read": "range_source"}
    names |= {"read_function": "all_function", "column_function": "column_function"}
    names |= {"range_function": "range_function", "small_range_read": "small_source"}
    names |= {"small_range_function": "small_function", "write": "write_source"}
    ratios = {f"{name}_vs_parquet": found.pop(f"{key}_vs_parquet") for name, key in names.items()}
    return {**found, **ratios}


def _points(leaves: int) -> list[str]:
    """Returns split points that divide the suppliers evenly."""
    step = SUPPLIERS // leaves
    return [f"Supplier#{number:09d}" for number in range(step, SUPPLIERS, step)]


def _loaded(instance: Instance, folder: Path, name: str, leaves: int) -> Table:
    table = instance.create_table(name, SCHEMA, split_points=_points(leaves))
    table.ingest(str(folder / "in"), engine="spark")
    return table


@dataclass(frozen=True)
class _Reads:
    """The compared ways to read a table with `leaves` leaves."""

    spark: SparkSession
    folder: Path
    table: Table
    leaves: int

    def sides(self, question: str) -> Sides:
        """Returns the compared ways to answer a question.

        The question `all` reads all rows, and `column` one column. `small` and `range` read the keys of one
        leaf.
        """
        columns = [COLUMN] if question == "column" else None
        _, low, high, *_ = _points(self.leaves)
        where = None if question in ("all", "column") else {"supplier": dm.Range(low, high)}
        options = {"instance": str(self.folder / "lake"), "table": self.table.name}
        if columns:
            options["columns"] = COLUMN
        if where:
            options["where"] = f'{{"supplier": {{"min": "{low}", "max": "{high}"}}}}'
        file = next(iter(self.table.file_page(limit=1)))
        place = self.table.context.objects.uri(file.filename).rpartition("/")[0]

        def parquet() -> None:
            frame = self.spark.read.option("pathGlobFilter", "*.parquet").parquet(place)
            if columns:
                frame = frame.select(*columns)
            if where:
                frame = frame.where(f"supplier >= '{low}' and supplier < '{high}'")
            _read_all(frame)

        return {
            "parquet": parquet,
            "source": lambda: _read_all(self.spark.read.format("dormouse").options(**options).load()),
            "function": lambda: _read_all(dormouse.spark.read(self.spark, self.table, where, columns)),
        }


def _writes(instance: Instance, frame: DataFrame, folder: Path) -> Sides:
    numbers = count()

    def dormouse() -> None:
        name = f"written_{next(numbers)}"
        instance.create_table(name, SCHEMA, split_points=_points(PARTITIONS))
        options = {"instance": str(folder / "lake"), "table": name}
        frame.write.format("dormouse").options(**options).mode("append").save()

    def parquet() -> None:
        shutil.rmtree(folder / "written", ignore_errors=True)
        writer = frame.write.option("compression", "zstd").option("parquet.compression.codec.zstd.level", "1")
        writer.parquet(str(folder / "written"))

    return {"parquet": parquet, "source": dormouse}


def _compacted(instance: Instance, folder: Path, rounds: int) -> Figures:
    task_bytes = {"whole": dm.TableProperties().compaction_task_bytes, "divided": 1}
    seconds: dict[str, list[float]] = {name: [] for name in task_bytes}
    for number, name in turns(list(task_bytes), rounds + 1):
        properties = dm.TableProperties(
            compaction_strategy="basic",
            compaction_batch_files=FILES,
            compaction_task_bytes=task_bytes[name],
        )
        table = instance.create_table(f"{name}_{number}", SCHEMA, properties=properties)
        for path in sorted((folder / "in").iterdir()):
            table.ingest(str(path), engine="local")
        began = time.perf_counter()
        if table.compact(engine="spark").jobs_run != 1:
            raise AssertionError("the files were not compacted in one job")
        if number:
            seconds[name].append(time.perf_counter() - began)
    found: Figures = {f"{name}_seconds": round(median(each), 3) for name, each in seconds.items()}
    found["divided_vs_whole"] = round(median_ratio(seconds["whole"], seconds["divided"]), 3)
    return found


def _read_all(frame: DataFrame) -> None:
    """Reads all rows and discards them."""
    frame.write.format("noop").mode("overwrite").save()


def _compared(sides: Sides, rounds: int, key: str) -> Figures:
    """Returns the seconds of each way to read, and its speed divided by that of the Parquet reader.

    The first round only warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in turns(list(sides), rounds + 1):
        began = time.perf_counter()
        sides[name]()
        if number:
            seconds[name].append(time.perf_counter() - began)
    found: Figures = {}
    for name, each in seconds.items():
        found[f"{key.format(name)}_seconds"] = round(sorted(each)[len(each) // 2], 3)
        if name != "parquet":
            found[f"{key.format(name)}_vs_parquet"] = round(median_ratio(seconds["parquet"], each), 3)
    return found


def _streamed(spark: SparkSession, instance: Instance, folder: Path, ingests: int) -> Figures:
    """Measures the rate of a stream of the whole table, and the latency of ingests of one row.

    The first ingest only warms up.
    """
    import pyarrow as pa

    source = spark.readStream.format("dormouse").options(instance=str(folder / "lake"))
    began = time.perf_counter()
    reading = source.options(table="lines", changes_after="beginning").load().writeStream.format("noop")
    query = reading.option("checkpointLocation", str(folder / "all")).trigger(availableNow=True).start()
    query.awaitTermination()
    seconds = time.perf_counter() - began
    rows = sum(progress.numInputRows for progress in query.recentProgress)
    table = instance.create_table("one", dm.Schema([dm.Field("k", dm.LONG)]))
    arrived: dict[int, threading.Event] = {number: threading.Event() for number in range(-1, ingests)}

    def note(frame: DataFrame, _: int) -> None:
        for row in frame.select("k").collect():
            arrived[row.k].set()

    stream = source.options(table="one", changes_after="beginning").load().writeStream.foreachBatch(note)
    query = stream.option("checkpointLocation", str(folder / "one")).start()
    try:
        waited = [_latency(table, pa.table({"k": [number]}), each) for number, each in arrived.items()]
    finally:
        query.stop()
    return {
        "stream_rows_per_s": round(rows / seconds),
        "stream_latency_ms_p50": round(percentile(waited[1:], 50)),
        "stream_latency_ms_p99": round(percentile(waited[1:], 99)),
    }


def _latency(table: Table, row: pa.Table, arrived: threading.Event) -> float:
    """Ingests a row; returns the milliseconds from the end of the ingest until the stream has the row.

    Raises RuntimeError if that takes more than WAIT_SECONDS_MAX.
    """
    table.ingest(row, engine="local")
    began = time.perf_counter()
    if not arrived.wait(WAIT_SECONDS_MAX):
        raise RuntimeError(f"a row did not arrive within {WAIT_SECONDS_MAX:g} s")
    return (time.perf_counter() - began) * 1_000


_QUESTIONS = {
    "all": "all rows",
    "column": "one column",
    "small": "one leaf of 16",
    "range": "one leaf of many",
    "write": "write",
}
_READ = {
    "{}_parquet_seconds": "Parquet",
    "{}_source_seconds": "the source",
    "{}_function_seconds": "function",
}
BENCHMARK = Benchmark(
    "spark_source",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows in {partitions} leaves, or in {leaves:,}; medians of {rounds} rounds",
        Grid(_QUESTIONS, _READ),
        values(
            {
                "read_vs_parquet": "speed of the source ÷ Parquet's",
                "column_vs_parquet": "  one column",
                "range_read_vs_parquet": "  one leaf of many",
                "small_range_read_vs_parquet": "  one leaf of 16",
                "read_function_vs_parquet": "speed of dormouse.spark.read ÷ Parquet's",
                "column_function_vs_parquet": "  one column",
                "range_function_vs_parquet": "  one leaf of many",
                "small_range_function_vs_parquet": "  one leaf of 16",
                "write_vs_parquet": "speed of the sink ÷ Parquet's",
                "whole_seconds": "a compaction by one task, seconds",
                "divided_seconds": "  by two tasks",
                "divided_vs_whole": "  speed of two tasks ÷ of one",
                "stream_rows_per_s": "a stream, rows/s",
                "stream_latency_ms_p50": "  latency of a row, ms p50",
                "stream_latency_ms_p99": "  p99",
            }
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
