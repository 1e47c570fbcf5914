"""The cost of comparing digests in reads: a scan, a look-up of one key, and a sum in SQL.

Each is measured without comparison, at the first read of the file in a process, and at a later read in the
same process. These cases alternate in one process, on the only file of a table, with a warm page cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import dormouse as dm
from benchmarks.compaction import SCHEMA, Action, make_files, throughput, timed
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.report import Grid
from dormouse.api.table import Table
from dormouse.reading import checked_files

SIDES = ("plain", "first", "again")


@dataclass(frozen=True)
class Plan:
    files: int = amount(12, 4, help="files to load, which are then compacted into one [12]")
    rows: int = amount(300_000, 60_000, help="rows of each file [300,000]")
    rounds: int = amount(15, 5, help="counted rounds, after one that warms up [15]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures one kind of read after another. The three cases of each kind alternate."""
    found: Figures = {"rows": plan.files * plan.rows, "rounds": plan.rounds}
    with temporary_folder() as folder, dm.local(folder / "lake") as instance:
        tell("making files")
        make_files(folder, plan.files, plan.rows)
        table = instance.create_table("source", SCHEMA)
        for path in sorted((folder / "in").iterdir()):
            table.ingest(str(path), engine="local")
        table.compact(full=True, engine="local")
        [file] = table.files.all_files(0).files
        found["file_bytes"] = file.byte_count or 0
        for kind, (rows, read) in kinds(table, plan).items():
            tell(kind)
            sides = {f"{kind}_{side}": partial(timed, partial(_prepared, side, read)) for side in SIDES}
            seconds, _ = throughput(sides, plan.rounds, rows)
            for side in SIDES:
                found[f"{kind}_{side}_ms"] = round(median(seconds[f"{kind}_{side}"]) * 1000, 2)
    return found


def kinds(table: Table, plan: Plan) -> dict[str, tuple[int, Callable[[bool], int]]]:
    """Returns, for each kind of read, its number of rows, and the function that reads, given `verify`."""
    rows = plan.files * plan.rows

    def scan(verify: bool) -> int:
        return sum(batch.num_rows for batch in table.query(verify=verify))

    def look_up(verify: bool) -> int:
        table.query({"supplier": "Supplier#000000037"}, limit=1, verify=verify).read_all()
        return 1

    def add_up(verify: bool) -> int:
        statement = f"select count(*), sum({SCHEMA.values[0].name}) from source"
        table.sql(statement, verify=verify).read_all()
        return rows

    return {"scan": (rows, scan), "lookup": (1, look_up), "sql": (rows, add_up)}


def _prepared(side: str, read: Callable[[bool], int]) -> Action:
    """Prepares the process for a case, such as a first read; returns the action to be timed."""
    if side == "again":
        read(True)
    elif side == "first":
        checked_files._verified.clear()
    return lambda: read(side != "plain")


_LABELS = {"plain": ", not verified", "first": ", first read of the file", "again": ", read again"}
BENCHMARK = Benchmark(
    "verified_reads",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows in a file of {file_bytes:,} bytes; medians of {rounds} rounds",
        Grid(
            {
                f"{kind}_{side}": f"{kind}{_LABELS[side]}"
                for kind in ("scan", "lookup", "sql")
                for side in SIDES
            },
            {"{}_ms": "ms"},
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
