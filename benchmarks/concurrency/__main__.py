"""Do many clients see exactly what is committed, while the table is written, compacted and collected?

100 clients look up keys of a table of 1,000 leaves by way of `dormouse serve`. A writer adds ever larger
versions of the keys, and publishes what was acknowledged: a look-up that begins afterwards must see it, each
version once. Compaction and collection (gc_delay_seconds 2) run meanwhile, each in a process of its own; the
same look-ups of the idle table, before, are what the figures are compared with.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import dormouse as dm
from benchmarks.concurrency.clients import Clients, Lookups, Target, clients, through_service
from benchmarks.concurrency.ledger import Ledger, row, rows_of
from benchmarks.concurrency.upkeep import COUNTS, Counts, prepare, upkeep
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, values


@dataclass(frozen=True)
class Plan:
    """`at_least` of each of the counts happened before the end, up to `seconds_max`.

    `warm_seconds` are not timed.
    """

    clients: int = amount(100, help="[100]")
    processes: int = amount(4)
    leaves: int = amount(1_000, help="[1000]")
    gc_delay_seconds: float = amount(2)
    warm_seconds: float = amount(5, 3)
    idle_seconds: float = amount(20, 5)
    seconds: float = amount(60, 12)
    seconds_max: float = amount(300)
    at_least: int = amount(10)
    through: str = amount(
        "service",
        choices=("service", "library"),
        help="`dormouse serve` and its client, or `table.query` in the clients' processes",
    )


@dataclass(frozen=True)
class Outcome:
    """`lost_rows` were acknowledged, and are not there in the end, or not once."""

    idle: Lookups
    busy: Lookups
    counts: Counts
    failures: list[str]
    lost_rows: int


def compare(target: Target, plan: Plan, tell: Tell) -> Outcome:
    """Makes the table, and measures."""
    ledger, counts = Ledger(plan.leaves), Counts()
    tell(f"a table of {plan.leaves:,} leaves")
    prepare(target, ledger, plan.gc_delay_seconds)
    with clients(target, ledger, plan.clients, plan.processes) as them:
        tell(f"{plan.clients} clients look up keys, and nothing else goes on")
        warm = them.measure(_over(plan.warm_seconds))
        idle = them.measure(_over(plan.idle_seconds))
        idle.add(replace(warm, seconds=[]))
        tell("now with ingest, compaction and collection")
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
    """How many rows are missing, too many, or not as they were sent, when everything has come to rest."""
    wanted = Counter(
        row(key, version) for key in range(ledger.keys) for version in range(1, ledger.acknowledged[key] + 1)
    )
    with dm.connect(target.dsn, target.objects, read_only=True) as instance:
        found = Counter(rows_of(instance.table(target.table).query()))
    return sum(((wanted - found) + (found - wanted)).values())


def run(target: Target, plan: Plan, tell: Tell = lambda _: None) -> Figures:
    """Every figure, by name."""
    with dm.connect(target.dsn, target.objects):
        pass  # a service reads an instance, and makes none
    with through_service(target) if plan.through == "service" else nullcontext(target) as asked:
        return figures(compare(asked, plan, tell), plan)


def figures(outcome: Outcome, plan: Plan) -> Figures:
    """Every figure, by name; failures first."""
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
        return run(Target(place.dsn, place.objects), plan, tell)


BENCHMARK = Benchmark(
    "concurrency",
    __doc__,
    Plan,
    measure,
    [
        "{clients} clients of the {through}, {leaves:,} leaves; meanwhile {ingests:,} ingests, "
        "{jobs:,} jobs of compaction, {collected:,} files collected",
        Grid(
            {"_idle": "idle", "": "all of it at once"},
            {"lookups_per_second{}": "look-ups/s", "p50_ms{}": "p50 ms", "p99_ms{}": "p99 ms"},
        ),
        values({"lookups_per_second_vs_idle": "look-ups/s ÷ idle", "p99_vs_idle": "p99 ÷ idle"}),
        "{errors} errors, {wrong_rows} wrong rows, {stale_reads} stale reads in {lookups:,} look-ups",
        "{examples}",
    ],
)

if __name__ == "__main__":
    found = BENCHMARK.main()
    sys.exit(bool(found["errors"] or found["wrong_rows"] or found["stale_reads"]))
