"""How fast is a bulk ingest? The same rows through one Spark session, by Dormouse and by Spark itself.

Spark: `repartitionByRange`, `sortWithinPartitions`, Parquet. Dormouse does the same and more: exact leaves,
sketches, a transaction; once from a DataFrame, as Spark has it, and once from the files' paths, which its
tasks read themselves. Both write as many partitions, with zstd at level 1, and the page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.compaction import SCHEMA, make_files
from benchmarks.harness import Side, Worker, measure, orderly_end, ratio

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dormouse.instance import Instance

FILES = 8
PARTITIONS = 16


def main() -> None:
    orderly_end()
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder:
        make_source(Path(folder), arguments.rows // FILES)
        figures = compare(Path(folder), arguments.rows // FILES * FILES, arguments.rounds)
    print(json.dumps(figures) if arguments.json else table(figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="in all [8,000,000]")
    parser.add_argument("--rounds", type=int, help="counted rounds, after one that warms up [5]")
    parser.add_argument("--quick", action="store_true", help="few rows; the same figures in under a minute")
    parser.add_argument("--json", action="store_true", help="one object on one line")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or (320_000 if arguments.quick else 8_000_000)
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 5)
    return arguments


def make_source(folder: Path, rows: int) -> None:
    """Files of rows in no order; the same every time."""
    import numpy as np
    import pyarrow.parquet as pq

    make_files(folder, FILES, rows)
    for number, path in enumerate(sorted((folder / "in").iterdir())):
        order = np.random.default_rng(number).permutation(rows)
        pq.write_table(pq.read_table(path).take(order), path, compression="zstd", row_group_size=250_000)


def compare(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Every figure, by name."""
    import dormouse as dm
    from dormouse.spark.session import spark_session

    def check(side: str, answer: Any) -> None:
        if answer["rows"] != rows:
            raise RuntimeError(f"{side} wrote {answer['rows']} rows of {rows}")

    spark = spark_session(driver_memory="3g")
    with dm.local(folder / "lake") as instance:
        frame = spark.read.parquet(str(folder / "in"))
        runs = {
            "dormouse": _Run(_dormouse(instance, frame)),
            "dormouse_paths": _Run(_dormouse(instance, str(folder / "in"))),
            "spark": _Run(_spark(spark, frame, folder / "spark")),
        }
        sides = measure(cast("Mapping[str, Worker]", runs), rounds, check)
    size = sum(path.stat().st_size for path in (folder / "in").iterdir())
    facts = {"rows": rows, "partitions": PARTITIONS, "input_bytes": size, "rounds": rounds}
    return facts | _figures(sides, rows)


@dataclass
class _Run:
    """A side in this process: all share the session. `prepare` is not measured; it gives what is."""

    prepare: Callable[[], Callable[[], int]]
    peak_bytes: int = 0

    def run(self) -> dict[str, Any]:
        action = self.prepare()
        started = time.perf_counter()
        rows = action()
        return {"rows": rows, "seconds": time.perf_counter() - started}


def _dormouse(instance: Instance, data: DataFrame | str) -> Callable[[], Callable[[], int]]:
    """Into a new table each time; the old one goes first."""
    step = 10_000 // PARTITIONS
    points = [f"Supplier#{number:09d}" for number in range(step, step * PARTITIONS, step)]
    numbers = count()
    name = f"lines_{id(data)}_"

    def prepare() -> Callable[[], int]:
        number = next(numbers)
        if number:
            instance.drop_table(f"{name}{number - 1}")
        lines = instance.create_table(f"{name}{number}", SCHEMA, split_points=points)
        lines.collect_garbage()
        return lambda: lines.ingest(data, engine="spark").rows

    return prepare


def _spark(spark: SparkSession, frame: DataFrame, output: Path) -> Callable[[], Callable[[], int]]:
    def action() -> int:
        rows = frame.repartitionByRange(PARTITIONS, SCHEMA.row_keys[0].name)
        writer = rows.sortWithinPartitions(*SCHEMA.key_names).write
        level = writer.option("compression", "zstd").option("parquet.compression.codec.zstd.level", "1")
        level.parquet(str(output))
        return _rows_in(output)

    def prepare() -> Callable[[], int]:
        shutil.rmtree(output, ignore_errors=True)
        return action

    return prepare


def _rows_in(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


def _figures(sides: Mapping[str, Side], rows: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, side in sides.items():
        figures[f"{name}_seconds"] = round(side.median_seconds, 3)
        figures[f"{name}_rows_per_second"] = round(rows / side.median_seconds)
    figures["vs_spark"] = round(ratio(sides["dormouse"], sides["spark"]), 3)
    figures["vs_spark_paths"] = round(ratio(sides["dormouse_paths"], sides["spark"]), 3)
    return figures


def table(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['rows']:,} rows, {figures['input_bytes'] / 1e6:,.0f} MB of Parquet, into "
        f"{figures['partitions']} partitions; medians of {figures['rounds']} rounds",
        f"{'':28}{'rows/s':>14}{'seconds':>10}{'ours ÷ theirs':>16}",
    ]
    names = {
        "dormouse": ("Dormouse, from a DataFrame", "vs_spark"),
        "dormouse_paths": ("Dormouse, from paths", "vs_spark_paths"),
        "spark": ("Spark's sort and write", ""),
    }
    for side, (label, key) in names.items():
        against = f"{figures[key]:.2f}" if key else ""
        rate, seconds = figures[f"{side}_rows_per_second"], figures[f"{side}_seconds"]
        lines.append(f"{label:28}{rate:>14,}{seconds:>10.2f}{against:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
