"""The plan of the benchmark of commits, and the server and tables that its parts share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

from benchmarks.harness.command import amount, layout
from benchmarks.harness.place import Place
from benchmarks.state_tables import StateTable, Tables
from dormouse.postgres import ConnectionSupplier

BATCHES = (1, 10, 100, 500, 1_000)
PARTS = (
    "batches",
    "alone",
    "log",
    "adding",
    "assigning",
    "creating_jobs",
    "idle_latency",
    "queue",
    "tables",
    "layouts",
)


@dataclass(frozen=True)
class Plan:
    """The amounts of work. They are per round in parts that have rounds."""

    rounds: int = amount(3, 1)
    jobs_of_batch: tuple[int, ...] = amount(
        (1_500, 4_000, 10_000, 15_000, 15_000), (100, 300, 600, 1_000, 1_000)
    )
    """The number of jobs for each batch size in BATCHES."""
    jobs_of_two: int = amount(15_000, 1_000)
    """The number of jobs that two committers commit with each of the large batch sizes."""
    jobs_alone: int = amount(1_000, 100)
    """The number of jobs that Dormouse commits one by one, and as many that pgbench commits."""
    jobs_of_eight: int = amount(2_400, 240)
    jobs_of_queue: int = amount(15_000, 1_000)
    add_commits: int = amount(10, 2)
    files_per_commit: int = amount(10_000)
    assignments: int = amount(15_000, 1_000)
    leaves: int = amount(65_536, 4_096)
    leaves_of_layouts: int = amount(65_536, 1_024)
    tables: tuple[int, ...] = amount((1, 10, 1_000))
    jobs_over_tables: int = amount(12_000, 3_000)
    latencies: int = amount(300, 30)
    profiled_batches: int = amount(20, 6)
    layout: str = layout()
    only: Sequence[str] = amount(
        PARTS, action="append", choices=PARTS, help="run only this part; may be repeated"
    )
    profile: bool = amount(False, action="store_true", help="only profile where the time of a batch goes")


@dataclass(frozen=True)
class Bench:
    place: Place
    tables: Tables
    plan: Plan

    @property
    def layout(self) -> str:
        return self.plan.layout

    @property
    def dsn(self) -> str:
        return self.place.dsn

    def claimed(self, name: str, leaves: int) -> tuple[StateTable, Iterator[int]]:
        """Makes a table with a compaction job on each leaf; returns the table, and its jobs at random."""
        table = self.tables.make(name, leaves, self.layout, claimed_leaves=leaves)
        return table, iter(shuffled(table))

    def supplier(self) -> AbstractContextManager[ConnectionSupplier]:
        """Opens a supplier with one connection."""
        return closing(ConnectionSupplier(self.dsn, connections_max=1))

    def check_applied(self, table: StateTable, expected: int) -> None:
        """Raises RuntimeError unless the expected number of commits to the table are applied."""
        applied = self.tables.applied(table)
        if applied != expected:
            raise RuntimeError(f"{applied} of {expected} commits to {table.record.name} are applied")


def shuffled(table: StateTable) -> list[int]:
    jobs = list(range(table.leaves))
    random.Random(table.record.table_id).shuffle(jobs)
    return jobs
