"""How long does an answer take, by a key and by ranges of keys? Beside DuckDB, Polars and PyIceberg.

DuckDB and Polars read the folder of the table's Parquet files, PyIceberg a table of the same files with its
SQL catalog; Dormouse is also asked in SQL. All give all columns in key order, of the table as it is now. The
page cache is warm, and so is each engine, in a process of its own; rounds in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.arguments import check_plot
from benchmarks.harness import orderly_end
from benchmarks.query.experiment import QUICK, Plan, measure
from benchmarks.query.lake import Lake, make
from benchmarks.query.report import plot, table
from benchmarks.state_tables import own_database
from dormouse.errors import pip_install

_NEEDED = ("datafusion", "duckdb", "polars", "pyiceberg", "psycopg2")


def main(given: list[str] | None = None) -> None:
    orderly_end()
    arguments = parse(given)
    found = run(QUICK if arguments.quick else Plan(), verbose=not arguments.json)
    if arguments.plot:
        plot(found, arguments.plot)
    print(json.dumps(found) if arguments.json else table(found))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ends with one clear line when they are wrong or a package is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.query", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows: the same figures in under a minute")
    parser.add_argument("--json", action="store_true", help="one object on one line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    arguments = parser.parse_args(given)
    check_plot(parser, arguments.plot)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        wanted = pip_install("local", "query", "benchmark")
        parser.error(f"not installed: {', '.join(missing)}; {wanted}")
    return arguments


def run(plan: Plan, *, verbose: bool) -> dict[str, Any]:
    """Every figure, by name."""
    from dormouse.embedded.postgres import EmbeddedPostgres

    tell = _tell if verbose and sys.stderr.isatty() else _tell_nobody
    with (
        tempfile.TemporaryDirectory(prefix="dormouse-benchmark-") as folder,
        EmbeddedPostgres(Path(folder) / "server") as server,
        own_database(server.dsn) as dsn,
    ):
        lake = Lake(dsn, Path(folder), plan.leaves, plan.ingests, plan.rows)
        make(lake, tell)
        return measure(lake, plan, tell)


def _tell(text: str) -> None:
    print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def _tell_nobody(_: str) -> None:
    pass


if __name__ == "__main__":
    main()
