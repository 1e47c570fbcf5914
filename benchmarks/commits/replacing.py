"""Compaction commits in batches of several sizes by one and two committers, and one by one like pgbench's."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.commits.bench import BATCHES, Bench
from benchmarks.commits.pgbench import Pgbench
from benchmarks.committers import rate
from benchmarks.harness.report import median_ratio, turns

CLIENTS = 8
LARGE = BATCHES[-2:]
BATCH_OF_LOG = 500
TWO = {"two_threads": (2, 1), "two_processes": (1, 2)}
"""The two ways to run two committers, each with its threads per process and its number of processes."""


def by_batch(bench: Bench) -> dict[str, Any]:
    """Measures commits per second of one committer, of two threads and of two processes.

    The figure `replace_commits_per_s` is the largest median of all sizes of batches.
    """
    plan = bench.plan
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(plan.rounds):
        jobs = sum(plan.jobs_of_batch) + len(TWO) * len(LARGE) * plan.jobs_of_two
        table, order = bench.claimed(f"batches_{number}", jobs)
        for batch, count in zip(BATCHES, plan.jobs_of_batch, strict=True):
            rates[str(batch)].append(rate(bench.dsn, table, list(islice(order, count)), batch))
        for batch in LARGE:
            for name, (threads, processes) in TWO.items():
                some = list(islice(order, plan.jobs_of_two))
                rates[f"{batch}_{name}"].append(rate(bench.dsn, table, some, batch, threads, processes))
        bench.check_applied(table, jobs)
    medians = {f"replace_commits_per_s_{name}": round(median(found), 1) for name, found in rates.items()}
    return {"replace_commits_per_s": max(medians.values()), **medians}


def alone(bench: Bench) -> dict[str, Any]:
    """Measures one commit per transaction: by the store's synchronous call, and by pgbench."""
    plan = bench.plan
    per_round = plan.jobs_alone + plan.jobs_of_eight
    table, jobs = bench.claimed("alone", 2 * plan.rounds * per_round)
    pgbench = Pgbench(bench.dsn, bench.place.folder, table)
    pgbench.prepare(list(islice(jobs, plan.rounds * per_round)))
    rates: dict[str, list[float]] = defaultdict(list)

    def run_pgbench(first: int, count: int, clients: int) -> None:
        found = pgbench.run(first, count, clients)
        rates[f"pgbench_tps_{clients}"].append(found.statements_per_s(clients))
        rates[f"looked_up_{clients}"].append(found.tps)

    def run_ours(count: int, processes: int, threads: int) -> None:
        found = rate(bench.dsn, table, list(islice(jobs, count)), 0, threads, processes)
        rates[f"ours_{threads * processes}"].append(found)

    for number in range(plan.rounds):
        first = number * per_round
        turns = [
            partial(run_pgbench, first, plan.jobs_alone, 1),
            partial(run_ours, plan.jobs_alone, 1, 1),
            partial(run_pgbench, first + plan.jobs_alone, plan.jobs_of_eight, CLIENTS),
            partial(run_ours, plan.jobs_of_eight, 2, CLIENTS // 2),
        ]
        for run in turns if number % 2 == 0 else reversed(turns):
            run()
    bench.check_applied(table, table.leaves)

    def ratio(clients: int) -> float:
        return round(median_ratio(rates[f"ours_{clients}"], rates[f"pgbench_tps_{clients}"]), 3)

    medians = {name: round(median(found), 1) for name, found in rates.items()}
    return {
        "replace_single_vs_pgbench": ratio(1),
        f"replace_{CLIENTS}_vs_pgbench": ratio(CLIENTS),
        "pgbench_tps": medians["pgbench_tps_1"],
        "pgbench_tps_with_lookup": medians["looked_up_1"],
        f"pgbench_tps_{CLIENTS}": medians[f"pgbench_tps_{CLIENTS}"],
        "replace_single_per_s": medians["ours_1"],
        f"replace_single_per_s_{CLIENTS}": medians[f"ours_{CLIENTS}"],
    }


def without_log(bench: Bench) -> dict[str, Any]:
    """Compares commits in batches with and without the part of the statement that writes the removal log."""
    plan, rates = bench.plan, defaultdict[bool, list[float]](list)
    table, order = bench.claimed("log", (2 * plan.rounds) * plan.jobs_of_two)
    for _, logged in turns([True, False], plan.rounds, step=1):
        jobs = list(islice(order, plan.jobs_of_two))
        rates[logged].append(rate(bench.dsn, table, jobs, BATCH_OF_LOG, logged=logged))
    bench.check_applied(table, table.leaves)
    return {
        "replace_logged_vs_not": round(median_ratio(rates[True], rates[False]), 3),
        "replace_commits_per_s_logged": round(median(rates[True]), 1),
        "replace_commits_per_s_not_logged": round(median(rates[False]), 1),
    }
