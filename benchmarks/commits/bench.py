"""What every part of the benchmark needs: where the server is, and how much to do."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.state_tables import StateTable, Tables

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
    dsn: str
    folder: Path
    tables: Tables
    plan: Plan
    layout: str = "file_table"

    def shuffled(self, table: StateTable) -> Iterator[int]:
        """The table's jobs, in the order in which they end: any."""
        jobs = list(range(table.jobs))
        random.Random(table.record.table_id).shuffle(jobs)
        return iter(jobs)


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the rounds, whose runs share the machine's noise."""
    return statistics.median(us / them for us, them in zip(ours, theirs, strict=True))
