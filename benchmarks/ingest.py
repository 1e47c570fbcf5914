"""How fast is a bulk ingest? The same rows through one Spark session, by Dormouse and by Spark itself.

Spark: `repartitionByRange`, `sortWithinPartitions`, Parquet. Dormouse does the same and more: exact leaves,
sketches, a transaction; once from a DataFrame, as Spark has it, and once from the files' paths, which its
tasks read themselves. Both write as many partitions, with zstd at level 1, and the page cache is warm.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.compaction import (
    ROUNDS,
    SCHEMA,
    Action,
    folder_bytes,
    make_files,
    rows_in,
    throughput,
    timed,
)
from benchmarks.harness.command import Benchmark, Figures, Tell, at_least_one
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.report import grid, median_ratio

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dormouse.instance import Instance

FILES = 8
PARTITIONS = 16


def make_source(folder: Path, rows: int) -> None:
    """Files of rows in no order; the same every time."""
    import numpy as np
    import pyarrow.parquet as pq

    make_files(folder, FILES, rows)
    for number, path in enumerate(sorted((folder / "in").iterdir())):
        order = np.random.default_rng(number).permutation(rows)
        pq.write_table(pq.read_table(path).take(order), path, compression="zstd", row_group_size=250_000)


def measure(arguments: Namespace, _: Tell) -> Figures:
    """Every side in this process: all share the session."""
    import dormouse as dm
    from dormouse.spark.session import spark_session

    rows = (arguments.rows or (320_000 if arguments.quick else 8_000_000)) // FILES * FILES
    rounds = arguments.rounds or (3 if arguments.quick else 5)
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
            seconds, found = throughput(sides, rounds, rows)
        facts = {
            "rows": rows,
            "partitions": PARTITIONS,
            "input_bytes": folder_bytes(folder / "in"),
            "rounds": rounds,
        }
    for side, key in (("dormouse", "vs_spark"), ("dormouse_paths", "vs_spark_paths")):
        found[key] = round(median_ratio(seconds["spark"], seconds[side]), 3)
    return {**facts, **found}


def _dormouse(instance: Instance, data: DataFrame | str) -> Callable[[], Action]:
    """Into a new table each time; the old one goes first."""
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


def text(found: Figures) -> str:
    labels = {
        "dormouse": "Dormouse, from a DataFrame",
        "dormouse_paths": "Dormouse, from paths",
        "spark": "Spark's sort and write",
    }
    heads = {"rows/s": "{}_rows_per_second", "seconds": "{}_seconds"}
    return "\n".join(
        [
            f"{found['rows']:,} rows, {found['input_bytes'] / 1e6:,.0f} MB of Parquet, into "
            f"{found['partitions']} partitions; medians of {found['rounds']} rounds",
            grid(found, labels, heads),
            f"ours ÷ Spark's: {found['vs_spark']:.2f}, from paths {found['vs_spark_paths']:.2f}",
        ]
    )


BENCHMARK = Benchmark(
    "ingest",
    __doc__,
    measure,
    text,
    quick="few rows; the same figures in under a minute",
    options={"--rows": {"type": at_least_one, "help": "in all [8,000,000]"}, "--rounds": ROUNDS},
)

if __name__ == "__main__":
    BENCHMARK.main()
