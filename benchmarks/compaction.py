"""The speed of a compaction task: the same sorted files, merged by Dormouse, DataFusion, DuckDB and Spark.

Only Dormouse's task also records the smallest and largest key and writes the sketches. All write Parquet with
zstd at level 1, and the page cache is warm. Spark may write several files, on all cores.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.processes import Remote, remotes
from benchmarks.harness.report import Grid, median_ratio, turns, values
from dormouse.model.schema import Field, Schema
from dormouse.model.types import DOUBLE, LONG, STRING

SCHEMA = Schema(
    [Field("supplier", STRING), Field("order_key", LONG)],
    [Field("shipped", LONG)],
    [
        Field("quantity", LONG),
        Field("price", DOUBLE),
        Field("discount", DOUBLE),
        Field("mode", STRING),
        Field("comment", STRING),
    ],
)
_KEYS = ", ".join(SCHEMA.key_names)
_SAMPLE_SECONDS = 0.02
ROUNDS = "counted rounds, after one that warms up [5]"


@dataclass(frozen=True)
class Plan:
    files: int = amount(12, help="files to merge [12]")
    rows: int = amount(1_000_000, 60_000, help="rows of each file [1,000,000]")
    rounds: int = amount(5, 3, help=ROUNDS)


Action = Callable[[], int]
"""A function that does the timed work and returns the number of rows that it wrote."""


def timed(prepare: Callable[[], Action]) -> tuple[int, float]:
    """Prepares and runs an action; returns its number of rows and its seconds, without the preparation."""
    action = prepare()
    began = time.perf_counter()
    rows = action()
    return rows, time.perf_counter() - began


def throughput(
    sides: Mapping[str, Callable[[], tuple[int, float]]], rounds: int, rows: int
) -> tuple[dict[str, list[float]], Figures]:
    """Runs the compared systems in alternation.

    Returns the seconds of each counted round by system, and the figures. The first round warms up and does
    not count. Raises RuntimeError if a system does not write exactly `rows` rows.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in turns(list(sides), rounds + 1):
        written, took = sides[name]()
        if written != rows:
            raise RuntimeError(f"{name} wrote {written} rows of {rows}")
        if number:
            seconds[name].append(took)
    found: Figures = {}
    for name, each in seconds.items():
        found[f"{name}_seconds"] = round(median(each), 3)
        found[f"{name}_rows_per_second"] = round(rows / median(each))
    return seconds, found


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def make_files(folder: Path, files: int, rows: int) -> None:
    """Writes files like TPC-H's lineitem, each sorted by its keys. Every call writes the same rows."""
    import pyarrow.parquet as pq

    (folder / "in").mkdir()
    for number in range(files):
        path = folder / "in" / f"{number:03d}.parquet"
        pq.write_table(_rows(number, rows), path, compression="zstd", row_group_size=250_000)


def _rows(seed: int, rows: int) -> Any:
    import numpy as np
    import pyarrow as pa

    from dormouse.data.arrow_schema import arrow_schema

    random = np.random.default_rng(seed)
    words = np.array(["the", "quick", "furious", "deposits", "sleep", "blithely", "above", "ironic"])
    pool = pa.array([" ".join(words[random.integers(0, len(words), 4)]) for _ in range(5_000)])
    suppliers = pa.array([f"Supplier#{i:09d}" for i in range(10_000)])
    modes = pa.array(["AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK"])
    columns = [
        suppliers.take(pa.array(random.integers(0, len(suppliers), rows))),
        pa.array(random.integers(0, 60_000_000, rows)),
        pa.array(random.integers(694_224_000_000, 915_148_800_000, rows)),
        pa.array(random.integers(1, 51, rows)),
        pa.array(random.integers(90_000, 10_500_000, rows) / 100),
        pa.array(random.integers(0, 11, rows) / 100),
        modes.take(pa.array(random.integers(0, len(modes), rows))),
        pool.take(pa.array(random.integers(0, len(pool), rows))),
    ]
    table = pa.table(columns, schema=arrow_schema(SCHEMA))
    return table.sort_by([(name, "ascending") for name in SCHEMA.key_names])


def measure(plan: Plan, _: Tell) -> Figures:
    """Measures every system in a separate process."""
    total = plan.files * plan.rows
    with temporary_folder() as folder:
        make_files(folder, plan.files, plan.rows)
        size = folder_bytes(folder / "in")
        facts = {"files": plan.files, "rows": total, "input_bytes": size, "rounds": plan.rounds}
        with remotes([partial(_opened, name, folder) for name in _SIDES]) as workers:
            sampled = {name: _Sampled(worker) for name, worker in zip(_SIDES, workers, strict=True)}
            runs = {name: each.run for name, each in sampled.items()}
            seconds, found = throughput(runs, plan.rounds, total)
    peaks = {f"{name}_peak_memory_bytes": each.peak_bytes for name, each in sampled.items()}
    ratios = {f"vs_{name}": round(median_ratio(seconds[name], seconds["dormouse"]), 3) for name in _OTHERS}
    return {**facts, **found, **peaks, **ratios}


class _Sampled:
    """A compared system in another process. `run` runs it once, and `peak_bytes` is its peak memory."""

    def __init__(self, worker: Remote) -> None:
        self._worker = worker
        self._tree = psutil.Process(worker.process.pid)
        self.peak_bytes = 0

    def run(self) -> tuple[int, float]:
        done = threading.Event()
        # a daemon: if SIGTERM comes before the `try`, Python would wait for the thread without limit
        sampler = threading.Thread(target=self._sample, args=(done,), daemon=True)
        sampler.start()
        try:
            rows, seconds = self._worker.call("run")
            return rows, seconds
        finally:
            done.set()
            sampler.join()

    def _sample(self, done: threading.Event) -> None:
        """Samples the resident memory of the process and its children (Spark's Java); keeps the peak."""
        while not done.wait(_SAMPLE_SECONDS):
            try:
                family = [self._tree, *self._tree.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, sum(each.memory_info().rss for each in family))
            except psutil.Error:
                continue  # a process ended in between


def _opened(side: str, folder: Path) -> AbstractContextManager[Any]:
    return nullcontext(SimpleNamespace(run=partial(timed, _SIDES[side](folder))))


def _dormouse(folder: Path) -> Callable[[], Action]:
    from dormouse.writing.merge import merge_sorted

    inputs = sorted(str(path) for path in (folder / "in").iterdir())
    output = folder / "dormouse.parquet"
    return _replacing(output, lambda: merge_sorted(inputs, SCHEMA, output, now_ms=0).row_count)


def _datafusion(folder: Path) -> Callable[[], Action]:
    """Returns a function that prepares DataFusion's compaction.

    Because the order is declared and each file is one stream, DataFusion merges the files instead of sorting.
    All other settings are the defaults.
    """
    from datafusion import SessionConfig, SessionContext

    files = len(list((folder / "in").iterdir()))
    config = SessionConfig().with_target_partitions(files).with_repartition_file_scans(False)
    output = folder / "datafusion.parquet"
    order = ", ".join(f"{name} ASC NULLS LAST" for name in SCHEMA.key_names)

    def run() -> int:
        context = SessionContext(config)
        context.sql(f"CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION '{folder}/in/' WITH ORDER ({order})")
        done = context.sql(
            f"COPY (SELECT * FROM t ORDER BY {order}) "
            f"TO '{output}' STORED AS PARQUET OPTIONS ('format.compression' 'zstd(1)')"
        ).collect()
        return int(done[0].column(0)[0].as_py())

    return _replacing(output, run)


def _duckdb(folder: Path) -> Callable[[], Action]:
    import duckdb

    output = folder / "duckdb.parquet"

    def run() -> int:
        with duckdb.connect() as connection:
            connection.execute(f"SET temp_directory = '{folder}/duckdb-spill'")
            done = connection.execute(
                f"COPY (SELECT * FROM read_parquet('{folder}/in/*.parquet') ORDER BY {_KEYS}) "
                f"TO '{output}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)"
            ).fetchone()
        return int(done[0]) if done else 0

    return _replacing(output, run)


def _spark(folder: Path) -> Callable[[], Action]:
    from dormouse.spark.session import spark_session

    output = folder / "spark"
    level = {"spark.hadoop.parquet.compression.codec.zstd.level": "1"}
    session = spark_session(driver_memory="8g", config=level)

    def run() -> int:
        rows = session.read.parquet(str(folder / "in")).orderBy(*SCHEMA.key_names)
        rows.write.option("compression", "zstd").parquet(str(output))
        return rows_in(output)

    return _replacing(output, run)


def _replacing(output: Path, action: Action) -> Callable[[], Action]:
    """Returns a function that deletes the output of the last run and then returns `action`."""

    def prepare() -> Action:
        if output.is_dir():
            shutil.rmtree(output)
        output.unlink(missing_ok=True)
        return action

    return prepare


def rows_in(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


_OTHERS = {"datafusion": _datafusion, "duckdb": _duckdb, "spark": _spark}
_SIDES = {"dormouse": _dormouse, **_OTHERS}

RATES = {"{}_rows_per_second": "rows/s", "{}_seconds": "seconds"}
BENCHMARK = Benchmark(
    "compaction",
    __doc__,
    Plan,
    measure,
    [
        "{files} sorted files, {rows:,} rows, {input_bytes:,} bytes; medians of {rounds} rounds",
        Grid({side: side for side in _SIDES}, {**RATES, "{}_peak_memory_bytes": "peak bytes"}),
        values({f"vs_{side}": f"ours ÷ {side}'s" for side in _OTHERS}),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
