"""Compaction commits: by the size of the batch and the number of committers; one by one beside pgbench."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.commits.bench import BATCHES, Bench, median_of_ratios
from benchmarks.commits.pgbench import Pgbench
from benchmarks.commits.together import Share, divided, rate
from benchmarks.state_tables import StateTable

CLIENTS = 8
_LARGE = BATCHES[-2:]


def by_batch(bench: Bench) -> dict[str, Any]:
    """Commits a second by one committer, and by two threads or processes; the best median is the figure."""
    plan = bench.plan
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(plan.rounds):
        jobs = sum(plan.jobs_of_batch) + 2 * len(_LARGE) * plan.jobs_of_two
        table = bench.tables.with_leaves(f"batches_{number}", jobs, bench.layout)
        for name, shares in _variants(bench, table):
            rates[name].append(rate(bench.dsn, shares))
        _check(bench, table, jobs)
    medians = {f"replace_commits_per_s_{name}": round(median(found), 1) for name, found in rates.items()}
    return {"replace_commits_per_s": max(medians.values()), **medians}


def alone(bench: Bench) -> dict[str, Any]:
    """One commit a transaction: the store's synchronous call, and pgbench with the store's statement."""
    plan = bench.plan
    ours, theirs, looked_up = [], [], []
    ours_together, theirs_together = [], []
    per_round = plan.jobs_alone + plan.jobs_of_eight
    table = bench.tables.with_leaves("alone", 2 * plan.rounds * per_round, bench.layout)
    jobs = bench.shuffled(table)
    pgbench = Pgbench(bench.dsn, bench.folder, table)
    pgbench.prepare(list(islice(jobs, plan.rounds * per_round)))
    for number in range(plan.rounds):
        first = number * per_round

        def run_pgbench(first: int = first) -> None:
            found = pgbench.run(first, plan.jobs_alone)
            theirs.append(found.statements_per_s(1))
            looked_up.append(found.tps)

        def run_ours() -> None:
            ours.append(rate(bench.dsn, [Share(table, list(islice(jobs, plan.jobs_alone)), 0)]))

        def run_pgbench_together(first: int = first) -> None:
            found = pgbench.run(first + plan.jobs_alone, plan.jobs_of_eight, CLIENTS)
            theirs_together.append(found.statements_per_s(CLIENTS))

        def run_ours_together() -> None:
            halves = divided(list(islice(jobs, plan.jobs_of_eight)), 2)
            shares = [Share(table, half, 0, CLIENTS // 2) for half in halves]
            ours_together.append(rate(bench.dsn, shares))

        turns = [run_pgbench, run_ours, run_pgbench_together, run_ours_together]
        for run in turns if number % 2 == 0 else reversed(turns):
            run()
    _check(bench, table, 2 * plan.rounds * per_round)
    return {
        "replace_single_vs_pgbench": round(median_of_ratios(ours, theirs), 3),
        f"replace_{CLIENTS}_vs_pgbench": round(median_of_ratios(ours_together, theirs_together), 3),
        "pgbench_tps": round(median(theirs), 1),
        "pgbench_tps_with_lookup": round(median(looked_up), 1),
        f"pgbench_tps_{CLIENTS}": round(median(theirs_together), 1),
        "replace_single_per_s": round(median(ours), 1),
        f"replace_single_per_s_{CLIENTS}": round(median(ours_together), 1),
    }


def _variants(bench: Bench, table: StateTable) -> Iterator[tuple[str, list[Share]]]:
    jobs = bench.shuffled(table)
    for batch, count in zip(BATCHES, bench.plan.jobs_of_batch, strict=True):
        yield str(batch), [Share(table, list(islice(jobs, count)), batch)]
    for batch in _LARGE:
        some = list(islice(jobs, bench.plan.jobs_of_two))
        yield f"{batch}_two_threads", [Share(table, some, batch, 2)]
        some = list(islice(jobs, bench.plan.jobs_of_two))
        yield f"{batch}_two_processes", [Share(table, half, batch) for half in divided(some, 2)]


def _check(bench: Bench, table: StateTable, expected: int) -> None:
    applied = bench.tables.applied(table)
    if applied != expected:
        raise RuntimeError(f"{applied} of {expected} commits to {table.record.name} are applied")
