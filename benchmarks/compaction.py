"""How fast is a compaction task? The same sorted files, merged by Dormouse, DataFusion, DuckDB and Spark.

Dormouse's task includes what the others do not do: the smallest and largest key, and the sketches. All write
Parquet with zstd at level 1, and the page cache is warm. Spark may write several files, on all cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import Side, Worker, measure, orderly_end, ratio, serve
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


def main() -> None:
    orderly_end()
    arguments = _arguments()
    if arguments.side:
        serve(_SIDES[arguments.side](Path(arguments.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder:
        make_files(Path(folder), arguments.files, arguments.rows)
        figures = compare(Path(folder), arguments.files, arguments.rows, arguments.rounds)
    print(json.dumps(figures) if arguments.json else table(figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--rows", type=int, help="of each file [1,000,000]")
    parser.add_argument("--rounds", type=int, help="counted rounds, after one that warms up [5]")
    parser.add_argument(
        "--quick", action="store_true", help="small files; the same figures in under a minute"
    )
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--side", choices=list(_SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or (150_000 if arguments.quick else 1_000_000)
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 5)
    return arguments


def make_files(folder: Path, files: int, rows: int) -> None:
    """Files like TPC-H's lineitem, each sorted by its keys; the same every time."""
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


def compare(folder: Path, files: int, rows: int, rounds: int) -> dict[str, Any]:
    """Every figure, by name."""
    total = files * rows

    def check(side: str, answer: Any) -> None:
        if answer["rows"] != total:
            raise RuntimeError(f"{side} wrote {answer['rows']} rows of {total}")

    with ExitStack() as stack:
        workers = {
            side: stack.enter_context(
                Worker("benchmarks.compaction", ["--side", side, "--folder", str(folder)])
            )
            for side in _SIDES
        }
        sides = measure(workers, rounds, check)
    size = sum(path.stat().st_size for path in (folder / "in").iterdir())
    return {"files": files, "rows": total, "input_bytes": size, "rounds": rounds} | _figures(sides, total)


def _figures(sides: Mapping[str, Side], rows: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, side in sides.items():
        figures[f"{name}_seconds"] = round(side.median_seconds, 3)
        figures[f"{name}_rows_per_second"] = round(rows / side.median_seconds)
        figures[f"{name}_peak_memory_bytes"] = side.peak_bytes
    for name in ("datafusion", "duckdb", "spark"):
        figures[f"vs_{name}"] = round(ratio(sides["dormouse"], sides[name]), 3)
    return figures


def table(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['files']} sorted files, {figures['rows']:,} rows, {figures['input_bytes'] / 1e6:,.0f} MB; "
        f"medians of {figures['rounds']} rounds",
        f"{'':12}{'rows/s':>14}{'seconds':>10}{'peak MB':>10}{'ours ÷ theirs':>16}",
    ]
    for side in _SIDES:
        against = f"{figures[f'vs_{side}']:.2f}" if f"vs_{side}" in figures else ""
        lines.append(
            f"{side:12}{figures[f'{side}_rows_per_second']:>14,}{figures[f'{side}_seconds']:>10.2f}"
            f"{figures[f'{side}_peak_memory_bytes'] / 1e6:>10,.0f}{against:>16}"
        )
    return "\n".join(lines)


def _dormouse(folder: Path) -> Callable[[], Mapping[str, Any]]:
    from dormouse.data.merge import merge_sorted

    inputs = sorted(str(path) for path in (folder / "in").iterdir())
    output = folder / "dormouse.parquet"

    def run() -> Mapping[str, Any]:
        output.unlink(missing_ok=True)
        return {"rows": merge_sorted(inputs, SCHEMA, output, now_ms=0).row_count}

    return run


def _datafusion(folder: Path) -> Callable[[], Mapping[str, Any]]:
    """The declared order and one stream a file are all that makes it merge; the rest is as it comes."""
    from datafusion import SessionConfig, SessionContext

    files = len(list((folder / "in").iterdir()))
    config = SessionConfig().with_target_partitions(files).with_repartition_file_scans(False)
    output = folder / "datafusion.parquet"

    def run() -> Mapping[str, Any]:
        output.unlink(missing_ok=True)
        context = SessionContext(config)
        context.sql(
            f"CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION '{folder}/in/' "
            f"WITH ORDER ({', '.join(f'{name} ASC NULLS LAST' for name in SCHEMA.key_names)})"
        )
        done = context.sql(
            f"COPY (SELECT * FROM t ORDER BY {', '.join(f'{n} ASC NULLS LAST' for n in SCHEMA.key_names)}) "
            f"TO '{output}' STORED AS PARQUET OPTIONS ('format.compression' 'zstd(1)')"
        ).collect()
        return {"rows": done[0].column(0)[0].as_py()}

    return run


def _duckdb(folder: Path) -> Callable[[], Mapping[str, Any]]:
    import duckdb

    output = folder / "duckdb.parquet"

    def run() -> Mapping[str, Any]:
        output.unlink(missing_ok=True)
        with duckdb.connect() as connection:
            connection.execute(f"SET temp_directory = '{folder}/duckdb-spill'")
            done = connection.execute(
                f"COPY (SELECT * FROM read_parquet('{folder}/in/*.parquet') ORDER BY {_KEYS}) "
                f"TO '{output}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)"
            ).fetchone()
        return {"rows": done[0] if done else 0}

    return run


def _spark(folder: Path) -> Callable[[], Mapping[str, Any]]:
    import pyarrow.parquet as pq

    from dormouse.spark.session import spark_session

    output = folder / "spark"
    level = {"spark.hadoop.parquet.compression.codec.zstd.level": "1"}
    session = spark_session(driver_memory="8g", config=level)

    def run() -> Mapping[str, Any]:
        shutil.rmtree(output, ignore_errors=True)
        rows = session.read.parquet(str(folder / "in")).orderBy(*SCHEMA.key_names)
        rows.write.option("compression", "zstd").parquet(str(output))
        return {"rows": sum(pq.read_metadata(path).num_rows for path in output.glob("*.parquet"))}

    return run


_SIDES: dict[str, Callable[[Path], Callable[[], Mapping[str, Any]]]] = {
    "dormouse": _dormouse,
    "datafusion": _datafusion,
    "duckdb": _duckdb,
    "spark": _spark,
}

if __name__ == "__main__":
    main()
