"""Do many clients see exactly what is committed, while the table is written, compacted and collected?

100 clients look up keys of a table of 1,000 leaves by way of `dormouse serve`. A writer adds ever larger
versions of the keys, and publishes what was acknowledged: a look-up that begins afterwards must see it, each
version once. Compaction and collection (gc_delay_seconds 2) run meanwhile, each in a process of its own; the
same look-ups of the idle table, before, are what the figures are compared with.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import dormouse as dm
from benchmarks.concurrency.clients import Clients, Lookups, Target, clients, served
from benchmarks.concurrency.ledger import Ledger, row, rows_of
from benchmarks.concurrency.upkeep import Counts, prepare, upkeep
from benchmarks.harness.command import Benchmark, Figures, Tell, at_least_one
from benchmarks.harness.place import own_place
from benchmarks.harness.report import grid


@dataclass(frozen=True)
class Plan:
    """`at_least` has happened before the end, up to `seconds_max`; `warm_seconds` are not timed."""

    clients: int = 100
    processes: int = 4
    leaves: int = 1_000
    gc_delay_seconds: float = 2
    warm_seconds: float = 5
    idle_seconds: float = 20
    seconds: float = 60
    seconds_max: float = 300
    at_least: dict[str, int] = field(default_factory=lambda: {"ingests": 10, "jobs": 10, "collected": 10})


QUICK = Plan(warm_seconds=3, idle_seconds=5, seconds=12)


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
        happened = all(counts[name] >= number for name, number in plan.at_least.items())
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


def run(target: Target, plan: Plan, *, through: str = "service", tell: Tell = lambda _: None) -> Figures:
    """Every figure, by name."""
    with dm.connect(target.dsn, target.objects):
        pass  # a service reads an instance, and makes none
    with served(target) if through == "service" else nullcontext(target) as asked:
        return figures(compare(asked, plan, tell), plan, through=through)


def figures(outcome: Outcome, plan: Plan, *, through: str) -> Figures:
    """Every figure, by name; failures first."""
    idle, busy = outcome.idle, outcome.busy
    found: Figures = {
        "errors": busy.errors + idle.errors + len(outcome.failures),
        "wrong_rows": busy.wrong + idle.wrong + outcome.lost_rows,
        "stale_reads": busy.stale + idle.stale,
        "clients": plan.clients,
        "leaves": plan.leaves,
        "through": through,
        "lookups": len(busy.seconds),
    }
    for name, side in (("", busy), ("_idle", idle)):
        found |= {f"p{percent}_ms{name}": round(side.percentile_ms(percent), 1) for percent in (50, 99)}
        found[f"lookups_per_second{name}"] = round(side.per_second, 1)
    for name, key in (("p99", "p99_ms"), ("lookups_per_second", "lookups_per_second")):
        before = found[f"{key}_idle"]
        found[f"{name}_vs_idle"] = round(found[key] / before, 2) if before else None
    found |= {name: outcome.counts[name] for name in plan.at_least}
    if examples := [*outcome.failures, *idle.examples, *busy.examples][:10]:
        found["examples"] = examples
    return found


def measure(arguments: Namespace, tell: Tell) -> Figures:
    plan = replace(QUICK if arguments.quick else Plan(), clients=arguments.clients, leaves=arguments.leaves)
    with own_place() as place:
        return run(Target(place.dsn, place.objects), plan, through=arguments.through, tell=tell)


def text(found: Figures) -> str:
    asked = "dormouse serve" if found["through"] == "service" else "table.query"
    labels = {"_idle": "idle", "": "all of it at once"}
    heads = {"look-ups/s": "lookups_per_second{}", "p50 ms": "p50_ms{}", "p99 ms": "p99_ms{}"}
    wrong = f"{found['errors']} errors, {found['wrong_rows']} wrong rows, {found['stale_reads']} stale reads"
    return "\n".join(
        [
            f"{found['clients']} clients of {asked}, {found['leaves']:,} leaves; meanwhile "
            f"{found['ingests']:,} ingests, {found['jobs']:,} jobs of compaction, "
            f"{found['collected']:,} files collected",
            grid(found, labels, heads),
            f"{wrong} in {found['lookups']:,} look-ups",
            *found.get("examples", ()),
        ]
    )


BENCHMARK = Benchmark(
    "concurrency",
    __doc__,
    measure,
    text,
    quick="fewer seconds: the same figures in a minute",
    options={
        "--clients": {"type": at_least_one, "default": 100, "help": "[100]"},
        "--leaves": {"type": at_least_one, "default": 1_000, "help": "[1000]"},
        "--through": {
            "choices": ("service", "library"),
            "default": "service",
            "help": "`dormouse serve` and its client, or `table.query` in the clients' processes",
        },
    },
)

if __name__ == "__main__":
    found = BENCHMARK.main()
    sys.exit(bool(found["errors"] or found["wrong_rows"] or found["stale_reads"]))
