"""The cost of protection against corrupted files: ingest, compaction and scans with and without it.

Each pair runs in alternation in one process, on the files of one table, with a warm page cache. Without
protection, files are not hashed when written, compactions do not compare digests of their inputs, and readers
do not compare sizes of files with the plan. Checks and backups are measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import dormouse as dm
from benchmarks.compaction import RATES, SCHEMA, Action, folder_bytes, make_files, throughput, timed
from benchmarks.durability_checks import backups, deep_checks, metadata
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import temporary_folder
from benchmarks.harness.report import Grid, median_ratio, values
from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.objects import ObjectStore, open_store

if TYPE_CHECKING:
    import pyarrow as pa

PARTITIONS = 16
_SWITCHED_OFF: Mapping[str, Callable[..., Any]] = {
    "dormouse.writing.parquet_file.digest_of_file": lambda path: None,
    "dormouse.writing.compaction_job.JobInputs._check_digests": lambda inputs: None,
    "dormouse.reading.scan_session.checked_sizes": lambda *_: ExitStack(),
}


@dataclass(frozen=True)
class Plan:
    files: int = amount(12, 6, help="files of the table that is scanned and compacted [12]")
    rows: int = amount(300_000, 60_000, help="rows of each file [300,000]")
    lookups: int = amount(100, 50, help="look-ups of one key in a round [100]")
    rounds: int = amount(15, 5, help="counted rounds, after one that warms up [15]")
    leaves: int = amount(132_000, 5_000, help="leaves of the table whose metadata is checked [132,000]")
    files_per_leaf: int = amount(10, 10, help="files per leaf of that table [10]")
    backup_mb: int = amount(10_000, 200, help="megabytes of objects to back up [10,000]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures one kind of work after another. Runs with and without protection alternate."""
    found: Figures = {"files": plan.files, "rows": plan.files * plan.rows, "rounds": plan.rounds}
    with temporary_folder() as folder, dm.local(folder / "lake") as instance:
        tell("making files")
        make_files(folder, plan.files, plan.rows)
        found["input_bytes"] = folder_bytes(folder / "in")
        lake = Lake(instance, open_store(folder / "lake" / "objects"), folder, plan)
        for kind, (ratio, rows, prepare) in lake.kinds().items():
            tell(kind)
            sides = {f"{kind}_{how}": partial(_timed, prepare, how) for how in ("with", "without")}
            seconds, figures = throughput(sides, plan.rounds, rows)
            found |= figures
            found[ratio] = round(median_ratio(seconds[f"{kind}_without"], seconds[f"{kind}_with"]), 3)
        tell("deep checks")
        found |= deep_checks(instance, lake.source, folder / "lake" / "objects", plan.rounds)
        found |= backups(plan.backup_mb, tell, folder)
    return found | metadata(plan.leaves, plan.files_per_leaf, tell)


def _timed(prepare: Callable[[], Action], how: str) -> tuple[int, float]:
    with _unchecked() if how == "without" else ExitStack():
        return timed(prepare)


@contextmanager
def _unchecked() -> Iterator[None]:
    with ExitStack() as stack:
        for name, nothing in _SWITCHED_OFF.items():
            stack.enter_context(patch(name, nothing))
        yield


class Lake:
    """An instance with the rows of some files, and the operations to measure."""

    def __init__(self, instance: Instance, objects: ObjectStore, folder: Path, plan: Plan) -> None:
        self._instance = instance
        self._objects = objects
        self._folder = folder
        self._plan = plan
        self._numbers = count()
        self._last: Table | None = None
        self.source = instance.create_table("source", SCHEMA)
        for path in sorted((folder / "in").iterdir()):
            self.source.ingest(str(path), engine="local")

    def kinds(self) -> dict[str, tuple[str, int, Callable[[], Action]]]:
        """Returns the kinds of work. Each has a tuple of three parts:

        the name of its ratio, the number of rows of a run, and a function that prepares a run.
        """
        rows = self._plan.files * self._plan.rows
        return {
            "compaction": ("compaction_with_digests_vs_without", rows, self._compaction),
            "ingest": ("ingest_with_digests_vs_without", self._plan.rows, self._ingest),
            "scan": ("scan_vs_unchecked", rows, lambda: self._scan),
            "lookup": ("lookup_vs_unchecked", self._plan.lookups, lambda: self._look_up),
        }

    def _compaction(self) -> Action:
        """Prepares the compaction of a new table that has copies of the source's files."""
        made = self._table(compaction_strategy="basic", compaction_batch_files=self._plan.files)
        for number, file in enumerate(self.source.files.all_files(0).files):
            name = f"{made.files.table.object_prefix}{number}.parquet"
            for suffix in ("", ".sketches"):
                self._objects.copy(f"{file.filename}{suffix}", f"{name}{suffix}")
            references = tuple(replace(reference, filename=name) for reference in file.references)
            made.files.add_files_with_references([replace(file, filename=name, references=references)])
        return lambda: made.compact(engine="local").rows_written

    def _ingest(self) -> Action:
        import pyarrow.parquet as pq

        step = 10_000 // PARTITIONS
        points = [f"Supplier#{number:09d}" for number in range(step, step * PARTITIONS, step)]
        made = self._table(points)
        rows: pa.Table = pq.read_table(next((self._folder / "in").iterdir()))
        return lambda: made.ingest(rows, engine="local").rows

    def _scan(self) -> int:
        return sum(batch.num_rows for batch in self.source.query())

    def _look_up(self) -> int:
        """Queries at most one row of each of many suppliers. Returns the number of queries."""
        for number in range(self._plan.lookups):
            self.source.query({"supplier": f"Supplier#{number * 37:09d}"}, limit=1).read_all()
        return self._plan.lookups

    def _table(self, points: list[str] | None = None, **properties: Any) -> Table:
        """Drops the last table and creates a new one."""
        if self._last is not None:
            self._instance.drop_table(self._last.name)
        self._last = self._instance.create_table(
            f"t{next(self._numbers)}",
            SCHEMA,
            split_points=points or [],
            properties=dm.TableProperties(**properties),
        )
        return self._last


_KINDS = {
    "compaction_with": "compaction",
    "compaction_without": "  without digests",
    "ingest_with": "ingest",
    "ingest_without": "  without digests",
    "scan_with": "scan",
    "scan_without": "  without sizes",
    "lookup_with": "look-ups",
    "lookup_without": "  without sizes",
}
BENCHMARK = Benchmark(
    "durability",
    __doc__,
    Plan,
    measure,
    [
        "{files} files, {rows:,} rows, {input_bytes:,} bytes; medians of {rounds} rounds",
        Grid(_KINDS, RATES),
        values(
            {
                "compaction_with_digests_vs_without": "compaction, with ÷ without",
                "ingest_with_digests_vs_without": "ingest",
                "scan_vs_unchecked": "scan",
                "lookup_vs_unchecked": "look-ups",
                "check_vs_read": "deep check ÷ reading by pyarrow, rate",
                "check_rows_per_s": "deep check, rows/s",
                "check_mb_per_s": "deep check, MB/s",
                "metadata_files": "check of the metadata, files",
                "check_metadata_s": "  seconds",
                "check_metadata_mb": "  MB",
                "backup_mb": "backup of objects, MB",
                "backup_first_s": "  first backup, s",
                "backup_first_mb_per_s": "  first backup, MB/s",
                "backup_again_s": "  second backup without changes, s",
                "restore_s": "  restore, s",
            }
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
