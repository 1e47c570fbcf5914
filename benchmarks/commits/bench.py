"""What every part of the benchmark needs: where the server is, and how much to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness.place import Place
from benchmarks.making import Tables
from benchmarks.state_tables import StateTable
from dormouse.postgres import ConnectionSupplier

BATCHES = (1, 10, 100, 500, 1_000)


@dataclass(frozen=True)
class Plan:
    """How much is done, in each round where there are rounds."""

    rounds: int = 3
    jobs_of_batch: tuple[int, ...] = (1_500, 4_000, 10_000, 15_000, 15_000)
    """By batch size, as in BATCHES."""
    jobs_of_two: int = 15_000
    """Two committers, by each of the large batch sizes."""
    jobs_alone: int = 1_000
    """One by one, ours and pgbench's."""
    jobs_of_eight: int = 2_400
    jobs_of_queue: int = 15_000
    add_commits: int = 10
    files_per_commit: int = 10_000
    assignments: int = 15_000
    leaves: int = 65_536
    tables: tuple[int, ...] = (1, 10, 1_000)
    jobs_over_tables: int = 12_000
    latencies: int = 300
    profiled_batches: int = 20


QUICK = Plan(
    rounds=1,
    jobs_of_batch=(200, 500, 1_000, 1_500, 2_000),
    jobs_of_two=1_000,
    jobs_alone=200,
    jobs_of_eight=320,
    jobs_of_queue=1_000,
    add_commits=2,
    assignments=1_500,
    leaves=4_096,
    jobs_over_tables=1_000,
    latencies=50,
    profiled_batches=6,
)


@dataclass(frozen=True)
class Bench:
    place: Place
    tables: Tables
    plan: Plan
    layout: str = "file_table"

    @property
    def dsn(self) -> str:
        return self.place.dsn

    def claimed(self, name: str, leaves: int) -> tuple[StateTable, Iterator[int]]:
        """A table with a job on each leaf; and the jobs, in the order in which they end: any."""
        table = self.tables.make(name, leaves, self.layout, claimed_leaves=leaves)
        return table, iter(shuffled(table))

    @contextmanager
    def supplier(self) -> Iterator[ConnectionSupplier]:
        """One connection."""
        supplier = ConnectionSupplier(self.dsn, connections_max=1)
        try:
            yield supplier
        finally:
            supplier.close()

    def check_applied(self, table: StateTable, expected: int) -> None:
        """RuntimeError unless all commits to it are there."""
        applied = self.tables.applied(table)
        if applied != expected:
            raise RuntimeError(f"{applied} of {expected} commits to {table.record.name} are applied")


def shuffled(table: StateTable) -> list[int]:
    jobs = list(range(table.leaves))
    random.Random(table.record.table_id).shuffle(jobs)
    return jobs
