"""The speed of a bulk ingest: the same rows through one Spark session, by Dormouse and by Spark itself.

Spark runs `repartitionByRange` and `sortWithinPartitions` and writes Parquet. Dormouse does the same, and
also divides exactly by leaves, writes sketches and commits a transaction. It ingests once from a DataFrame,
and once from the paths of the files, which its tasks read themselves. Both write the same number of
partitions, with zstd at level 1, and the page cache is warm. A second part, `local_ingest`, compares with
DuckDB without Spark. A third, `bulk_ingest`, compares with table formats that do not sort.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import dormouse as dm
from benchmarks import bulk_ingest, local_ingest
from benchmarks.compaction import (
    RATES,
    ROUNDS,
    SCHEMA,
    Action,
    folder_bytes,
    make_files,
    rows_in,
    throughput,
    timed,
)
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.report import Grid, median_ratio, values
from benchmarks.peers.together import NEEDED
from dormouse.api.instance import Instance

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES = 8
PARTITIONS = 16


@dataclass(frozen=True)
class Plan:
    rows: int = amount(8_000_000, 320_000, help="rows in all [8,000,000]")
    local_rows: int = amount(
        6_000_000, 100_000, help="rows of lineitem for the ingest without Spark [6,000,000]"
    )
    bulk_rows: int = amount(1_000_000, 50_000, help="rows in memory, also for other formats [1,000,000]")
    csv_files: int = amount(10_000, 200, help="CSV files of 100 rows each [10,000]")
    rounds: int = amount(5, 3, help=ROUNDS)
    only: str = amount("all", choices=("all", "bulk"), help="measure only the third part [all]")


def make_source(folder: Path, rows: int) -> None:
    """Writes files of rows in random order. Every call writes the same rows."""
    import numpy as np
    import pyarrow.parquet as pq

    make_files(folder, FILES, rows)
    for number, path in enumerate(sorted((folder / "in").iterdir())):
        order = np.random.default_rng(number).permutation(rows)
        pq.write_table(pq.read_table(path).take(order), path, compression="zstd", row_group_size=250_000)


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures every way to ingest in this process, because all share the Spark session."""
    bulk = bulk_ingest.measure(plan.bulk_rows, plan.rounds, tell)
    if plan.only == "bulk":
        return bulk
    from dormouse.spark.session import spark_session

    rows = plan.rows // FILES * FILES
    with temporary_folder() as folder:
        make_source(folder, rows // FILES)
        spark = spark_session(driver_memory="3g")
        with dm.local(folder / "lake") as instance:
            frame = spark.read.parquet(str(folder / "in"))
            prepared = {
                "dormouse": _dormouse(instance, frame),
                "dormouse_paths": _dormouse(instance, str(folder / "in")),
                "spark": _spark(spark, frame, folder / "spark"),
            }
            sides = {name: partial(timed, prepare) for name, prepare in prepared.items()}
            seconds, found = throughput(sides, plan.rounds, rows)
            cases = (
                local_ingest.lineitem(folder, plan.local_rows),
                local_ingest.unsorted(folder / "in", rows),
                local_ingest.many_files(folder / "csv", plan.csv_files),
            )
            found |= local_ingest.measure(instance, folder, cases, plan.rounds, tell)
        size = folder_bytes(folder / "in")
        facts = {"rows": rows, "partitions": PARTITIONS, "input_bytes": size, "rounds": plan.rounds}
    for side, key in (("dormouse", "vs_spark"), ("dormouse_paths", "vs_spark_paths")):
        found[key] = round(median_ratio(seconds["spark"], seconds[side]), 3)
    return {**facts, **found, **bulk}


def _dormouse(instance: Instance, data: DataFrame | str) -> Callable[[], Action]:
    """Returns a function that prepares an ingest by Dormouse: it replaces the last table by a new one."""
    step = 10_000 // PARTITIONS
    points = [f"Supplier#{number:09d}" for number in range(step, step * PARTITIONS, step)]
    numbers = count()
    name = f"lines_{id(data)}_"

    def prepare() -> Action:
        number = next(numbers)
        if number:
            instance.drop_table(f"{name}{number - 1}")
        lines = instance.create_table(f"{name}{number}", SCHEMA, split_points=points)
        lines.collect_garbage()
        return lambda: lines.ingest(data, engine="spark").rows

    return prepare


def _spark(spark: SparkSession, frame: DataFrame, output: Path) -> Callable[[], Action]:
    def action() -> int:
        rows = frame.repartitionByRange(PARTITIONS, SCHEMA.row_keys[0].name)
        writer = rows.sortWithinPartitions(*SCHEMA.key_names).write
        level = writer.option("compression", "zstd").option("parquet.compression.codec.zstd.level", "1")
        level.parquet(str(output))
        return rows_in(output)

    def prepare() -> Action:
        shutil.rmtree(output, ignore_errors=True)
        return action

    return prepare


_LOCAL = {
    "lineitem": "TPC-H's lineitem, in order",
    "unsorted": "rows in random order",
    "csv": "small CSV files",
}
_SIDES = {
    "dormouse": "Dormouse, from a DataFrame",
    "dormouse_paths": "Dormouse, from paths",
    "spark": "Spark's sort and write",
}
BENCHMARK = Benchmark(
    "ingest",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows, {input_bytes:,} bytes, into {partitions} partitions; medians of {rounds} rounds",
        Grid(_SIDES, RATES),
        values({"vs_spark": "ours ÷ Spark's", "vs_spark_paths": "  from paths"}),
        Grid(
            _LOCAL,
            {
                "{}_rows": "rows",
                "local_{}_seconds": "Dormouse s",
                "local_{}_rows_per_second": "rows/s",
                "duckdb_{}_seconds": "DuckDB s",
                "duckdb_{}_rows_per_second": "rows/s",
            },
        ),
        values(
            {
                "ingest_local_vs_duckdb": "DuckDB's time ÷ ours: the smaller of the two below",
                "ingest_local_sorted_vs_duckdb": "  TPC-H's lineitem",
                "ingest_local_unsorted_vs_duckdb": "  rows in random order",
                "ingest_many_files_vs_duckdb": "  small CSV files",
            }
        ),
        *bulk_ingest.TABLES,
    ],
    only_json=["{bulk_rows}"],
    needed=NEEDED,
)

if __name__ == "__main__":
    BENCHMARK.main()
