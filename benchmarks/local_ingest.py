"""Ingest in this process, compared with DuckDB sorting and writing the same rows on as many cores.

The cases are TPC-H's `lineitem` in the order of its generation, rows in random order, and many small CSV
files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import dormouse as dm
from benchmarks.compaction import SCHEMA, Action, throughput, timed
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio
from dormouse.api.instance import Instance
from dormouse.demo.datasets import LINEITEM, Lineitem
from dormouse.model.schema import Schema
from dormouse.writing.parquet_file import ZSTD_LEVEL

THREADS = 2
CSV_ROWS = 100
CSV = dm.Schema(
    [dm.Field("key", dm.LONG)],
    values=[dm.Field("carrier", dm.STRING), dm.Field("price", dm.DOUBLE), dm.Field("note", dm.STRING)],
)


@dataclass(frozen=True)
class Case:
    """Files to ingest, with their number of rows."""

    name: str
    schema: Schema
    paths: Sequence[str]
    rows: int


def measure(instance: Instance, folder: Path, cases: Sequence[Case], rounds: int, tell: Tell) -> Figures:
    """Measures the ratio of DuckDB's seconds to Dormouse's for each case.

    It also returns the smallest ratio of the cases with Parquet files.
    """
    found: Figures = {}
    ratios: dict[str, float] = {}
    for case in cases:
        tell(f"ingest of {case.name}")
        ours, theirs = f"local_{case.name}", f"duckdb_{case.name}"
        sides = {ours: _dormouse(instance, case), theirs: _duckdb(folder, case)}
        timers = {name: partial(timed, prepare) for name, prepare in sides.items()}
        seconds, figures = throughput(timers, rounds, case.rows)
        found |= {f"{case.name}_rows": case.rows, **figures}
        ratios[case.name] = round(median_ratio(seconds[theirs], seconds[ours]), 3)
    return {
        **found,
        "ingest_local_sorted_vs_duckdb": ratios["lineitem"],
        "ingest_local_unsorted_vs_duckdb": ratios["unsorted"],
        "ingest_local_vs_duckdb": min(ratios["lineitem"], ratios["unsorted"]),
        "ingest_many_files_vs_duckdb": ratios["csv"],
    }


def lineitem(folder: Path, rows: int) -> Case:
    """Generates TPC-H's lineitem, sorted by its keys, as several files."""
    import duckdb

    with duckdb.connect() as connection:
        Lineitem(rows).prepare(connection, folder, lambda _: None)
    parts = sorted(folder.glob("lineitem-*.parquet"), key=lambda path: int(path.stem.split("-")[1]))
    return Case("lineitem", LINEITEM, [str(path) for path in parts], rows)


def unsorted(folder: Path, rows: int) -> Case:
    """Returns a case with the files of a folder, whose rows are in random order."""
    return Case("unsorted", SCHEMA, [str(path) for path in sorted(folder.iterdir())], rows)


def many_files(folder: Path, files: int) -> Case:
    """Writes small CSV files of rows in random order. Every call writes the same rows."""
    import numpy as np

    random = np.random.default_rng(1)
    folder.mkdir()
    paths = [folder / f"{number:06d}.csv" for number in range(files)]
    for path in paths:
        keys = random.integers(0, 1 << 40, CSV_ROWS).tolist()
        lines = (f"{key},{'ABCDEF'[key % 6]}X,{key % 10_000 / 100},note {key % 97}\n" for key in keys)
        path.write_text(f"key,carrier,price,note\n{''.join(lines)}", encoding="utf-8")
    return Case("csv", CSV, [str(path) for path in paths], files * CSV_ROWS)


def _dormouse(instance: Instance, case: Case) -> Callable[[], Action]:
    """Returns a function that prepares an ingest by Dormouse, into a new table of one leaf each time."""
    numbers = count()

    def prepare() -> Action:
        number = next(numbers)
        if number:
            instance.drop_table(f"{case.name}_{number - 1}")
        table = instance.create_table(f"{case.name}_{number}", case.schema)
        return lambda: table.ingest(list(case.paths), engine="local").rows

    return prepare


def _duckdb(folder: Path, case: Case) -> Callable[[], Action]:
    import duckdb

    read = "read_csv" if case.name == "csv" else "read_parquet"
    output = folder / f"{case.name}.parquet"

    def run() -> int:
        with duckdb.connect(config={"threads": THREADS, "temp_directory": f"{folder}/spill"}) as connection:
            done = connection.execute(
                f"copy (from {read}({list(case.paths)!r}) order by {', '.join(case.schema.key_names)}) "
                f"to '{output}' (format parquet, compression zstd, compression_level {ZSTD_LEVEL})"
            ).fetchone()
        return int(done[0]) if done else 0

    def prepare() -> Action:
        output.unlink(missing_ok=True)
        return run

    return prepare
