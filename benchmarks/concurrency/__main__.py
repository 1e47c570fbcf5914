"""Concurrency: many clients read a table while it is written, compacted and collected.

100 clients look up keys of a table of 1,000 leaves through `dormouse serve`. A writer adds new versions of
the keys and publishes the acknowledged ones. A look-up that begins afterwards must return each acknowledged
version exactly once. Compaction and garbage collection (gc_delay_seconds 2) run at the same time, each in a
separate process. The figures are compared with the same look-ups of the idle table.

The second part runs one service process per core. It measures the look-ups per second of 32 connections of
`wrk`, a client that needs little CPU time (a package of most systems).
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import dormouse as dm
from benchmarks.concurrency.clients import Clients, Lookups, Target, clients, through_service
from benchmarks.concurrency.ledger import KEYS_PER_LEAF, Ledger, row, rows_of
from benchmarks.concurrency.served import PROGRAM, Served, is_there, look_up
from benchmarks.concurrency.upkeep import COUNTS, Counts, prepare, upkeep
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, values


@dataclass(frozen=True)
class Plan:
    """The amounts of work and the durations.

    The busy phase lasts at least `seconds`. It continues, for at most `seconds_max` in all, until each of
    COUNTS has reached `at_least`. The first `warm_seconds` are not timed.
    """

    clients: int = amount(100, help="clients that look up keys [100]")
    processes: int = amount(4)
    leaves: int = amount(1_000, help="leaves of the table [1000]")
    gc_delay_seconds: float = amount(2)
    warm_seconds: float = amount(5, 3)
    idle_seconds: float = amount(20, 5)
    seconds: float = amount(60, 12)
    seconds_max: float = amount(300)
    at_least: int = amount(10)
    connections: int = amount(32)
    served_seconds: float = amount(15, 4)
    through: str = amount(
        "service",
        choices=("service", "library"),
        help="`dormouse serve` and its client, or `table.query` in the clients' processes [service]",
    )


@dataclass(frozen=True)
class Outcome:
    """The results of both phases."""

    idle: Lookups
    busy: Lookups
    counts: Counts
    failures: list[str]
    lost_rows: int
    """The number of missing, additional or changed rows at the end."""


def compare(target: Target, plan: Plan, tell: Tell) -> Outcome:
    """Makes the table, and measures look-ups of the idle and then of the busy table."""
    ledger, counts = Ledger(plan.leaves), Counts()
    tell(f"a table of {plan.leaves:,} leaves")
    prepare(target, ledger, plan.gc_delay_seconds)
    with clients(target, ledger, plan.clients, plan.processes) as them:
        tell(f"{plan.clients} clients look up keys of the idle table")
        warm = them.measure(_over(plan.warm_seconds))
        idle = them.measure(_over(plan.idle_seconds))
        idle.add(replace(warm, seconds=[]))
        tell(f"{plan.clients} clients look up keys during ingest, compaction and collection")
        with upkeep(target, ledger, counts) as stop:
            busy = _busy(them, plan, counts)
            failures = stop()
    return Outcome(idle, busy, counts, failures, _lost(target, ledger))


def _busy(them: Clients, plan: Plan, counts: Counts) -> Lookups:
    over, too_late = _over(plan.seconds), _over(plan.seconds_max)

    def done() -> bool:
        happened = all(counts[name] >= plan.at_least for name in COUNTS)
        return too_late() or (over() and happened)

    return them.measure(done)


def _over(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _lost(target: Target, ledger: Ledger) -> int:
    """Counts the rows that are missing, additional or changed after all writers have stopped."""
    wanted = Counter(
        row(key, version) for key in range(ledger.keys) for version in range(1, ledger.acknowledged[key] + 1)
    )
    with dm.connect(target.dsn, target.objects, read_only=True) as instance:
        found = Counter(rows_of(instance.table(target.table).query()))
    return sum(((wanted - found) + (found - wanted)).values())


def served_to_few(target: Target, plan: Plan, folder: Path, tell: Tell) -> Figures:
    """Measures look-ups of the idle table through one service process per core, after a run to warm up.

    First it compacts the table as far as maintenance would.
    """
    tell("compaction")
    with dm.connect(target.dsn, target.objects) as instance:
        while instance.table(target.table).compact(engine="local").jobs_run:
            pass
    with through_service(target, ["--workers", str(os.cpu_count() or 1)]) as service:
        tell(f"{plan.connections} connections of {PROGRAM}")
        for _ in range(2):
            keys = plan.leaves * KEYS_PER_LEAF
            result = look_up(str(service.url), keys, plan.connections, plan.served_seconds, folder)
    return _served_figures(result, plan.connections)


def _served_figures(result: Served, connections: int) -> Figures:
    return {
        f"served_lookups_per_s_{connections}": round(result.per_second, 1),
        f"p99_ms_{connections}": round(result.p99_ms, 1),
        "served_failed": result.failed,
    }


def run(target: Target, plan: Plan, tell: Tell = lambda _: None) -> Figures:
    """Returns every figure except those of `served_to_few`."""
    with dm.connect(target.dsn, target.objects):
        pass  # creates the instance, because a service cannot
    with through_service(target) if plan.through == "service" else nullcontext(target) as reached:
        return figures(compare(reached, plan, tell), plan)


def figures(outcome: Outcome, plan: Plan) -> Figures:
    """Returns every figure of the outcome, failures first."""
    idle, busy = outcome.idle, outcome.busy
    found: Figures = {
        "errors": busy.errors + idle.errors + len(outcome.failures),
        "wrong_rows": busy.wrong + idle.wrong + outcome.lost_rows,
        "stale_reads": busy.stale + idle.stale,
        "clients": plan.clients,
        "leaves": plan.leaves,
        "through": plan.through,
        "lookups": len(busy.seconds),
    }
    for name, side in (("", busy), ("_idle", idle)):
        found |= {f"p{percent}_ms{name}": round(side.percentile_ms(percent), 1) for percent in (50, 99)}
        found[f"lookups_per_second{name}"] = round(side.per_second, 1)
    for name, key in (("p99", "p99_ms"), ("lookups_per_second", "lookups_per_second")):
        before = found[f"{key}_idle"]
        found[f"{name}_vs_idle"] = round(found[key] / before, 2) if before else None
    found |= {name: outcome.counts[name] for name in COUNTS}
    if examples := [*outcome.failures, *idle.examples, *busy.examples][:10]:
        found["examples"] = examples
    return found


def measure(plan: Plan, tell: Tell) -> Figures:
    with own_place() as place:
        target = Target(place.dsn, place.objects)
        found = run(target, plan, tell)
        if plan.through == "service":
            found |= served_to_few(target, plan, place.folder, tell)
        return found


def refusal(arguments: Namespace) -> str | None:
    needed = arguments.through != "library"
    return f"not installed: {PROGRAM}; it is a package of most systems" if needed and not is_there() else None


BENCHMARK = Benchmark(
    "concurrency",
    __doc__,
    Plan,
    measure,
    [
        "{clients} clients of the {through}, {leaves:,} leaves; at the same time {ingests:,} ingests, "
        "{jobs:,} compaction jobs, {collected:,} files collected",
        Grid(
            {"_idle": "idle", "": "busy"},
            {"lookups_per_second{}": "look-ups/s", "p50_ms{}": "p50 ms", "p99_ms{}": "p99 ms"},
        ),
        values({"lookups_per_second_vs_idle": "look-ups/s ÷ idle", "p99_vs_idle": "p99 ÷ idle"}),
        "served to 32 connections: {served_lookups_per_s_32:,} look-ups/s, p99 {p99_ms_32} ms, "
        "{served_failed} failed",
        "{errors} errors, {wrong_rows} wrong rows, {stale_reads} stale reads in {lookups:,} look-ups",
        "{examples}",
    ],
    refusal=refusal,
)

if __name__ == "__main__":
    found = BENCHMARK.main()
    sys.exit(
        bool(found["errors"] or found["wrong_rows"] or found["stale_reads"] or found.get("served_failed"))
    )
